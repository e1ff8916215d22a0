"""A model's figures on several benchmarks, as a paper's table has them: text, Markdown, LaTeX, CSV, JSON and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trl_ext.evaluation.evaluator import Report, is_correct, mean, mean_known
from trl_ext.evaluation.pass_at_n import consensus_at_n, majority_at_n, pass_at_n
from trl_ext.evaluation.statistics import mean_interval
from trl_ext.io import markdown_table, read_json, write_csv, write_json, write_text
from trl_ext.plots import figure

Figures = Mapping[str, Any]
Equality = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
TABLE = "benchmarks"  # the stem of the files' names
_HEADS = ("benchmark", "problems", "k", "avg@k", "95 % interval", "pass@k", "maj@k", "cons@k", "tokens", "cut off")
_LENGTHS = 4  # groups of responses by length


def figures_of(report: Report, equal: Equality | None) -> dict[str, Any]:
    """What is reported of one benchmark.

    Args:
        report: k samples of each problem, one row after the other.
        equal: whether answers mean the same, for cons@k; without it there is none.

    Returns:
        `avg@k` is the mean over problems of the fraction of correct samples, with the interval `low` to `high`;
        `pass@k` the fraction of problems with a correct sample; `maj@k` and `cons@k` as in `pass_at_n`. With one sample
        these are None. `by_length` has for each quarter of the responses, the shortest first, the longest's tokens and
        the quarter's accuracy.
    """
    by_problem: dict[Any, list[dict[str, Any]]] = {}
    for row in report.rows:
        by_problem.setdefault(row["problem_id"], []).append(row)
    k = min((len(rows) for rows in by_problem.values()), default=1)
    samples = [sorted(rows, key=lambda row: row["sample"])[:k] for rows in by_problem.values()]
    correct = np.array([[is_correct(row) for row in rows] for rows in samples], np.bool_).reshape(-1, k)  # (P, k)
    answers = [[row["extracted"] for row in rows] for rows in samples]
    low, high = mean_interval(correct.mean(axis=1).tolist())
    several = k > 1
    return {
        "problems": len(samples),
        "k": k,
        "avg@k": float(correct.mean()),
        "low": low,
        "high": high,
        "pass@k": float(pass_at_n(correct, k).mean()) if several else None,
        "maj@k": float(majority_at_n(answers, correct, k).mean()) if several else None,
        "cons@k": float(consensus_at_n(answers, correct, k, equal).mean()) if several and equal else None,
        "tokens": mean_known(row["tokens"] for row in report.rows),
        "truncated": mean_known(row["finish_reason"] and row["finish_reason"] == "length" for row in report.rows),
        "by_level": {str(level): value for level, value in report.by("level").items()},
        "by_subject": report.by("subject"),
        "by_length": _by_length(report),
    }


def _by_length(report: Report) -> list[dict[str, float]]:
    rows = sorted((row for row in report.rows if row["tokens"] is not None), key=lambda row: int(row["tokens"]))
    groups = [group for group in np.array_split(np.arange(len(rows)), _LENGTHS) if len(group)]
    return [
        {"longest": rows[group[-1]]["tokens"], "accuracy": mean(is_correct(rows[i]) for i in group)} for group in groups
    ]


def _cells(name: str, figures: Figures) -> list[str]:
    """One benchmark's row: accuracies in percent, as papers have them."""
    voted = [percent(figures[key]) for key in ("pass@k", "maj@k", "cons@k")]
    interval = f"{percent(figures['low'])} to {percent(figures['high'])}"
    tokens = "" if figures["tokens"] is None else f"{figures['tokens']:.0f}"
    first = [name, str(figures["problems"]), str(figures["k"]), percent(figures["avg@k"]), interval]
    return [*first, *voted, tokens, percent(figures["truncated"])]


def percent(share: float | None) -> str:
    """A share as papers write it, 12.3 for 0.123; nothing where there is none."""
    return "" if share is None else f"{100 * share:.1f}"


def _rows(figures: Mapping[str, Figures]) -> list[list[str]]:
    """One row for each benchmark, and the mean over benchmarks, which papers report, where there are several."""
    rows = [_cells(name, of_one) for name, of_one in figures.items()]
    if len(figures) > 1:
        average = mean(of_one["avg@k"] for of_one in figures.values())
        rows.append(["mean", "", "", percent(average), *[""] * (len(_HEADS) - 4)])
    return rows


def text_table(figures: Mapping[str, Figures]) -> str:
    """The table for a terminal; accuracies are in percent."""
    return aligned([list(_HEADS), *_rows(figures)])


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns: the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table
    )


def latex_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A `tabular` with booktabs' rules."""
    lines = [
        " & ".join(cell.replace("%", r"\%").replace("_", r"\_") for cell in row) + r" \\" for row in (heads, *rows)
    ]
    columns = "l" + "r" * (len(heads) - 1)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*body, r"\end{tabular}", ""])


def write_tables(folder: Path, figures: Mapping[str, Figures], model: str) -> dict[str, Figures]:
    """`benchmarks.json`, `.csv`, `.md`, `.tex` and `.png` in a folder; accuracies in the JSON are from 0 to 1.

    Returns:
        The figures of all benchmarks of the folder, those that were measured there before with another command first.
    """
    figures = {**tables_in(folder), **figures}
    rows = _rows(figures)
    write_json(folder / f"{TABLE}.json", {"model": model, "benchmarks": figures}, indent=2)
    write_csv(folder / f"{TABLE}.csv", _HEADS, rows)
    write_text(folder / f"{TABLE}.md", "\n".join([*markdown_table(_HEADS, rows), ""]))
    write_text(folder / f"{TABLE}.tex", latex_table(_HEADS, rows))
    draw_accuracies(folder / f"{TABLE}.png", {model: figures})
    return dict(figures)


def tables_in(folder: Path) -> dict[str, Figures]:
    """The figures by benchmark that a folder has; none if there was no benchmark."""
    path = folder / f"{TABLE}.json"
    measured: dict[str, Figures] = read_json(path)["benchmarks"] if path.is_file() else {}
    return measured


def draw_accuracies(path: Path, models: Mapping[str, Mapping[str, Figures]]) -> None:
    """Accuracies with their intervals by benchmark, a bar for each model, as a PNG."""
    names = list(next(iter(models.values())))
    width = 0.8 / len(models)
    with figure(path, (max(5, 1.5 + 1.2 * len(names)), 4)) as (panel,):
        for place, (model, figures) in enumerate(models.items()):
            heights = [figures[name]["avg@k"] for name in names]
            errors = [
                [figures[name]["avg@k"] - figures[name]["low"] for name in names],
                [figures[name]["high"] - figures[name]["avg@k"] for name in names],
            ]
            at = np.arange(len(names)) + (place - (len(models) - 1) / 2) * width
            panel.bar(at, heights, width, yerr=errors, capsize=3, label=model)
        panel.set_xticks(np.arange(len(names)), names, rotation=20)
        panel.set(ylabel="accuracy, mean of k samples", ylim=(0, 1))
        panel.legend(fontsize="small")
