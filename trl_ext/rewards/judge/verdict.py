"""A verdict is read from the judge's JSON object alone: no score is looked for in its prose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from trl_ext.rewards.judge.settings import Rubric


class NoVerdict(ValueError):
    """The judge's answer is no verdict; the message, in our words alone, says why, and is shown to the judge."""


@dataclass(frozen=True)
class Verdict:
    """Whole numbers by criterion, and what the judge said."""

    scores: Mapping[str, int]
    reason: str = ""


def read_verdict(text: str, rubric: Rubric) -> Verdict:
    """The verdict that is the whole of an answer, after a reasoning in `<think>` and within one block of code, if any.

    Raises:
        NoVerdict: it is no JSON object, or one of other fields or numbers, or has a field twice.
    """
    answer = text.rpartition("</think>")[2].strip()
    try:
        found = json.loads(_out_of_block(answer), object_pairs_hook=_once, parse_constant=_no_number)
    except NoVerdict:
        raise
    except (ValueError, RecursionError):
        raise NoVerdict("it was not one JSON object") from None
    return verdict_of(found, rubric)


def _out_of_block(answer: str) -> str:
    """What is in the block of code that an answer is; the answer, if it is none."""
    first, *lines = answer.split("\n")
    is_block = first.strip() in ("```", "```json") and lines[-1:] == ["```"]
    return "\n".join(lines[:-1]) if is_block else answer


def verdict_of(found: object, rubric: Rubric) -> Verdict:
    """The verdict in an object that JSON had; a `NoVerdict` for anything else."""
    if not isinstance(found, dict) or not isinstance(found.get("scores"), dict):
        raise NoVerdict('it had no object "scores"')
    if set(found) - {"reason", "scores"}:
        raise NoVerdict('it had other fields than "reason" and "scores"')
    scores = found["scores"]
    if set(scores) != set(rubric.criteria):
        raise NoVerdict(f"its scores were not those of {', '.join(rubric.criteria)}")
    for score in scores.values():
        if isinstance(score, bool) or not isinstance(score, int) or not 0 <= score <= rubric.scale:
            raise NoVerdict(f"a score was no whole number from 0 to {rubric.scale}")
    return Verdict({name: scores[name] for name in rubric.criteria}, _writable(found.get("reason", "")))


def _writable(reason: object) -> str:
    """A text that a file can hold: a cut emoji leaves half a character."""
    return str(reason).encode("utf-8", "replace").decode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise NoVerdict("it had a field twice")
    return fields


def _no_number(name: str) -> NoReturn:
    raise NoVerdict("a score was no whole number")
