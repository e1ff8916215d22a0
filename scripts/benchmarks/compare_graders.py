"""False accepts and false rejects by category: ours (both), math-verify, TRL's reward and plain string equality.

Two labeled sets: tests/data/grader_labels.jsonl, answers labeled by hand as *mathematically* correct or not, and the
rows of tests/data/grader_parity.jsonl, whose labels are the verdicts of the course's grader (so that its mistakes count
as correct there). Prints Markdown.

    python -m scripts.benchmarks.compare_graders
    python -m scripts.benchmarks.compare_graders --page docs/results/graders.md --show strict
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from trl_ext.io import markdown_table
from trl_ext.rewards import GRADERS
from trl_ext.rewards.graders import COMPATIBLE, STRICT, Comparison, compare_pairs
from trl_ext.rewards.ground_truth import accepted_answers
from trl_ext.rewards.workers.pool import Failure

from .grader import math_verify, trl_accuracy

DATA = Path(__file__).parents[2] / "tests" / "data"


class Row(NamedTuple):
    """One labeled answer."""

    category: str
    answer: str
    reference: str
    correct: bool


def labeled() -> list[Row]:
    """The answers labeled by hand."""
    rows = [json.loads(line) for line in (DATA / "grader_labels.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Row(row["category"], row["answer"], row["truth"], row["right"]) for row in rows]


def course_verdicts() -> list[Row]:
    """The answers of the parity rows, with the course grader's verdicts; rows without an answer are left out."""
    rows = []
    for line in (DATA / "grader_parity.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        answer_format = "boxed" if row["fn"] == "question_only" else "r1_zero"
        answer = GRADERS["compatible"]([row["response"]], [""], answer_format=answer_format)[0].answer
        references = accepted_answers(row["ground_truth"])
        if answer is not None and len(references) == 1:
            rows.append(Row(row["category"], answer, references[0], bool(row["expected"]["reward"])))
    return rows


def by(comparison: Comparison) -> Callable[[Sequence[tuple[str, str]]], list[bool]]:
    """Verdicts of a comparison of ours, in the workers; one that fails counts as incorrect."""

    def verdicts(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        compared = compare_pairs(comparison, pairs)
        return [not isinstance(v := compared[pair], Failure) and v[0] for pair in pairs]

    return verdicts


GRADES = {
    "strict": by(STRICT),
    "compatible": by(COMPATIBLE),
    "math-verify": math_verify,
    "TRL accuracy_reward": trl_accuracy,
    "string equality": lambda pairs: [answer.strip() == reference.strip() for answer, reference in pairs],
}


def table(rows: Sequence[Row], verdicts: dict[str, list[bool]]) -> str:
    """Markdown: per category `false accepts / false rejects` of each grader."""
    lines = []
    for category in [*sorted({row.category for row in rows}), "all"]:
        chosen = [i for i, row in enumerate(rows) if category in (row.category, "all")]
        correct = sum(rows[i].correct for i in chosen)
        cells = []
        for name in GRADES:
            accepts = sum(verdicts[name][i] and not rows[i].correct for i in chosen)
            rejects = sum(rows[i].correct and not verdicts[name][i] for i in chosen)
            cells.append(f"{accepts} / {rejects}")
        lines.append((category, str(correct), str(len(chosen) - correct), *cells))
    return "\n".join(markdown_table(("category", "correct", "incorrect", *GRADES), lines))


def mistakes(rows: Sequence[Row], verdicts: Sequence[bool]) -> str:
    """One line per row on which a grader's verdict differs from the label."""
    return "\n".join(
        f"- {row.category}: `{row.answer}` for `{row.reference}` is {'correct' if row.correct else 'incorrect'}"
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict != row.correct
    )


def main() -> None:
    """Grade both sets and print, or write, the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables to a Markdown file")
    parser.add_argument("--show", choices=sorted(GRADES), help="list the rows where this grader differs from the label")
    args = parser.parse_args()
    parts = []
    for title, rows in (
        ("Against mathematically correct labels", labeled()),
        ("Against the verdicts of the course's grader", course_verdicts()),
    ):
        pairs = [(row.answer, row.reference) for row in rows]
        verdicts = {name: grade(pairs) for name, grade in GRADES.items()}
        parts += [f"## {title} ({len(rows)} rows)", "False accepts / false rejects.", table(rows, verdicts)]
        if args.show:
            parts.append(mistakes(rows, verdicts[args.show]))
    text = "\n\n".join(parts) + "\n"
    if args.page:
        args.page.write_text(text, encoding="utf-8")
        print(f"wrote {args.page}")
    else:
        print(text)


if __name__ == "__main__":
    main()
