"""Runs of any recipe in one plot: validation accuracy against optimizer steps and against wall-clock.

    python recipes/plot_runs.py runs/sft_math runs/expert_iteration runs/grpo_math runs/pipeline --output compared.png

Prints accuracy before, after and best, and the seconds of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trl_ext.runs.layout import RunFolder
from trl_ext.runs.tables_and_plots import write_curve

FIGURES = (("validation", "_before"), ("validation", "_after"), ("best_validation", ""))


def main() -> None:
    """Read the summaries, write the plot, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders with a summary.json")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="(default: runs.png)")
    parser.add_argument("--title", default="", help="of the plot")
    args = parser.parse_args()
    for run in args.runs:
        if not RunFolder(run).is_finished:
            parser.error(f"{run} has no summary.json: has the run ended?")
    summaries = {run.name: RunFolder(run).summary() for run in args.runs}
    write_curve(args.output, {name: summary["validations"] for name, summary in summaries.items()}, args.title)
    width = max(map(len, summaries))
    print(f"{'':<{width}}  before   after    best  seconds")
    for name, summary in summaries.items():
        before, after, best = (summary[f"{key}_accuracy{when}"] for key, when in FIGURES)
        print(f"{name:<{width}}  {before:>6.3f}  {after:>6.3f}  {best:>6.3f}  {summary['wall_clock_s']:>7.0f}")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
