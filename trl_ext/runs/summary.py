"""What a run has come to, as its `summary.json` and the records of its checkpoints hold it: types of the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trl_ext.io import write_json
from trl_ext.redaction import redact


class Selection(TypedDict):
    """How far an accuracy is one that its weights were chosen by."""

    fresh_samples: bool
    problems_that_chose: int
    accuracy_on_others: float | None


class ValidationEntry(TypedDict):
    """One measurement of the policy: when, on how many problems, and `Report.summary()`, its `pass@k` left out."""

    step: int
    wall_clock_s: float
    seconds: float
    weights_of_step: NotRequired[int]  # where they are not those of `step`
    problems: int
    accuracy: float
    outcomes: dict[str, float]
    by_level: dict[str, float]
    by_subject: dict[str, float]
    mean_tokens: float
    mean_tokens_correct: NotRequired[float | None]  # earlier versions did not measure these three
    mean_tokens_incorrect: NotRequired[float | None]
    entropy_estimate: NotRequired[float | None]
    truncated: float
    selection: NotRequired[Selection]
    stage: NotRequired[str]  # of a pipeline


class RunSummary(TypedDict):
    """`summary.json`; a recipe adds what it has to say, such as `steps` or `trace_counts`."""

    validation_accuracy_before: float
    validation_accuracy_after: float
    best_validation_accuracy: float
    best_validation_step: int
    validation_problems: int
    final_validation_problems: int
    wall_clock_s: float
    recipe: NotRequired[str]
    seed: NotRequired[int]
    sampling: NotRequired[dict[str, dict[str, Any]]]  # of `rollouts` and `validations`, as the engine was told
    ended_early: NotRequired[str | None]
    seconds_to_make_policy: NotRequired[float]
    seconds_to_save: NotRequired[float | None]
    command: NotRequired[str]
    commit: NotRequired[str | None]
    versions: NotRequired[dict[str, str]]
    hardware: NotRequired[dict[str, Any]]
    validations: list[ValidationEntry]


def weights_step(entry: ValidationEntry) -> int:
    """The optimizer step whose weights were measured."""
    return entry.get("weights_of_step", entry["step"])


def write_summary(
    path: Path, history: Sequence[ValidationEntry], wall_clock_s: float, more: Mapping[str, Any]
) -> RunSummary:
    """Write `summary.json` and return it."""
    best = max(history, key=lambda entry: entry["accuracy"])
    known = {
        "validation_accuracy_before": history[0]["accuracy"],
        "validation_accuracy_after": history[-1]["accuracy"],
        "best_validation_accuracy": best["accuracy"],
        "best_validation_step": weights_step(best),
        "validation_problems": history[0]["problems"],
        "final_validation_problems": history[-1]["problems"],
        "wall_clock_s": round(wall_clock_s, 1),
        **more,
        "validations": list(history),
    }
    summary: RunSummary = redact(known)
    write_json(path, summary, indent=2)
    return summary
