"""The answer to a question of a lab: a table with standard deviations over seeds, plots, and a page with both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from trl_ext.errors import InputError
from trl_ext.evaluation.statistics import paired_interval
from trl_ext.io import markdown_table, read_json, read_jsonl, write_json, write_text
from trl_ext.plots import COLORS, band_of, figure, plot_bands, write_bands
from trl_ext.redaction import redact
from trl_ext.runs.provenance import origins
from trl_ext.tools.experiments.lab.preregistration import effect_of, sentence
from trl_ext.tools.experiments.lab.questions import Question
from trl_ext.tools.experiments.metrics import accuracy_over_the_run
from trl_ext.tools.experiments.pages import in_code, in_figures
from trl_ext.tools.experiments.runspec import Settings

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]  # cell -> seed -> the run's summary
PARTS = "report.json"  # lists of lines: title, results, plots (`{plots}` before the files' names), how; winner; effect


@dataclass(frozen=True)
class Panel:
    """A metric of training, in the plot and in words."""

    metric: str
    label: str
    name: str
    digits: int
    scale: str = "linear"


PANELS = (
    Panel("reward", "reward", "The training reward", 2),
    Panel("rewards/format_reward", "format reward", "The format reward", 2),
    Panel("sampling/entropy_estimate", "entropy of all sampled tokens, nats", "Entropy of all sampled tokens", 2),
    Panel("entropy", "entropy of trained tokens, nats", "Entropy of the trained tokens", 2),
    Panel("validation/entropy_estimate", "entropy in validation, nats", "Entropy in validation", 2),
    Panel("completions/mean_length", "tokens per response", "The response length", 1),
    Panel("validation/mean_tokens", "tokens per response in validation", "The response length in validation", 1),
    Panel("grad_norm", "gradient norm", "The gradient norm", 2, "log"),
    Panel("clip_ratio/region_mean", "fraction of tokens clipped", "The clip fraction", 4),
)


def write_report(
    folder: Path,
    question: Question,
    runs: Runs,
    commands: Mapping[str, Sequence[str]],
    metrics: Mapping[str, Mapping[int, Path]],
    winner: tuple[str, Settings],
) -> Path:
    """Write `report.md`, its parts as data, `accuracy.png` and `training.png`; returns the page.

    Args:
        runs: summaries, `failed` in those of runs that failed.
        commands: of each cell's first run.
        metrics: each run's `metrics.jsonl`.
        winner: the best cell and its settings, from which other questions start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = {cell: ended_runs(by_seed) for cell, by_seed in runs.items()}
    curves = training_curves(metrics)
    write_accuracy_plot(folder / "accuracy.png", ended, question.question)
    write_training_plot(folder / "training.png", curves, question.question)
    hypothesis = question.hypothesis
    effect = effect_of(hypothesis, runs) if hypothesis else None
    lines = [sentence(hypothesis, effect), ""] if hypothesis and effect else []
    lines += [*table(runs, question.reference), "", noise(ended), ""]
    lines += [f"Published for the real model: {question.published.strip()}", ""] if question.published else []
    lines += [*discussion(curves), ""]
    lines += ["Validation accuracy by optimizer step, mean over seeds:", "", *steps_table(ended), ""]
    if question.after:
        lines += [f"All cells start from the best cells of: {', '.join(question.after)}.", ""]
    plots = ["![validation accuracy]({plots}accuracy.png)", "", "![training]({plots}training.png)", ""]
    how = ["Each cell by its command, here with the first seed:", ""]
    how += [f"- {cell}: {in_code(command)}" for cell, command in commands.items()]
    every = [run for by_seed in ended.values() for run in by_seed.values()]
    how += [line for origin in origins(every) for line in ("", f"{origin}.")]
    best = {"cell": winner[0], "settings": redact(dict(winner[1]))}
    parts = {"title": question.question, "results": lines, "plots": plots, "how": how, "winner": best}
    if effect is not None:
        minutes = sum(run["wall_clock_s"] for run in every) / 60
        parts["effect"] = {**asdict(effect), "shown": effect.in_figures, "minutes": round(minutes, 1)}
    write_json(folder / PARTS, parts)
    shown = [f"# {question.question}", "", *lines, *(line.format(plots="") for line in plots), *how]
    write_text(folder / "report.md", "\n".join(shown) + "\n")
    return folder / "report.md"


def best_cell(runs: Runs, reference: str) -> str:
    """The cell with the highest mean accuracy at the end; of equal ones the reference, and it where no run ended.

    Cells of which a seed failed count only where every cell has one.
    """
    whole = {
        cell: cell_runs for cell, cell_runs in runs.items() if not any("failed" in run for run in cell_runs.values())
    } or runs
    means = {cell: mean(ends.values()) for cell, cell_runs in whole.items() if (ends := accuracies(cell_runs))}
    return max(means, key=lambda cell: (means[cell], cell == reference), default=reference)


def ended_runs(by_seed: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Those of a cell's runs that did not fail."""
    return {seed: run for seed, run in by_seed.items() if "failed" not in run}


def accuracies(by_seed: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Those at the end of a cell's runs, by seed; failed runs have none."""
    return {seed: float(run["validation_accuracy_after"]) for seed, run in ended_runs(by_seed).items()}


def read_winner(output: Path, question: str) -> dict[str, Any]:
    """The settings of a question's best cell; an InputError without a report, or with one of an earlier version."""
    path = output / question / PARTS
    report = read_json(path) if path.exists() else {}
    if "winner" not in report:
        raise InputError(f"{path}: the winner of {question!r} is not known yet; ask {question} as well")
    return dict(report["winner"]["settings"])


def steps_table(runs: Runs) -> list[str]:
    """Accuracy at every step that was validated, a column for each cell, in Markdown; of several there the last."""
    logs = {
        cell: _aligned([run["validations"] for run in cell_runs.values()])
        for cell, cell_runs in runs.items()
        if cell_runs
    }
    last = {
        cell: [list({entry["step"]: entry for entry in log}.values()) for log in cell_logs]
        for cell, cell_logs in logs.items()
    }
    means = {cell: mean_by_step(cell_logs, "accuracy") for cell, cell_logs in last.items()}
    steps = sorted({step for curve in means.values() for step in curve})
    rows = [[str(step), *(f"{c[step]:.3f}" if step in c else "–" for c in means.values())] for step in steps]
    return markdown_table(["step", *means], rows) if rows else []


def _aligned(logs: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Validations with equal steps for all seeds: in expert iteration, whose steps differ, the mean of theirs."""
    if len({len(log) for log in logs}) > 1:  # a run ended early
        return [[dict(entry) for entry in log] for log in logs]
    steps = [round(mean(entry["step"] for entry in entries)) for entries in zip(*logs, strict=True)]
    return [[{**entry, "step": step} for entry, step in zip(log, steps, strict=True)] for log in logs]


def training_curves(metrics: Mapping[str, Mapping[int, Path]]) -> dict[Panel, dict[str, dict[int, float]]]:
    """What was logged, by panel and cell: step -> mean over seeds. Panels that no run has are left out."""
    logs = {
        cell: [read_jsonl(log) for log in cell_files.values() if log.exists()] for cell, cell_files in metrics.items()
    }
    all_curves = {
        panel: {cell: mean_by_step(cell_logs, panel.metric) for cell, cell_logs in logs.items()} for panel in PANELS
    }
    return {
        panel: curves for panel, curves in all_curves.items() if any(any(curve.values()) for curve in curves.values())
    }


def discussion(curves: Mapping[Panel, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """A sentence for each metric of training: from where to where it went, and in which cells least and most.

    The beginning and the end are means over a tenth of the steps, at least one.
    """
    return [
        _sentence(panel, {cell: list(c.values()) for cell, c in panel_curves.items() if c})
        for panel, panel_curves in curves.items()
    ]


def _sentence(panel: Panel, cells: Mapping[str, Sequence[float]]) -> str:
    def written(value: float) -> str:
        return f"{value:.{panel.digits}f}"

    part = {cell: max(len(values) // 10, 1) for cell, values in cells.items()}
    start = {cell: mean(values[: part[cell]]) for cell, values in cells.items()}
    end = {cell: mean(values[-part[cell] :]) for cell, values in cells.items()}
    low, high = min(end, key=end.__getitem__), max(end, key=end.__getitem__)
    went = f"{panel.name} went from {written(mean(start.values()))} to {written(mean(end.values()))}"
    if len(cells) == 1:
        return f"{went} in {low}, the only cell that logs it."
    if written(end[low]) == written(end[high]):
        return f"{went}, the same in every cell."
    return f"{went} on average, least in {low} ({written(end[low])} at the end), most in {high} ({written(end[high])})."


def table(runs: Runs, reference: str) -> list[str]:
    """A row for each cell, in Markdown."""
    seeds = list(next(iter(runs.values())))
    heads = ["cell", *(f"seed {seed}" for seed in seeds), "mean ± sd", f"less {reference} (95 % interval)",
             "over the run", "steps", "seconds", "ended early or failed"]  # fmt: skip
    rows = []
    for cell, by_seed in runs.items():
        ended = ended_runs(by_seed)
        last, why = accuracies(by_seed), {s: run.get("failed") or run.get("ended_early") for s, run in by_seed.items()}
        cells = [cell, *(f"{last[seed]:.3f}" if seed in last else "–" for seed in seeds)]
        cells += [
            mean_and_deviation(list(last.values())),
            "" if cell == reference else difference(runs, cell, reference),
        ]
        over_the_run = [accuracy_over_the_run(run["validations"]) for run in ended.values()]
        cells += [f"{mean(over_the_run):.3f}" if ended else "–"]
        cells += [span([run["validations"][-1]["step"] for run in ended.values()])]
        cells += [span([round(run["wall_clock_s"]) for run in ended.values()])]
        cells += ["; ".join(f"seed {seed}: {said}" for seed, said in why.items() if said)]
        rows.append(cells)
    return markdown_table(heads, rows)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    if not values:
        return "–"
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def span(values: Sequence[int]) -> str:
    """One number, or from which to which."""
    if not values:
        return "–"
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def difference(runs: Runs, cell: str, reference: str) -> str:
    """Of accuracies at the end at the same seeds, which share the base policy and the problems, with its interval."""
    gains = differences(runs, cell, reference)
    if len(gains) < 2:
        return "–"
    low, high = paired_interval(gains)
    verdict = "no difference seen" if low <= 0 <= high else "better" if low > 0 else "worse"
    return f"{mean(gains):+.3f} ({in_figures((low, high))}), {verdict}"


def differences(runs: Runs, cell: str, reference: str) -> list[float]:
    """Of every seed at which both ended."""
    ours, theirs = accuracies(runs[cell]), accuracies(runs[reference])
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def noise(runs: Runs) -> str:
    """How far two figures may differ by chance."""
    all_runs = [run for cell_runs in runs.values() for run in cell_runs.values()]
    if not all_runs:
        return "No run ended."
    n = all_runs[0]["final_validation_problems"]
    ends = [list(accuracies(cell_runs).values()) for cell_runs in runs.values()]
    typical = mean([value for values in ends for value in values])
    error = (typical * (1 - typical) / n) ** 0.5
    over_seeds = ""
    if deviations := [stdev(values) for values in ends if len(values) > 1]:
        over_seeds = f"; over seeds the cells' standard deviation is {mean(deviations):.3f} on average"
    return (
        f"Noise: sampled once on {n} problems, an accuracy of {typical:.2f} has a standard error of {error:.3f}"
        f"{over_seeds}. Intervals are of the difference at the same seeds, by Student's t."
    )


def write_accuracy_plot(path: Path, runs: Runs, title: str) -> None:
    """Validation accuracy against optimizer steps and against seconds, a band over seeds for each cell; CSV next to it.

    A last validation on other problems than the first is the median over seeds, off the line.
    """
    axes = {"step": "optimizer steps", "wall_clock_s": "wall-clock, s"}
    logs = {cell: [run["validations"] for run in cell_runs.values()] for cell, cell_runs in runs.items() if cell_runs}
    bands = {
        label: {cell: band_of([_on_same_problems(log, key) for log in cell_logs]) for cell, cell_logs in logs.items()}
        for key, label in axes.items()
    }
    with figure(path, (11, 4.5), (1, 2), title, sharey=True) as panels:
        panels[0].set(ylabel="validation accuracy", ylim=(0, 1))
        for panel, (key, label) in zip(panels, axes.items(), strict=True):
            plot_bands(panel, bands[label])
            panel.set_xlabel(label)
            for color, cell_logs in zip(itertools.cycle(COLORS), logs.values()):
                last = [log[-1] for log in cell_logs if log[-1].get("problems") != log[0].get("problems")]
                if last:
                    at, accuracy = (median(entry[name] for entry in last) for name in (key, "accuracy"))
                    panel.plot(at, accuracy, "D", fillstyle="none", color=color)
    write_bands(path.with_suffix(".csv"), bands)


def _on_same_problems(log: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry[key], entry["accuracy"]) for entry in log if entry.get("problems") == log[0].get("problems")]


def write_training_plot(path: Path, curves: Mapping[Panel, Mapping[str, Mapping[int, float]]], title: str) -> None:
    """What was logged of training against steps: a panel for each metric, a line for each cell."""
    columns = min(len(curves), 3) or 1
    rows = max(-(-len(curves) // columns), 1)
    with figure(path, (4.5 * columns, 3.5 * rows), (rows, columns), title) as panels:
        for axes, (panel, panel_curves) in zip(panels, curves.items(), strict=False):
            for number, (cell, curve) in enumerate(panel_curves.items()):
                axes.plot(list(curve), list(curve.values()), color=f"C{number}", linewidth=1.2, label=cell)
            axes.set(ylabel=panel.label, xlabel="optimizer steps", yscale=panel.scale)
        for axes in panels[len(curves) :]:
            axes.set_axis_off()
        if curves:
            panels[0].legend(fontsize="small")


def mean_by_step(logs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> dict[int, float]:
    """A metric's mean over the runs that have it at a step."""
    values_by_step: dict[int, list[float]] = {}
    for log in logs:
        for entry in log:
            if entry.get(name) is not None:
                values_by_step.setdefault(entry["step"], []).append(entry[name])
    return {step: mean(values) for step, values in sorted(values_by_step.items())}
