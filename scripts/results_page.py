"""Finished runs -> a result page: a Markdown table with command, commit and hardware, and a plot of all curves.

python scripts/results_page.py runs/grpo_math runs/grpo_math-2 --title "GRPO on mini-MATH" --page grpo_math.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from trl_ext.io import fenced, markdown_table, read_jsonl
from trl_ext.runs.layout import GENERATIONS, RunFolder
from trl_ext.runs.provenance import platform_of
from trl_ext.runs.tables_and_plots import write_curve


def main() -> None:
    """Read the arguments and the summaries, write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders with a summary.json")
    parser.add_argument("--title", required=True, help="headline of the page and of the plot")
    parser.add_argument("--page", required=True, type=Path, help="Markdown file; the plot gets its name, _curve.png")
    parser.add_argument("--note", default="", help="a paragraph below the headline")
    parser.add_argument("--rollouts", type=int, default=4, help="rollouts of the first run to show, over time (4)")
    args = parser.parse_args()
    for run in args.runs:
        if not RunFolder(run).is_finished:
            parser.error(f"{run} has no summary.json: has the run ended?")
    summaries = [RunFolder(run).summary() for run in args.runs]
    plot = args.page.with_name(f"{args.page.stem}_curve.png")
    args.page.parent.mkdir(parents=True, exist_ok=True)
    write_curve(plot, {f"seed {s['seed']}": s["validations"] for s in summaries}, args.title)
    rollouts = rollouts_over_time(read_jsonl(args.runs[0] / GENERATIONS), args.rollouts)
    args.page.write_text(page(args.title, args.note, summaries, plot.name, rollouts), encoding="utf-8")
    print(f"wrote {args.page} and {plot}")


def page(title: str, note: str, summaries: list[dict[str, Any]], plot: str, rollouts: str) -> str:
    """The Markdown of the page."""
    parts = [
        f"# {title}",
        note,
        runs_table(summaries),
        f"![validation accuracy]({plot})",
        level_table(summaries),
        rollouts,
        "Hardware and versions: " + "; ".join(sorted({platform_of(s) for s in summaries})) + ".",
        f"Made from the runs' `summary.json` and `{GENERATIONS}` by `scripts/results_page.py`.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def runs_table(summaries: list[dict[str, Any]]) -> str:
    """One row per run: command, commit, accuracy before and after, seconds."""
    rows = [
        (
            f"`{s['command']}`",
            f"`{s['commit']}`",
            f"{s['validation_accuracy_before']:.3f}",
            f"{s['validation_accuracy_after']:.3f}",
            f"{s['best_validation_accuracy']:.3f}",
            f"{s['validation_problems']}",
            f"{s['wall_clock_s']:.0f}",
        )
        for s in summaries
    ]
    heads = ("command", "commit", "before", "after", "best", "problems", "seconds in all")
    return "\n".join(markdown_table(heads, rows))


def level_table(summaries: list[dict[str, Any]]) -> str:
    """Accuracy by level and fraction of each outcome before and after, as means over the runs."""
    first, last = ([s["validations"][i] for s in summaries] for i in (0, -1))
    rows = [
        (f"level {level}", averaged(first, "by_level", level), averaged(last, "by_level", level))
        for level in first[0]["by_level"]
    ] + [
        (outcome.replace("_", " "), averaged(first, "outcomes", outcome), averaged(last, "outcomes", outcome))
        for outcome in first[0]["outcomes"]
    ]
    return "\n".join(markdown_table((f"mean of {len(summaries)} runs", "before", "after"), rows))


def rollouts_over_time(rows: list[dict[str, Any]], count: int) -> str:
    """The first rollout that was logged at each of `count` steps, from the first to the last; "" of no rows."""
    first = {row["step"]: row for row in reversed(rows)}  # the first row of a step is written last
    steps = sorted(first)
    chosen = sorted({steps[round(n * (len(steps) - 1) / max(count - 1, 1))] for n in range(count)} if steps else set())
    lines = ["## Rollouts over time", ""] if chosen else []
    for row in (first[step] for step in chosen):
        question = str(row["prompt"]).partition("User: ")[2].partition("\n")[0]
        lines += [f"Step {row['step']}: reward {row['reward']:g}, reference answer `{row['ground_truth']}`", ""]
        lines += [*fenced(question or row["prompt"]), *fenced(row["response"])]
    return "\n".join(lines).rstrip()


def averaged(validations: list[dict[str, Any]], group: str, key: str) -> str:
    """The mean over runs of one figure."""
    return f"{mean(v[group][key] for v in validations):.3f}"


if __name__ == "__main__":
    main()
