"""A hypothesis of a lab's question that is fixed before its runs, and what they say of it.

Two cells, a metric of validations, the direction that was published, and the seeds: fixed in the question's YAML, so
that neither the metric nor the number of seeds is chosen by the result (Nosek et al., The preregistration revolution,
2018).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from trl_ext.evaluation.statistics import paired_interval
from trl_ext.registry import unknown
from trl_ext.tools.experiments.metrics import METRICS, NUMBERED, in_words, numbered, value_of
from trl_ext.tools.experiments.pages import in_figures
from trl_ext.tools.experiments.runspec import from_fields, named_in_errors

HIGHER, LOWER = "higher", "lower"
BEFORE = "before training"  # in place of a cell: the first validation of the same runs
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
    def expected(self) -> str:
        """The metric and its direction in words."""
        against = self.against if self.against == BEFORE else f"in {self.against}"
        return f"{in_words(self.metric)}: {self.direction} in {self.cell} than {against}"


@dataclass(frozen=True)
class Effect:
    """What the runs say."""

    differences: Mapping[int, float]  # by seed, of the preregistered ones at which both runs ended
    interval: tuple[float, float] | None  # 95 %, of their mean; None of fewer than two
    verdict: str

    @property
    def in_figures(self) -> str:
        """With its interval and its seeds."""
        if not self.differences:
            return "nothing yet"
        seeds = ", ".join(map(str, self.differences))
        interval = "" if self.interval is None else f"{in_figures(self.interval)}; "
        return f"{mean(self.differences.values()):+.3f} ({interval}seeds {seeds})"


def read_hypothesis(given: object, cells: Collection[str]) -> Hypothesis:
    """What a question's `preregistered` says; a ValueError with the field, its value and the choices."""
    with named_in_errors("preregistered"):
        hypothesis = from_fields(given, Hypothesis)
        for name, choices in {"cell": cells, "against": [*cells, BEFORE]}.items():
            if (label := getattr(hypothesis, name)) not in choices:
                raise ValueError(f"{name}: {unknown('cell', str(label), choices)}")
    return hypothesis


def unmeasured(hypothesis: Hypothesis, settings: Mapping[str, Any]) -> str | None:
    """Why a cell with these settings has no such metric, in a sentence; None if it has."""
    kind, samples = numbered(hypothesis.metric), int(settings.get("validation_samples", 1))
    if kind is None or kind[0] != "pass@" or samples >= kind[1]:
        return None
    return f"the metric {hypothesis.metric} needs validation_samples of at least {kind[1]}, got {samples}"


def effect_of(hypothesis: Hypothesis, runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Effect:
    """The paired differences over the preregistered seeds, and whether they show the published direction.

    Args:
        runs: summaries by cell and seed, `failed` in those of runs that failed. A seed that is missing or failed is
            not left out in silence: the verdict says so.
    """
    differences, is_before = {}, hypothesis.against == BEFORE
    baseline = runs[hypothesis.cell if is_before else hypothesis.against]
    for seed in hypothesis.seeds:
        ours = _value(hypothesis.metric, runs[hypothesis.cell].get(seed, {}))
        theirs = _value(hypothesis.metric, baseline.get(seed, {}), is_before)
        if ours is not None and theirs is not None:
            differences[seed] = ours - theirs
    if len(differences) < 2:
        return Effect(differences, None, INCOMPLETE)
    problems = [run["validations"][-1]["problems"] for run in runs[hypothesis.cell].values() if "validations" in run]
    # of fractions: the step between two of them; of equal differences the interval would else be a point
    least = 0.0 if hypothesis.metric.startswith(_IN_TOKENS_OR_NATS) else 1 / min(problems)
    low, high = paired_interval(list(differences.values()), least_deviation=least)
    is_complete = len(differences) == len(hypothesis.seeds)
    return Effect(differences, (low, high), verdict_of(hypothesis, low, high) if is_complete else INCOMPLETE)


def _value(metric: str, run: Mapping[str, Any], first: bool = False) -> float | None:
    return value_of(metric, run["validations"], first) if "validations" in run and "failed" not in run else None


def verdict_of(hypothesis: Hypothesis, low: float, high: float) -> str:
    """Whether an interval excludes 0, and on which side."""
    if low <= 0 <= high:
        return NOT_SEEN
    return HOLDS if (low > 0) == (hypothesis.direction == HIGHER) else OPPOSITE


def sentence(hypothesis: Hypothesis, effect: Effect) -> str:
    """The verdict in a line."""
    return (
        f"Preregistered: {hypothesis.hypothesis.strip()} Expected of {hypothesis.expected}. "
        f"Found: {effect.in_figures}: **{effect.verdict}**."
    )
