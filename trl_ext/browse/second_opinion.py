"""Both graders' verdicts on the same responses: where they disagree, a reward was hacked or a grader erred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_ext.rewards.extract import ANSWER_FORMATS, COMPATIBLE_FORMATS
from trl_ext.rewards.graders import Grade, compatible, strict


def grade_twice(rows: Sequence[dict[str, Any]], answer_format: str | None) -> None:
    """Add `graders`, each grader's `[correct, reason]` by its name, to the rows that can be graded.

    Args:
        rows: in the form of `plain_row`, with a reference answer each; others are left as they are.
        answer_format: how the responses were read; None, or a format of the user's own, leaves all rows as they are.
    """
    judged = [row for row in rows if _is_reference(row["truth"])]
    if answer_format is None or answer_format not in ANSWER_FORMATS or not judged:
        return
    responses, truths = [row["response"] for row in judged], [row["truth"] for row in judged]
    grades: dict[str, list[Grade]] = {"strict": strict(responses, truths, answer_format=answer_format)}
    if answer_format in COMPATIBLE_FORMATS:
        grades["compatible"] = compatible(responses, truths, answer_format=answer_format)
    for n, row in enumerate(judged):
        row["graders"] = {name: [verdicts[n].correct, verdicts[n].reason] for name, verdicts in grades.items()}


def disagree(row: dict[str, Any]) -> bool:
    """Whether one grader calls the response correct and another does not."""
    return len({correct for correct, _ in (row.get("graders") or {}).values()}) > 1


def _is_reference(value: object) -> bool:
    """Whether graders take it: a text, a number, or a list of these."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, (str, int, float)) for item in value)
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)
