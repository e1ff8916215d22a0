"""Two evaluations of the same problems, and two models on several benchmarks, as tables and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.evaluation.benchmark_table import TABLE, aligned, draw_accuracies, latex_table, percent, tables_in
from trl_ext.evaluation.evaluator import SAMPLES, Report
from trl_ext.evaluation.statistics import Comparison
from trl_ext.generation.model_source import ADAPTER, CONFIG
from trl_ext.io import markdown_table, read_jsonl, write_csv, write_text

Compared = Mapping[str, tuple[float, float, Comparison]]  # by benchmark: both accuracies, and the paired comparison
_HEADS = ("benchmark", "problems", "A", "B", "B - A", "95 % interval", "better", "worse", "p")


def paired_scores(first: Path, second: Path) -> tuple[dict[Any, float], dict[Any, float]]:
    """By problem, the fraction of correct samples of two evaluations.

    Raises:
        InputError: a folder has no evaluation, or they are of other problems.
    """
    scores = scores_of(first), scores_of(second)
    if scores[0].keys() != scores[1].keys():
        only = len(scores[0].keys() ^ scores[1].keys())
        raise InputError(f"{first} and {second} are not of the same problems; {only} are in one of them only")
    return scores


def scores_of(folder: Path) -> dict[Any, float]:
    """By problem, the fraction of correct samples; an `InputError` if the folder has no evaluation."""
    path = folder / SAMPLES
    if not path.is_file():
        trained = (folder / CONFIG).is_file() or (folder / ADAPTER).is_file()
        command = (
            f"--model_name_or_path {folder} --output_dir {folder}-evaluated" if trained else f"--output_dir {folder}"
        )
        raise InputError(f"{folder} has no {SAMPLES}: run recipes/evaluate.py {command} first")
    rows = [{**row, "problem_id": (row["problem_id"], row["problem"])} for row in read_jsonl(path)]
    return Report(rows).per_problem()


def _rows(compared: Compared) -> list[list[str]]:
    return [
        [
            name, str(paired.problems), percent(first), percent(second), f"{100 * paired.difference:+.1f}",
            f"{100 * paired.low:+.1f} to {100 * paired.high:+.1f}", str(paired.better), str(paired.worse),
            f"{paired.p_value:.2g}",
        ]
        for name, (first, second, paired) in compared.items()
    ]  # fmt: skip


def comparison_table(compared: Compared) -> str:
    """The table for a terminal; accuracies are in percent."""
    return aligned([list(_HEADS), *_rows(compared)])


def write_comparison(folder: Path, first: Path, second: Path, compared: Compared) -> None:
    """`compared.csv`, `.md`, `.tex`, and `.png` with both models' accuracies, in a folder."""
    both = {str(one): tables_in(one) for one in (first, second)}
    for one, measured in both.items():
        if missing := [name for name in compared if name not in measured]:
            raise InputError(
                f"{one} has no {TABLE}.json with {', '.join(missing)}: run recipes/evaluate.py on it again"
            )
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows(compared)
    named = "\n".join([f"A: `{first}`, B: `{second}`", "", *markdown_table(_HEADS, rows), ""])
    write_csv(folder / "compared.csv", _HEADS, rows)
    write_text(folder / "compared.md", named)
    write_text(folder / "compared.tex", latex_table(_HEADS, rows))
    draw_accuracies(folder / "compared.png", {one: {name: of[name] for name in compared} for one, of in both.items()})
