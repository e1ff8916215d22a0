"""Finished runs of both arms to curves and paired differences, at equal samples and at equal wall-clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_ext.errors import InputError
from trl_ext.tools.experiments.metrics import METRICS, in_words

SAMPLES, CLOCK = "equal samples", "equal wall-clock"
STEPS, SECONDS = "optimizer steps", "seconds of training"  # what curves go over
Curve = list[tuple[float, float]]
Summary = Mapping[str, Any]
Pairs = Mapping[int, tuple[Summary, Summary]]  # by seed: of the idea's run, and of the one that it is compared with


@dataclass(frozen=True)
class Timed:
    """A run's accuracy over optimizer steps and over seconds of training."""

    steps: Curve
    seconds: Curve
    ended_early: bool

    @property
    def seconds_per_step(self) -> float:
        """Rollouts included, validations not."""
        return self.seconds[-1][0] / max(self.steps[-1][0], 1)


def timed(summary: Summary) -> Timed:
    """Curves of a run. The clock begins after the first validation, and stands still during the others.

    Raises:
        InputError: its validations are of different problems.
    """
    entries = summary["validations"]
    if len({entry["problems"] for entry in entries}) > 1:
        raise InputError("a run has validations of different sizes: leave final_validation_problems out")
    steps, seconds, validating = [], [], 0.0
    for entry in entries:
        if entry is not entries[0]:
            validating += entry["seconds"]
        steps.append((float(entry["step"]), float(entry["accuracy"])))
        at = entry["wall_clock_s"] - entries[0]["wall_clock_s"] - validating
        seconds.append((round(at, 2), float(entry["accuracy"])))
    return Timed(steps, seconds, bool(summary.get("ended_early")))


def value_at(x: float, curve: Curve) -> float:
    """By a line between two points, and the last value after them."""
    return float(np.interp(x, [at for at, _ in curve], [value for _, value in curve]))


def at_equal_samples(pairs: Pairs) -> list[tuple[float, float]]:
    """Both accuracies at the end, by seed; a run that ended early stays at what it ended with."""
    return [(timed(ours).steps[-1][1], timed(theirs).steps[-1][1]) for ours, theirs in pairs.values()]


def at_equal_wall_clock(pairs: Pairs) -> list[tuple[float, float]]:
    """Both at the time at which the faster of two runs was done, between the slower one's validations by a line.

    A run that ended early is not the faster one for it, but stays at what it ended with.
    """
    values = []
    for pair in pairs.values():
        ours, theirs = map(timed, pair)
        ends = [run.seconds[-1][0] for run in (ours, theirs) if not run.ended_early]
        at = min(ends) if ends else max(run.seconds[-1][0] for run in (ours, theirs))
        values.append((value_at(at, ours.seconds), value_at(at, theirs.seconds)))
    return values


ACCURACIES = {SAMPLES: at_equal_samples, CLOCK: at_equal_wall_clock}


def curves_of(runs: Sequence[Summary]) -> dict[str, list[Curve]]:
    """All curves of one arm, by what they go over."""
    timed_runs = [timed(run) for run in runs]
    return {STEPS: [run.steps for run in timed_runs], SECONDS: [run.seconds for run in timed_runs]}


def whole_pairs(runs: Mapping[str, Mapping[int, Summary]], idea: str, against: str) -> Pairs:
    """Both runs of each seed up to the first one of which one failed: seeds that fail are not left out, they end it."""
    whole: dict[int, tuple[Summary, Summary]] = {}
    for seed, ours in runs[idea].items():
        pair = (ours, runs[against][seed])
        if any("failed" in run for run in pair):
            break
        whole[seed] = pair
    return whole


def resolution(pairs: Pairs) -> float:
    """The step between two accuracies, which no standard deviation of differences is taken to be below."""
    return 1 / min(entry["problems"] for pair in pairs.values() for run in pair for entry in run["validations"])


def costs(pairs: Pairs) -> list[tuple[float, float]]:
    """Seconds of training for a step of both runs, by seed."""
    return [(timed(ours).seconds_per_step, timed(theirs).seconds_per_step) for ours, theirs in pairs.values()]


def changes(pairs: Pairs) -> dict[str, list[tuple[float, float]]]:
    """What else the last validation measured, as (idea, against) of every seed that has both."""
    last = [tuple(run["validations"][-1] for run in pair) for pair in pairs.values()]
    logged = dict.fromkeys(name for pair in last for entry in pair for name in entry if name.startswith("pass@"))
    changed = {}
    for name in (*(name for name in METRICS if not name.startswith("accuracy")), *logged):
        values = [(ours[name], theirs[name]) for ours, theirs in last if None not in (ours.get(name), theirs.get(name))]
        if values:
            changed[in_words(name)] = values
    return changed
