"""What a validation measures, by its name there, and in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

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


def in_words(metric: str) -> str:
    """A metric in words; its name if there are none."""
    kind = numbered(metric)
    return METRICS.get(metric, metric) if kind is None else NUMBERED[kind[0]].format(kind[1])


def numbered(metric: str) -> tuple[str, int] | None:
    """The kind of `NUMBERED` that a metric is, and its number; None if it is none, or its k is no power of two."""
    for name in NUMBERED:
        match = re.fullmatch(f"{re.escape(name)}([1-9][0-9]*)", str(metric))
        if match and (name != "pass@" or int(match[1]).bit_count() == 1 < int(match[1])):
            return name, int(match[1])
    return None


def value_of(metric: str, validations: Sequence[Mapping[str, Any]], first: bool = False) -> float | None:
    """A run's metric at its end, or before training; None where it was not measured."""
    if metric == "accuracy_over_the_run" and not first:
        return accuracy_over_the_run(validations)
    entry = validations[0 if first else -1]
    kind = numbered(metric)
    if kind and kind[0] == "by_level.":
        return entry["by_level"].get(str(kind[1]))
    return entry.get("accuracy" if metric == "accuracy_over_the_run" else metric)


def accuracy_over_the_run(validations: Sequence[Mapping[str, Any]]) -> float:
    """Mean accuracy of all validations after the first: how fast it learned, and how long that lasted."""
    return mean(float(entry["accuracy"]) for entry in validations[1:])
