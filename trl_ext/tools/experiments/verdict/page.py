"""The page of a verdict: effects with intervals, curves with bands, what a step costs, and what else changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from trl_ext.io import markdown_table, write_csv, write_json, write_text
from trl_ext.plots import Band, band_of, figure, plot_bands, write_bands
from trl_ext.runs.provenance import origins
from trl_ext.tools.experiments.pages import in_code, in_figures
from trl_ext.tools.experiments.verdict.evidence import ACCURACIES, Pairs, changes, costs, curves_of
from trl_ext.tools.experiments.verdict.findings import Finding, Runs, failures, findings_of, pairs_of
from trl_ext.tools.experiments.verdict.plan import ComparisonPlan
from trl_ext.tools.experiments.verdict.sequential import BETTER, EQUAL, MOST_SEARCHED, OPEN, WORSE, power, seeds_needed

PAGE, DATA, CURVES, RUNS = "verdict.md", "verdict.json", "curves", "runs.csv"
COST = (
    "Median, least and most over seeds. Where one arm's seeds differ much, the machine had other work; with --jobs 2 "
    "both runs of a seed share what is left of it."
)
_DEVIATIONS = (0.005, 0.01, 0.015, 0.02, 0.03)  # of paired differences, for which power is stated beforehand


def write_report(folder: Path, plan: ComparisonPlan, runs: Runs, command: Sequence[str]) -> list[Finding]:
    """Write the page, its plot, and both as data; returns what was found.

    Args:
        command: what the verdict was asked by, script and arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    findings, pairs, failed = findings_of(plan, runs), pairs_of(plan, runs), failures(runs)
    bands = curve_bands(plan, pairs)
    if bands:
        write_plot(folder / f"{CURVES}.png", bands, plan.title)
        write_bands(folder / f"{CURVES}.csv", bands)
    write_runs(folder / RUNS, plan, findings)
    data = {
        "title": plan.title, "findings": [finding.as_data() for finding in findings], "failed": failed,
        "margin": plan.margin, "looks": plan.design.looks, "levels": list(plan.design.levels.values()),
        "cost": {task: costs(task_pairs) for task, task_pairs in pairs.items()},
        "changed": {task: changes(task_pairs) for task, task_pairs in pairs.items()},
    }  # fmt: skip
    write_json(folder / DATA, data)
    write_text(folder / PAGE, "\n".join(page(plan, findings, pairs, failed, command)) + "\n")
    return findings


def page(
    plan: ComparisonPlan,
    findings: Sequence[Finding],
    pairs: Mapping[str, Pairs],
    failed: Mapping[str, str],
    command: Sequence[str],
) -> list[str]:
    """The lines of the page."""
    lines = [f"# {plan.title}", "", *headline(plan, findings), ""]
    lines += [line for name, said in failed.items() for line in (f"**Failed:** {name}: {said}", "")]
    if failed:
        lines += ["Seeds count up to the first one that failed. The same command tries what failed again.", ""]
    lines += [*table(plan, findings), "", how_to_read(plan), ""]
    if pairs:
        lines += [f"![learning curves]({CURVES}.png)", ""]
        lines += ["Median and quartiles over seeds; seconds are of training, without the start and validations.", ""]
    lines += ["## Cost", "", *cost_table(plan, pairs), "", COST, ""]
    lines += ["## What else changed", "", *changes_table(plan, pairs), ""]
    lines += ["Means of the last validation, without intervals: nothing was tested here.", ""]
    lines += ["## Power, stated beforehand", "", *power_lines(plan), "", *power_after(plan, findings), ""]
    lines += ["## How", "", f"- {in_code(command)}"]
    lines += [f"- {arm.label}: {_settings(arm.settings)}" for arm in plan.arms]
    lines += [
        f"- {task.name}: `{task.config}`, {_settings(task.settings)}. {task.about}".strip() for task in plan.tasks
    ]
    every = [run for task_pairs in pairs.values() for pair in task_pairs.values() for run in pair]
    return [*lines, *(f"- {origin}" for origin in origins(every))]


def headline(plan: ComparisonPlan, findings: Sequence[Finding]) -> list[str]:
    """The verdict, a line for each interval."""
    if not findings:
        return ["No verdict: no seed has both runs."]
    return [f"- {finding.task}, {finding.axis}: **{sentence(plan, finding)}**" for finding in findings]


def sentence(plan: ComparisonPlan, finding: Finding) -> str:
    """A decision in words."""
    by = f"{mean(finding.differences):+.3f}"
    if finding.interval is None:
        return f"no verdict yet: {len(finding.differences)} of {plan.design.first} seeds for the first look ({by})"
    words = {
        BETTER: f"{plan.idea.label} is better",
        WORSE: f"{plan.idea.label} is worse",
        EQUAL: f"no difference of {plan.margin:g} or more",
        OPEN: "undecided",
    }[finding.decision]
    return f"{words} ({by}, {in_figures(finding.interval)}; {len(finding.differences)} seeds)"


def table(plan: ComparisonPlan, findings: Sequence[Finding]) -> list[str]:
    """A row for each interval."""
    heads = ["task", "at", plan.against.label, plan.idea.label, "difference", "interval", "sd of differences", "seeds"]
    rows = []
    for finding in findings:
        cells = [f"{mean(finding.against):.3f}", f"{mean(finding.idea):.3f}", f"{mean(finding.differences):+.3f}"]
        cells += [in_figures(finding.interval) if finding.interval else "–", f"{finding.deviation:.3f}"]
        rows.append([finding.task, finding.axis, *cells, str(len(finding.differences))])
    return markdown_table(heads, rows)


def how_to_read(plan: ComparisonPlan) -> str:
    """What the intervals hold, in a paragraph."""
    design = plan.design
    return (
        f"Differences are of runs with the same seed, so of the same base policy and problems. All {design.intervals} "
        f"intervals of the looks after {_listed(design.looks)} seeds hold together with a probability of "
        f"{1 - design.alpha:.0%}, however early it stopped, if the differences are normal; false alarms of others were "
        "simulated. Equal wall-clock is the accuracy at the time at which the faster of two runs was done; the slower "
        "one's is read from its curve, by a line between two validations. Seeds are added until every interval "
        f"excludes 0 or lies within {plan.margin:g} of it."
    )


def power_lines(plan: ComparisonPlan) -> list[str]:
    """How many seeds it takes to see the margin."""
    rows = []
    for deviation in _DEVIATIONS:
        needed = seeds_needed(plan.margin, deviation, plan.design.intervals)
        achieved = power(plan.design, plan.margin, deviation)
        rows.append([f"{deviation:g}", str(needed or f"more than {MOST_SEARCHED}"), f"{achieved:.2f}"])
    heads = ["sd of differences", "seeds for a power of 0.8", f"power with {plan.design.most}"]
    return [f"To see a difference of {plan.margin:g}:", "", *markdown_table(heads, rows)]


def power_after(plan: ComparisonPlan, findings: Sequence[Finding]) -> list[str]:
    """The same for the standard deviations that were found, for the next time."""
    lines = []
    for axis in ACCURACIES:
        if deviations := [finding.deviation for finding in findings if finding.axis == axis and finding.deviation]:
            needed = seeds_needed(plan.margin, max(deviations), plan.design.intervals) or f"more than {MOST_SEARCHED}"
            lines.append(f"- Found at {axis}: at most {max(deviations):.3f}, for which it takes {needed} seeds.")
    return lines


def cost_table(plan: ComparisonPlan, pairs: Mapping[str, Pairs]) -> list[str]:
    """Seconds of training for a step, over seeds."""
    rows = []
    for task, task_pairs in pairs.items():
        sides = list(zip(*costs(task_pairs), strict=True))
        cells = [f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in sides]
        ratios = [ours / theirs for ours, theirs in costs(task_pairs) if theirs > 0]
        rows.append([task, *cells, f"{median(ratios):.2f}" if ratios else "–"])
    heads = [f"{arm.label}, s per step" for arm in plan.arms]
    return markdown_table(["task", *heads, "ratio at the same seed"], rows)


def changes_table(plan: ComparisonPlan, pairs: Mapping[str, Pairs]) -> list[str]:
    """What else the last validation measured."""
    rows = []
    for task, task_pairs in pairs.items():
        for name, values in changes(task_pairs).items():
            ours, theirs = (mean(side) for side in zip(*values, strict=True))
            rows.append([task, name, f"{theirs:.3f}", f"{ours:.3f}", f"{ours - theirs:+.3f}"])
    return markdown_table(["task", "metric", plan.against.label, plan.idea.label, "difference"], rows)


def curve_bands(plan: ComparisonPlan, pairs: Mapping[str, Pairs]) -> dict[str, dict[str, Band]]:
    """By panel, the band of each arm."""
    bands: dict[str, dict[str, Band]] = {}
    for task, task_pairs in pairs.items():
        sides = dict(zip((arm.label for arm in plan.arms), zip(*task_pairs.values(), strict=True), strict=True))
        for label, runs in sides.items():
            for axis, curves in curves_of(runs).items():
                bands.setdefault(f"{task}, {axis}", {})[label] = band_of(curves)
    return bands


def write_plot(path: Path, bands: Mapping[str, Mapping[str, Band]], title: str) -> None:
    """A row for each task: over steps, and over seconds."""
    rows = len(bands) // 2
    with figure(path, (11, 4 * rows), (rows, 2), title) as panels:
        for axes, (name, arm_bands) in zip(panels, bands.items(), strict=True):
            task, _, axis = name.rpartition(", ")
            plot_bands(axes, arm_bands)
            axes.set(xlabel=axis, ylabel=f"validation accuracy, {task}")


def write_runs(path: Path, plan: ComparisonPlan, findings: Sequence[Finding]) -> None:
    """Both accuracies of every seed, as CSV."""
    rows = (
        [finding.task, finding.axis, seed, round(ours, 6), round(theirs, 6)]
        for finding in findings
        for seed, (ours, theirs) in enumerate(zip(finding.idea, finding.against, strict=True))
    )
    write_csv(path, ["task", "at", "seed", plan.idea.label, plan.against.label], rows)


def _settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as in that file"


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
