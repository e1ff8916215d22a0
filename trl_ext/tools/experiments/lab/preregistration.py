"""A hypothesis of a lab's question that is fixed before its runs, and what they say of it.

Two cells, a metric of validations, the direction that was published, and the seeds: fixed in the question's YAML, so
that neither the metric nor the number of seeds is chosen by the result (Nosek et al., The preregistration revolution,
2018).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from trl_ext.evaluation.statistics import paired_interval
from trl_ext.registry import check_fields, unknown

HIGHER, LOWER = "higher", "lower"
BEFORE = "before training"  # in place of a cell: the first validation of the same runs
# Metrics of the last validation, by their names there, and in words.
METRICS = {
    "accuracy": "accuracy",
    "accuracy_over_the_run": "accuracy, mean of all validations after the first",
    "entropy_estimate": "entropy, nats per token",
    "mean_tokens": "tokens per response",
    "mean_tokens_correct": "tokens per correct response",
    "mean_tokens_incorrect": "tokens per incorrect response",
    "truncated": "fraction cut off",
}
NUMBERED = {"pass@": "pass@{}", "by_level.": "accuracy at level {}"}  # such as pass@16, which needs as many samples
_IN_TOKENS_OR_NATS = ("mean_tokens", "entropy")

HOLDS, OPPOSITE, NOT_SEEN, INCOMPLETE = "holds", "the opposite", "not seen", "seeds are missing"


@dataclass(frozen=True)
class Hypothesis:
    """What is expected of two cells."""

    hypothesis: str  # in words
    cell: str
    against: str  # another cell, or `BEFORE`
    direction: str  # of the metric in `cell`, compared with that in `against`
    metric: str  # of `METRICS`, or one of `NUMBERED`
    seeds: Sequence[int]
    published: str  # the figure
    source: str  # where it is published

    def __post_init__(self) -> None:
        if self.direction not in (HIGHER, LOWER):
            raise unknown("direction", str(self.direction), (HIGHER, LOWER))
        if self.metric not in METRICS and numbered(self.metric) is None:
            raise unknown("metric", str(self.metric), [*METRICS, *(f"{name}N" for name in NUMBERED)])
        seeds = self.seeds
        if not isinstance(seeds, list) or len(seeds) < 2 or len({*map(str, seeds)}) < len(seeds):
            raise ValueError(f"seeds must be a list of two or more different numbers, got {seeds!r}")
        if self.cell == self.against:
            raise ValueError(f"cell and against are both {self.cell!r}: compare two")

    @property
    def measured(self) -> str:
        """The metric in words."""
        found = numbered(self.metric)
        return METRICS[self.metric] if found is None else NUMBERED[found[0]].format(found[1])


@dataclass(frozen=True)
class Effect:
    """What the runs say."""

    differences: Mapping[int, float]  # by seed, of the preregistered ones at which both runs ended
    interval: tuple[float, float] | None  # 95 %, of their mean; None of fewer than two
    verdict: str


def numbered(metric: str) -> tuple[str, int] | None:
    """The kind of `NUMBERED` that a metric is, and its number; None if it is none, or its k is no power of two."""
    for name in NUMBERED:
        found = re.fullmatch(f"{re.escape(name)}([1-9][0-9]*)", str(metric))
        if found and (name != "pass@" or int(found[1]).bit_count() == 1 < int(found[1])):
            return name, int(found[1])
    return None


def read_hypothesis(given: object, cells: Collection[str]) -> Hypothesis:
    """What a question's `preregistered` says; a ValueError with the field, its value and the choices."""
    try:
        if not isinstance(given, Mapping):
            raise ValueError(f"not a mapping: {given!r}")
        check_fields(given, Hypothesis)
        found = Hypothesis(**given)
        for name, choices in {"cell": cells, "against": [*cells, BEFORE]}.items():
            if getattr(found, name) not in choices:
                raise ValueError(f"{name}: {unknown('cell', str(getattr(found, name)), choices)}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"preregistered: {error}") from error
    return found


def unmeasured(of: Hypothesis, settings: Mapping[str, Any]) -> str | None:
    """Why a cell with these settings has no such metric, in a sentence; None if it has."""
    found, samples = numbered(of.metric), int(settings.get("validation_samples", 1))
    if found is None or found[0] != "pass@" or samples >= found[1]:
        return None
    return f"the metric {of.metric} needs validation_samples of at least {found[1]}, got {samples}"


def value_of(metric: str, validations: Sequence[Mapping[str, Any]], first: bool = False) -> float | None:
    """A run's metric at its end, or before training; None where it was not measured."""
    if metric == "accuracy_over_the_run" and not first:
        return mean(entry["accuracy"] for entry in validations[1:])
    entry = validations[0 if first else -1]
    found = numbered(metric)
    if found and found[0] == "by_level.":
        return entry["by_level"].get(str(found[1]))
    return entry.get("accuracy" if metric == "accuracy_over_the_run" else metric)


def effect_of(of: Hypothesis, runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Effect:
    """The paired differences over the preregistered seeds, and whether they show the published direction.

    Args:
        runs: summaries by cell and seed, `failed` in those of runs that failed. A seed that is missing or failed is
            not left out in silence: the verdict says so.
    """
    found = {}
    for seed in of.seeds:
        ours = _value(of, runs[of.cell].get(seed, {}))
        theirs = _value(of, runs[of.cell if of.against == BEFORE else of.against].get(seed, {}), of.against == BEFORE)
        if ours is not None and theirs is not None:
            found[seed] = ours - theirs
    if len(found) < 2:
        return Effect(found, None, INCOMPLETE)
    problems = [run["validations"][-1]["problems"] for run in runs[of.cell].values() if "validations" in run]
    # of fractions: the step between two of them; of equal differences the interval would else be a point
    least = 0.0 if of.metric.startswith(_IN_TOKENS_OR_NATS) else 1 / min(problems)
    low, high = paired_interval(list(found.values()), least_deviation=least)
    return Effect(found, (low, high), verdict_of(of, low, high) if len(found) == len(of.seeds) else INCOMPLETE)


def _value(of: Hypothesis, run: Mapping[str, Any], first: bool = False) -> float | None:
    return value_of(of.metric, run["validations"], first) if "validations" in run and "failed" not in run else None


def verdict_of(of: Hypothesis, low: float, high: float) -> str:
    """Whether an interval excludes 0, and on which side."""
    if low <= 0 <= high:
        return NOT_SEEN
    return HOLDS if (low > 0) == (of.direction == HIGHER) else OPPOSITE


def sentence(of: Hypothesis, effect: Effect) -> str:
    """The verdict in a line."""
    return (
        f"Preregistered: {of.hypothesis.strip()} Expected of {of.measured}: {of.direction} in {of.cell} than "
        f"{'' if of.against == BEFORE else 'in '}{of.against}. Found: {in_figures(effect)}: **{effect.verdict}**."
    )


def in_figures(effect: Effect) -> str:
    """An effect with its interval and its seeds."""
    if not effect.differences:
        return "nothing yet"
    seeds = ", ".join(map(str, effect.differences))
    interval = "" if effect.interval is None else "{:+.3f} to {:+.3f}; ".format(*effect.interval)
    return f"{mean(effect.differences.values()):+.3f} ({interval}seeds {seeds})"
