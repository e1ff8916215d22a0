"""Is B better than A? Two evaluations of the same problems, compared problem by problem.

    python recipes/compare.py runs/before runs/after

Both are folders of recipes/evaluate.py or recipes/best_of_n.py. Pairing takes the problems' own difficulty out of the
noise, so that a smaller difference shows; the p-value is of the exact sign test on the problems where the two differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from trl_ext.evaluation.evaluator import SAMPLES, Report
from trl_ext.evaluation.statistics import compare_paired
from trl_ext.generation.model_source import ADAPTER, CONFIG
from trl_ext.io import read_jsonl, write_json


def scores_of(folder: Path) -> dict[Any, float]:
    """Fraction of correct samples by problem."""
    path = folder / SAMPLES
    if not path.is_file():
        trained = (folder / CONFIG).is_file() or (folder / ADAPTER).is_file()
        command = (
            f"--model_name_or_path {folder} --output_dir {folder}-evaluated" if trained else f"--output_dir {folder}"
        )
        sys.exit(f"error: {folder} has no {SAMPLES}: run recipes/evaluate.py {command} first")
    rows = [{**row, "problem_id": (row["problem_id"], row["problem"])} for row in read_jsonl(path)]
    return Report(rows).per_problem()


def main() -> None:
    """Compare, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="folder of an evaluation")
    parser.add_argument("second", type=Path, help="folder of the one to compare with it")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    first, second = scores_of(args.first), scores_of(args.second)
    if first.keys() != second.keys():
        only = len(first.keys() ^ second.keys())
        sys.exit(f"error: {args.first} and {args.second} are not of the same problems; {only} are in one of them only")
    comparison = compare_paired(list(first.values()), [second[problem] for problem in first])
    means = [sum(scores.values()) / len(scores) for scores in (first, second)]
    print(f"{args.first}: {means[0]:.3f}   {args.second}: {means[1]:.3f}   on the same {comparison.problems} problems")
    print(f"difference {comparison.difference:+.3f}, 95 % interval {comparison.low:+.3f} to {comparison.high:+.3f}")
    print(
        f"better on {comparison.better} problems, worse on {comparison.worse}; p = {comparison.p_value:.2g} (sign test)"
    )
    if args.json:
        write_json(args.json, dataclasses.asdict(comparison), indent=2)


if __name__ == "__main__":
    main()
