"""What came out of a lab's question: a table with the spread over seeds, plots, and a page that holds both."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from trl_ext.evaluation.statistics import paired_interval
from trl_ext.io import markdown_table, read_jsonl, write_json, write_text
from trl_ext.plots import figure, plot_accuracy
from trl_ext.redaction import redact_command
from trl_ext.runs.provenance import platform_of

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]  # cell -> seed -> the run's summary
PARTS = "report.json"  # lists of lines: title, results, plots (`{plots}` before the files' names), how
_PANELS = {
    "entropy": "entropy, nats per token",
    "completions/mean_length": "tokens per response",
    "grad_norm": "gradient norm",
    "clip_ratio/region_mean": "fraction of tokens clipped",
}


def write_report(
    folder: Path,
    title: str,
    runs: Runs,
    reference: str,
    commands: Mapping[str, Sequence[str]],
    metrics: Mapping[str, Mapping[int, Path]],
    published: str = "",
) -> Path:
    """Write `report.md`, its parts as data, `accuracy.png` and `training.png`; returns the page.

    Args:
        runs: summaries, `failed` in those of runs that failed.
        reference: the cell that the others are compared with, seed by seed.
        commands: of each cell's first run.
        metrics: each run's `metrics.jsonl`.
        published: what is known of the real model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = {cell: {seed: run for seed, run in of.items() if "failed" not in run} for cell, of in runs.items()}
    write_accuracy_plot(folder / "accuracy.png", ended, title)
    write_training_plot(folder / "training.png", metrics, title)
    lines = [*table(runs, reference), "", noise(ended), ""]
    lines += [f"Published for the real model: {published.strip()}", ""] if published else []
    plots = ["![validation accuracy]({plots}accuracy.png)", "", "![training]({plots}training.png)", ""]
    how = ["Each cell by its command, here with the first seed:", ""]
    how += [f"- {cell}: `python {shlex.join(redact_command(command))}`" for cell, command in commands.items()]
    every = [run for of in ended.values() for run in of.values()]
    for name, values in {
        "Commit": [run["commit"] for run in every],
        "Hardware": [platform_of(run) for run in every],
    }.items():
        how += ["", f"{name}: {'; '.join(sorted({str(value) for value in values})) or 'no run ended'}."]
    write_json(folder / PARTS, {"title": title, "results": lines, "plots": plots, "how": how})
    shown = [f"# {title}", "", *lines, *(line.format(plots="") for line in plots), *how]
    write_text(folder / "report.md", "\n".join(shown) + "\n")
    return folder / "report.md"


def table(runs: Runs, reference: str) -> list[str]:
    """A row for each cell, in Markdown."""
    seeds = list(next(iter(runs.values())))
    heads = ["cell", *(f"seed {seed}" for seed in seeds), "mean ± sd", f"less {reference} (95 % interval)",
             "over the run", "steps", "seconds", "ended early or failed"]  # fmt: skip
    rows = []
    for cell, of in runs.items():
        ended = {seed: run for seed, run in of.items() if "failed" not in run}
        last = {seed: float(run["validation_accuracy_after"]) for seed, run in ended.items()}
        cells = [cell, *(f"{last[seed]:.3f}" if seed in last else "–" for seed in seeds)]
        cells += [spread(list(last.values())), "" if cell == reference else difference(runs, cell, reference)]
        cells += [f"{mean(over_the_run(run) for run in ended.values()):.3f}" if ended else "–"]
        cells += [span([run["validations"][-1]["step"] for run in ended.values()])]
        cells += [span([round(run["wall_clock_s"]) for run in ended.values()])]
        cells += ["; ".join(f"seed {seed}: {why}" for seed, run in of.items() if (why := ending(run)))]
        rows.append(cells)
    return markdown_table(heads, rows)


def ending(run: Mapping[str, Any]) -> str:
    """How a run ended, if not with its last step."""
    return str(run.get("failed") or run.get("ended_early") or "")


def over_the_run(run: Mapping[str, Any]) -> float:
    """Mean accuracy of all validations after the first: how fast it learned, and how long that lasted."""
    return mean(entry["accuracy"] for entry in run["validations"][1:])


def spread(values: Sequence[float]) -> str:
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
    found = differences(runs, cell, reference)
    if len(found) < 2:
        return "–"
    low, high = paired_interval(found)
    verdict = "no difference seen" if low <= 0 <= high else "better" if low > 0 else "worse"
    return f"{mean(found):+.3f} ({low:+.3f} to {high:+.3f}), {verdict}"


def differences(runs: Runs, cell: str, reference: str) -> list[float]:
    """Of every seed at which both ended."""
    pairs = [(run, runs[reference].get(seed, {"failed": ""})) for seed, run in runs[cell].items()]
    return [
        float(a["validation_accuracy_after"]) - float(b["validation_accuracy_after"])
        for a, b in pairs
        if "failed" not in a and "failed" not in b
    ]


def noise(runs: Runs) -> str:
    """How far two figures may differ by chance."""
    found = [run for of in runs.values() for run in of.values()]
    if not found:
        return "No run ended."
    n = found[0]["final_validation_problems"]
    typical = mean(float(run["validation_accuracy_after"]) for run in found)
    error = (typical * (1 - typical) / n) ** 0.5
    deviations = [
        stdev(float(run["validation_accuracy_after"]) for run in of.values()) for of in runs.values() if len(of) > 1
    ]
    over_seeds = (
        f"; over seeds the cells' standard deviation is {mean(deviations):.3f} on average" if deviations else ""
    )
    return (
        f"Noise: sampled once on {n} problems, an accuracy of {typical:.2f} has a standard error of {error:.3f}"
        f"{over_seeds}. Intervals are of the difference at the same seeds, by Student's t."
    )


def write_accuracy_plot(path: Path, runs: Runs, title: str) -> None:
    """Validation accuracy against optimizer steps and against seconds, a color for each cell, a line for each seed."""
    with figure(path, (11, 4.5), (1, 2), title, sharey=True) as panels:
        for panel, key, label in zip(
            panels, ("step", "wall_clock_s"), ("optimizer steps", "wall-clock, s"), strict=True
        ):
            for number, (cell, of) in enumerate(runs.items()):
                for first, run in enumerate(of.values()):
                    style = {"color": f"C{number}", "alpha": 0.8, "linewidth": 1.2}
                    plot_accuracy(panel, run["validations"], key, **style, label=None if first else cell)
            panel.set_xlabel(label)
        panels[0].set(ylabel="validation accuracy", ylim=(0, 1))
        if any(runs.values()):
            panels[0].legend(loc="lower right", fontsize="small")


def write_training_plot(path: Path, metrics: Mapping[str, Mapping[int, Path]], title: str) -> None:
    """Entropy, response length, gradient norm and clip fraction against steps: the mean of a cell's seeds."""
    with figure(path, (11, 7), (2, 2), title) as panels:
        for number, (cell, of) in enumerate(metrics.items()):
            logs = [read_jsonl(log) for log in of.values() if log.exists()]
            for panel, name in zip(panels, _PANELS, strict=True):
                curve = mean_by_step(logs, name)
                panel.plot(list(curve), list(curve.values()), color=f"C{number}", linewidth=1.2, label=cell)
        for panel, label in zip(panels, _PANELS.values(), strict=True):
            panel.set(ylabel=label, xlabel="optimizer steps")
        panels[2].set_yscale("log")
        panels[0].legend(fontsize="small")


def mean_by_step(logs: Sequence[Sequence[Mapping[str, Any]]], name: str) -> dict[int, float]:
    """A metric's mean over the runs that have it at a step."""
    found: dict[int, list[float]] = {}
    for log in logs:
        for entry in log:
            if entry.get(name) is not None:
                found.setdefault(entry["step"], []).append(entry[name])
    return {step: mean(values) for step, values in sorted(found.items())}
