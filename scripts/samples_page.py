"""An evaluation's samples -> a page with examples of each category and what lost the incorrect ones.

python recipes/evaluate.py
python scripts/samples_page.py runs/evaluate --page runs/evaluate/samples.md

An incorrect response is read a second time: by the strict grader, and for an answer outside the format (in a box, after
the last equals sign, the last number). Where one of these readings is correct, grading is what lost it (the format or
the parser), not the model or the length limit.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.evaluation.evaluator import OUTCOMES, is_correct
from trl_ext.io import fenced, markdown_table, read_json, read_jsonl, write_text
from trl_ext.rewards.extract import boxed
from trl_ext.rewards.graders import strict
from trl_ext.runs.provenance import platform_of

FAULTS = MODEL, CUT_OFF, PARSER = "the model", "the length limit", "the format or the parser"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_AFTER_EQUALS = re.compile(r"=\s*([^=\n<$]+?)\s*\.?\s*(?:$|[\n<$])")

Row = Mapping[str, Any]


def readings(row: Row) -> list[str]:
    """Other answers that a response may be meant to give, each once: extracted, boxed, after `=`, the last number."""
    text = str(row["response"])
    equals, numbers = _AFTER_EQUALS.findall(text), _NUMBER.findall(text)
    answers = [row.get("extracted"), boxed(text), *equals[-1:], *numbers[-1:]]
    return list(dict.fromkeys(answer for answer in answers if answer))


def at_fault(rows: Sequence[Row]) -> list[str | None]:
    """What lost each sample: `MODEL`, `CUT_OFF`, `PARSER`, or None for a correct one. Compared in worker processes.

    A last number that is the answer by chance counts as read, so `PARSER` is an upper bound.
    """
    tried = [(n, answer) for n, row in enumerate(rows) if not is_correct(row) for answer in readings(row)]
    responses = [f"</think> <answer> {answer} </answer>" for _, answer in tried]
    grades = strict(responses, [rows[n]["answer"] for n, _ in tried], answer_format="r1_zero", worked_out=False)
    read = {n for (n, _), grade in zip(tried, grades, strict=True) if grade.correct}

    def lost_by(n: int, row: Row) -> str | None:
        if is_correct(row):
            return None
        return PARSER if n in read else CUT_OFF if row["finish_reason"] == "length" else MODEL

    return [lost_by(n, row) for n, row in enumerate(rows)]


def samples_page(title: str, rows: Sequence[Row], how: Sequence[str], examples: int = 3) -> str:
    """The page's Markdown.

    Args:
        rows: of an evaluation's `samples.jsonl`.
        how: lines that say how the samples were made.
        examples: of each category, those that come first, as many of each fault as there are.
    """
    faults = at_fault(rows)
    lines = [f"# {title}", "", *how, "", *_table(rows, faults), "", _commentary(faults), ""]
    for outcome, words in OUTCOMES.items():
        mine = [(row, fault) for row, fault in zip(rows, faults, strict=True) if row["outcome"] == outcome]
        lines += [f"## {words.capitalize()}: {len(mine)} of {len(rows)}", ""]
        for row, fault in _spread(mine, examples):
            lines += _example(row, fault)
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Row], faults: Sequence[str | None]) -> list[str]:
    samples = Counter(row["outcome"] for row in rows)
    counts = Counter((row["outcome"], fault) for row, fault in zip(rows, faults, strict=True))
    heads = ["category", "samples", *(f"lost by {fault}" for fault in FAULTS)]
    body = [[words, str(samples[o]), *(str(counts[o, fault]) for fault in FAULTS)] for o, words in OUTCOMES.items()]
    return markdown_table(heads, body)


def _commentary(faults: Sequence[str | None]) -> str:
    counts = Counter(fault for fault in faults if fault)
    incorrect = sum(counts.values())
    if not incorrect:
        return "Every sample is correct."
    part = {fault: f"{counts[fault]} ({counts[fault] / incorrect:.0%})" for fault in FAULTS}
    return (
        f"Of {incorrect} incorrect samples {part[PARSER]} give the reference answer by another reading, at most: there "
        f"the format or the parser is at fault. {part[CUT_OFF]} were cut off at the length limit before they gave it, "
        f"and {part[MODEL]} are mistakes of the model, whichever way they are read."
    )


def _spread(rows: Sequence[tuple[Row, str | None]], count: int) -> list[tuple[Row, str | None]]:
    """The first `count` rows with as many faults among them as there are."""
    first = {fault: row for row, fault in reversed(rows)}
    chosen = [(row, fault) for row, fault in rows if row is first[fault]][:count]
    rest = [pair for pair in rows if all(pair[0] is not row for row, _ in chosen)]
    return chosen + rest[: count - len(chosen)]


def _example(row: Row, fault: str | None) -> list[str]:
    verdict = "correct" if fault is None else f"lost by {fault}"
    reason = f" ({row['reason']})" if row.get("reason") else ""
    facts = f"reference answer `{_inline(row['answer'])}`, read `{_inline(row.get('extracted'))}`, {verdict}{reason}"
    problem = str(row.get("problem") or row["prompt"])
    return [f"Problem {row.get('problem_id', '')}: {facts}", "", *fenced(problem), *fenced(row["response"])]


def _inline(value: object) -> str:
    return " ".join(str(value).replace("`", "'").split())[:80]


def main() -> None:
    """Read the samples, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of an evaluation, with samples.jsonl and summary.json")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--examples", type=int, default=3, help="of each category (default: 3)")
    parser.add_argument("--title", help="(default: Samples of and the model's name)")
    args = parser.parse_args()
    for name in ("samples.jsonl", "summary.json"):
        if not (args.run / name).is_file():
            parser.error(f"{args.run} has no {name}: has the evaluation ended?")
    summary = read_json(args.run / "summary.json")
    how = [
        f"Model: {summary['model']}. Made from `samples.jsonl` by `python scripts/samples_page.py`.",
        "",
        f"`{summary['command']}` at commit `{summary['commit']}`, on {platform_of(summary)}.",
    ]
    title = args.title or f"Samples of {summary['model']}"
    write_text(args.page, samples_page(title, read_jsonl(args.run / "samples.jsonl"), how, args.examples))
    print(f"wrote {args.page}")


if __name__ == "__main__":
    main()
