"""Runs until the intervals decide: the sequence of looks, and what each leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from trl_ext.tools.experiments.verdict.evidence import ACCURACIES, Pairs, Summary, resolution, whole_pairs
from trl_ext.tools.experiments.verdict.plan import ComparisonPlan, commands_of, run_name
from trl_ext.tools.experiments.verdict.sequential import OPEN, decision, repeated_interval

Runs = Mapping[str, Mapping[str, Mapping[int, Summary]]]  # task -> arm -> seed -> summary, or `failed`
RunAll = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Finding:
    """One interval of the verdict."""

    task: str
    axis: str  # of `ACCURACIES`
    idea: list[float]  # accuracies by seed
    against: list[float]
    interval: tuple[float, float] | None  # None before the first look
    decision: str

    @property
    def differences(self) -> list[float]:
        """By seed."""
        return [ours - theirs for ours, theirs in zip(self.idea, self.against, strict=True)]

    @property
    def deviation(self) -> float:
        """Of the differences over seeds; 0 of a single one."""
        return stdev(self.differences) if len(self.differences) > 1 else 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        low, high = self.interval or (None, None)
        return {
            "task": self.task, "axis": self.axis, "decision": self.decision, "difference": mean(self.differences),
            "low": low, "high": high, "deviation": self.deviation, "idea": self.idea, "against": self.against,
        }  # fmt: skip


def decide(plan: ComparisonPlan, recipes: Path, run: RunAll, report: Callable[[Runs], Sequence[Finding]]) -> bool:
    """Run up to each look in turn, report, and stop where every interval has decided; False where a run failed.

    What has ended is not run again, what failed is, when this is called anew.
    """
    for seeds in plan.design.looks:
        runs = by_task(plan, run(commands_of(plan, seeds, recipes)), seeds)
        findings = report(runs)
        if failures(runs):
            return False
        if all(finding.decision != OPEN for finding in findings):
            break
    return True


def by_task(plan: ComparisonPlan, summaries: Mapping[str, Mapping[str, Any]], seeds: int) -> Runs:
    """Summaries of the first seeds' runs."""
    return {
        task.name: {
            arm.label: {seed: summaries[run_name(task, arm, seed)] for seed in range(seeds)} for arm in plan.arms
        }
        for task in plan.tasks
    }


def failures(runs: Runs) -> dict[str, str]:
    """What the logs of failed runs end with, by task, arm and seed in words."""
    return {
        f"{task}, {arm}, seed {seed}": str(run["failed"])
        for task, arms in runs.items()
        for arm, arm_runs in arms.items()
        for seed, run in arm_runs.items()
        if "failed" in run
    }


def pairs_of(plan: ComparisonPlan, runs: Runs) -> dict[str, Pairs]:
    """By task, the seeds before the first of which a run failed; tasks without one are left out."""
    whole = {task: whole_pairs(arms, plan.idea.label, plan.against.label) for task, arms in runs.items()}
    return {task: pairs for task, pairs in whole.items() if pairs}


def findings_of(plan: ComparisonPlan, runs: Runs) -> list[Finding]:
    """Every interval, with what it decides."""
    findings = []
    for task, pairs in pairs_of(plan, runs).items():
        for axis, accuracies in ACCURACIES.items():
            ours, theirs = map(list, zip(*accuracies(pairs), strict=True))
            differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
            interval = repeated_interval(differences, plan.design, resolution(pairs))
            findings.append(Finding(task, axis, ours, theirs, interval, decision(interval, plan.margin)))
    return findings
