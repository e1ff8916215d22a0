r"""`trl-ext disagreements EVALUATION`: where someone else's grader and ours disagree on the same responses, one by one.

    trl-ext disagreements runs/evaluate --grader lm_eval_gsm8k_flexible
    trl-ext evaluate --responses samples_gsm8k.jsonl --output_dir runs/theirs \
        --response_fields prompt=arguments.gen_args_0.arg_0 response=resps.0.0 truth=target verdict=exact_match
    trl-ext disagreements runs/theirs

The first runs a grader of lm-eval, lighteval or inspect, where that is installed, over our samples, in killable
workers; the second takes over the verdicts that a log of theirs has. All rows on which the two disagree go to a file.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import SAMPLES, is_correct
from trl_ext.evaluation.their_graders import THEIR_GRADERS, verdicts_of
from trl_ext.io import read_jsonl, write_jsonl
from trl_ext.rewards.workers.pool import PoolError

SHOWN = 120  # characters of a response's end


def disagreeing(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that one of the two calls correct; rows without a verdict of theirs are left out."""
    return [row for row in rows if row.get("verdict") is not None and row["verdict"] != is_correct(row)]


def agreement(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often the two agree, as a person reads it."""
    counts = Counter((is_correct(row), row["verdict"]) for row in rows if row.get("verdict") is not None)
    known, differing = counts.total(), counts[True, False] + counts[False, True]
    lines = [
        f"the two graders agree on {known - differing} of {known} responses, {len(rows) - known} without their verdict",
        f"{'':16}{'theirs correct':>16}{'incorrect':>12}",
    ]
    for ours, name in ((True, "ours correct"), (False, "     incorrect")):
        lines.append(f"{name:<16}{counts[ours, True]:>16}{counts[ours, False]:>12}")
    return "\n".join(lines)


def shown(row: Mapping[str, Any]) -> str:
    """A row on which they disagree, in three lines; the response is written so that it cannot steer a terminal."""
    number, ours = row.get("number", row.get("row")), "correct" if is_correct(row) else "incorrect"
    their_reason = f" ({row['their_reason']!r})" if row.get("their_reason") else ""
    return (
        f"\n--- sample {number}: ours {ours} ({row['reason']}), theirs "
        f"{'correct' if row['verdict'] else 'incorrect'}{their_reason}\n"
        f"response ends: {row['response'][-SHOWN:]!r}\n"
        f"extracted: {row['extracted']!r}   reference answer: {row['answer']!r}"
    )


def main() -> None:
    """Read an evaluation's samples, ask the other grader, print and write where they disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="folder of an evaluation")
    parser.add_argument("--grader", help=f"someone else's grader: {', '.join(THEIR_GRADERS)}")
    parser.add_argument(
        "--extracted", action="store_true", help="give it `$answer$` as we extracted it: their comparison alone"
    )
    parser.add_argument("--show", type=int, default=10, help="print this many (10)")
    parser.add_argument("--out", type=Path, help="the file of all of them; default disagreements.jsonl in the folder")
    args = parser.parse_args()
    try:
        rows = _rows(args.evaluation, args.grader, args.extracted)
    except (InputError, PoolError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    disagreements = disagreeing(rows)
    print(agreement(rows))
    print("\n".join(map(shown, disagreements[: args.show])))
    out = args.out or args.evaluation / "disagreements.jsonl"
    write_jsonl(out, disagreements)
    print(f"{len(disagreements)} rows are in {out}")


def _rows(folder: Path, grader: str | None, extracted: bool) -> list[dict[str, Any]]:
    """The evaluation's rows with `verdict`, theirs, and of a grader that was asked here `their_reason`."""
    path = folder / SAMPLES
    if not path.is_file():
        raise InputError(f"{str(folder)!r} has no samples.jsonl: run recipes/evaluate.py with --output_dir first")
    rows = read_jsonl(path)
    if grader is None:
        if all(row.get("verdict") is None for row in rows):
            raise InputError(
                f"{str(path)!r} has no verdicts of someone else's: name a --grader, one of {', '.join(THEIR_GRADERS)}"
            )
        return rows
    given = [f"${row['extracted']}$" if extracted else row["response"] for row in rows]
    verdicts = verdicts_of(grader, [(text, row["answer"]) for text, row in zip(given, rows, strict=True)])
    return [
        {**row, "verdict": correct, "their_reason": reason}
        for row, (correct, reason) in zip(rows, verdicts, strict=True)
    ]


if __name__ == "__main__":
    main()
