"""Is B better than A? Two evaluations of the same problems, compared problem by problem.

    python recipes/compare.py runs/before runs/after
    python recipes/compare.py runs/before runs/after --benchmark math500,aime24 --output_dir runs/compared

Both are folders of recipes/evaluate.py or recipes/best_of_n.py. Pairing takes the problems' own difficulty out of the
noise, so that a smaller difference shows; the p-value is of the exact sign test on the problems where the two differ.
Of benchmarks there is a table, a line each, which --output_dir writes as CSV, Markdown and LaTeX, with a plot.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from trl_ext.data.published import names_of_benchmarks
from trl_ext.errors import InputError
from trl_ext.evaluation.benchmark_table import tables_in
from trl_ext.evaluation.compared import comparison_table, paired_scores, write_comparison
from trl_ext.evaluation.evaluator import SAMPLES
from trl_ext.evaluation.statistics import Comparison, compare_paired
from trl_ext.io import write_json


def main() -> None:
    """Compare, print, and write the files asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="folder of an evaluation")
    parser.add_argument("second", type=Path, help="folder of the one to compare with it")
    parser.add_argument("--benchmark", nargs="+", default=[], help="of evaluations of benchmarks; default: all of them")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--output_dir", type=Path, help="also write tables and a plot of benchmarks into this folder")
    args = parser.parse_args()
    try:
        names = names_of_benchmarks(args.benchmark) or list(tables_in(args.first))
        if names and not (args.first / SAMPLES).is_file():
            compare_benchmarks(args, names)
        else:
            compare_two(args)
    except InputError as error:
        sys.exit(f"error: {error}")


def compare_two(args: argparse.Namespace) -> None:
    """One evaluation with another."""
    first, second = paired_scores(args.first, args.second)
    comparison = compare_paired(list(first.values()), [second[problem] for problem in first])
    means = [sum(scores.values()) / len(scores) for scores in (first, second)]
    print(f"{args.first}: {means[0]:.3f}   {args.second}: {means[1]:.3f}   on the same {comparison.problems} problems")
    print(f"difference {comparison.difference:+.3f}, 95 % interval {comparison.low:+.3f} to {comparison.high:+.3f}")
    print(
        f"better on {comparison.better} problems, worse on {comparison.worse}; p = {comparison.p_value:.2g} (sign test)"
    )
    if args.json:
        write_json(args.json, dataclasses.asdict(comparison), indent=2)


def compare_benchmarks(args: argparse.Namespace, names: list[str]) -> None:
    """Each benchmark of one evaluation with the same of the other."""
    comparisons: dict[str, tuple[float, float, Comparison]] = {}
    for name in names:
        first, second = paired_scores(args.first / name, args.second / name)
        means = [sum(scores.values()) / len(scores) for scores in (first, second)]
        paired = compare_paired(list(first.values()), [second[problem] for problem in first])
        comparisons[name] = (*means, paired)
    print(f"A: {args.first}   B: {args.second}; accuracies in percent\n")
    print(comparison_table(comparisons))
    if args.json:
        listed = {name: dataclasses.asdict(paired) for name, (_, _, paired) in comparisons.items()}
        write_json(args.json, listed, indent=2)
    if args.output_dir:
        write_comparison(args.output_dir, args.first, args.second, comparisons)
        print(f"\ncompared.csv, .md, .tex and .png are in {args.output_dir}")


if __name__ == "__main__":
    main()
