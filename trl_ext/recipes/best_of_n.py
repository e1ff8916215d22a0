"""The test-time scaling recipe: N samples per problem, and what pass@n, Best@n and majority@n make of the first n."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import SAMPLES, Report, is_correct
from trl_ext.evaluation.pass_at_n import best_at_n, first_n, majority_at_n, pass_at_n, prefers_incorrect
from trl_ext.evaluation.statistics import mean_interval
from trl_ext.io import read_jsonl, read_yaml, write_json, write_jsonl
from trl_ext.plots import figure
from trl_ext.recipes.evaluate import differing, run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.measured import FINGERPRINTS, SETTINGS, refuse_other_inputs
from trl_ext.runs.layout import SUMMARY
from trl_ext.runs.provenance import provenance
from trl_ext.setting import Group, setting

CURVES = {
    "pass": "pass@n: any of n correct (unbiased over all samples)",
    "first": "any of the first n correct",
    "best": "Best@n: highest mean log-probability of the first n",
    "majority": "majority@n: most frequent answer of the first n",
}


@dataclass
class BestOfN(Evaluation):
    """An evaluation with several samples per problem."""

    samples: int = setting(
        16, "The number of responses per problem, and the largest n.", Group.SAMPLING, within="[1, inf)"
    )
    at: list[int] = setting(lambda: [1, 4, 8, 16], "The values of n.", Group.SAMPLING)
    first_from: str | None = setting(
        None,
        "The folder of an evaluation whose samples are each problem's first ones, as far as they go.",
        Group.SAMPLING,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.benchmark and self.first_from:
            raise ValueError("first_from is an evaluation of one dataset: leave it out with --benchmark")
        if self.responses or self.export:
            raise ValueError("responses and export are of evaluate.py: best_of_n draws its samples itself")
        if not self.at or min(self.at) < 1 or max(self.at) > self.samples:
            raise ValueError(f"at={self.at}: every n must be between 1 and samples ({self.samples})")


def run_best_of_n(settings: BestOfN) -> dict[str, Any]:
    """Sample, then write `best_of_n.json` and `best_of_n.png`, and print the table. Returns what the JSON holds."""

    def take_over(decisive: Mapping[str, Any]) -> None:
        if settings.first_from:
            _take_over(settings, Path(settings.first_from), Path(settings.output_dir), decisive[FINGERPRINTS])

    return write_curves(settings, run_evaluation(settings, take_over))


def write_curves(settings: BestOfN, report: Report) -> dict[str, Any]:
    """Write `best_of_n.json` and `best_of_n.png` of an evaluation that has ended, and print the table."""
    figures = curves(report, sorted(set(settings.at)))
    folder = Path(settings.output_dir)
    if PartialState().is_main_process:
        write_json(folder / "best_of_n.json", {**figures, **provenance()}, indent=2)
        draw(folder / "best_of_n.png", figures, title=folder.name)
        print(table(figures))
    return figures


def _take_over(settings: BestOfN, earlier: Path, folder: Path, made_from: Mapping[str, str]) -> None:
    """Write an evaluation's samples into a new folder, numbered as here; an `InputError` if it cannot be this run's."""
    if not (earlier / SUMMARY).is_file():
        raise InputError(f"first_from: {str(earlier)!r} has no {SUMMARY}: no evaluation has ended there")
    if (folder / SETTINGS).exists():  # which holds what its samples are of
        return
    there = read_yaml(earlier / SETTINGS)
    may_differ = [
        "at",
        "first_from",
        "model_name_or_path",
        *(["samples"] if there["samples"] <= settings.samples else []),
    ]
    mine = {name: value for name, value in vars(settings).items() if name in there and name not in may_differ}
    if other := differing(there, mine):
        raise InputError(f"first_from: {str(earlier)!r} is an evaluation of other settings ({other})")
    refuse_other_inputs(earlier, there.get(FINGERPRINTS, {}), made_from)
    rows = read_jsonl(earlier / SAMPLES)
    renumbered = [{**row, "number": row["problem_id"] * settings.samples + row["sample"]} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "samples.rank_earlier.jsonl", renumbered)


def curves(report: Report, at: list[int]) -> dict[str, Any]:
    """Each curve's mean and 95 % interval by n, and how often the model's likelihood prefers an incorrect sample."""
    by_problem: dict[int, list[dict[str, Any]]] = {}
    for row in report.rows:
        by_problem.setdefault(row["problem_id"], []).append(row)
    rows = [sorted(samples, key=lambda row: row["sample"]) for samples in by_problem.values()]
    correct = np.array([[is_correct(row) for row in samples] for samples in rows])  # (P, N)
    score = np.array([[row["logp"] / max(row["tokens"], 1) for row in samples] for samples in rows])  # (P, N)
    answers = [[row["extracted"] for row in samples] for samples in rows]
    intervals: dict[str, Any] = {name: {} for name in CURVES}
    for n in at:
        values = {
            "pass": pass_at_n(correct, n),
            "first": first_n(correct, n),
            "best": best_at_n(correct, score, n),
            "majority": majority_at_n(answers, correct, n),
        }
        for name, scores in values.items():
            low, high = mean_interval(scores.tolist())
            intervals[name][str(n)] = {"mean": float(scores.mean()), "low": low, "high": high}
    mixed = int((correct.any(axis=1) & ~correct.all(axis=1)).sum())
    return {
        "problems": len(rows),
        "samples": int(correct.shape[1]),
        **intervals,
        "problems_with_right_and_wrong": mixed,
        "likelihood_prefers_wrong": prefers_incorrect(correct, score) if mixed else None,
    }


def table(figures: dict[str, Any]) -> str:
    """The curves as a person reads them, and the gap between Best@n and pass@n in numbers."""
    at = list(figures["pass"])
    lines = ["", f"{'n':<52}" + "".join(f"{n:>8}" for n in at)]
    lines += [
        f"{label:<52}" + "".join(f"{figures[name][n]['mean']:>8.3f}" for n in at) for name, label in CURVES.items()
    ]
    preferred, mixed, last = figures["likelihood_prefers_wrong"], figures["problems_with_right_and_wrong"], at[-1]
    gap = figures["first"][last]["mean"] - figures["best"][last]["mean"]
    lines.append(f"\nBest@{last} is {gap:.3f} below the best that choosing among the first {last} could do.")
    if preferred is not None and not math.isnan(preferred):
        lines.append(
            f"Of {mixed} problems with correct and incorrect samples, the model's own likelihood prefers an incorrect "
            f"one on {preferred:.1%}."
        )
    return "\n".join(lines)


def draw(path: Path, figures: dict[str, Any], title: str) -> None:
    """The curves with their intervals, as a PNG."""
    with figure(path, (7, 4.5), title=title) as (panel,):
        for name, label in CURVES.items():
            points = figures[name]
            at = [int(n) for n in points]
            panel.plot(at, [point["mean"] for point in points.values()], marker="o", markersize=4, label=label)
            low, high = ([point[end] for point in points.values()] for end in ("low", "high"))
            panel.fill_between(at, low, high, alpha=0.12)
        panel.set_xscale("log", base=2)
        panel.set_xticks(at, [str(n) for n in at])
        panel.set(xlabel="n, samples per problem", ylabel="fraction of problems", ylim=(0, 1))
        panel.legend(loc="lower right", fontsize="small")
