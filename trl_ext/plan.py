"""How a wall-clock budget is spent: a run's measured rates -> how many steps another one gets, and what buys more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import Any

_LATE = 0.25  # of a run's steps, the last of which say how fast it goes on: early ones train on more rows
_STEPS, _ROLLOUTS = 10, 5  # that a run needs to say so


@dataclass(frozen=True)
class Rates:
    """Seconds, as measured.

    Attributes:
        start: from the process's start to the first validation, once the policy is there.
        completion_token: of a rollout, per token of a completion.
        trained_token: of the optimizer steps, per token of a completion, rows that are left out included.
        sync: of the policy's weights to the engine.
        step: of an optimizer step beside rollout and training, such as logging.
        problem: of a validation on the way.
        slowest_problem: of the slowest validation, by which the time for the last one is reserved.
        save: of a checkpoint.
    """

    start: float
    completion_token: float
    trained_token: float
    sync: float
    step: float
    problem: float
    slowest_problem: float
    save: float


@dataclass(frozen=True)
class Workload:
    """What a run does.

    Attributes:
        rollout_batch_size: completions per rollout.
        updates: optimizer steps per rollout.
        epochs: passes over a rollout.
        tokens: of a completion, on average.
        validate_every: optimizer steps.
        problems: of a validation on the way.
        final_problems: of the one at the end.
        save_every: optimizer steps; None for never.
        restore_best: whether the best weights are read again at the end.
    """

    rollout_batch_size: int
    updates: int
    epochs: int
    tokens: float
    validate_every: int
    problems: int
    final_problems: int
    save_every: int | None
    restore_best: bool = False


@dataclass(frozen=True)
class Plan:
    """Optimizer steps that fit in, and the seconds of each part of the budget."""

    steps: int
    seconds: dict[str, float]


def per_step(rates: Rates, work: Workload) -> dict[str, float]:
    """Seconds of an optimizer step by what they are spent on; what is done every so often has its share."""
    completion_tokens = work.rollout_batch_size * work.tokens
    return {
        "rollout": rates.completion_token * completion_tokens / work.updates,
        "training": rates.trained_token * completion_tokens * work.epochs / work.updates,
        "weight sync": rates.sync / work.updates,
        "overhead": rates.step,
        "validation": rates.problem * work.problems / work.validate_every,
        "checkpoints": rates.save / work.save_every if work.save_every else 0.0,
    }


def plan(rates: Rates, work: Workload, budget: float) -> Plan:
    """How a budget is spent: start, first validation, as many steps as fit, final validation with its reserve."""
    start, first = rates.start, rates.problem * work.problems
    saving = rates.save * (2 if work.restore_best else 1)
    # As `Validation.seconds_to_end` reserves it.
    final = 1.2 * (rates.slowest_problem * work.final_problems + saving) + 2.0
    parts = per_step(rates, work)
    left = budget - start - first - final
    steps = max(0, math.floor(left / sum(parts.values())))
    seconds = {name: value * steps for name, value in parts.items()}
    seconds["validation"] += first
    return Plan(steps, {"start": start, **seconds, "end": final})


def levers(rates: Rates, work: Workload, budget: float) -> list[tuple[str, int]]:
    """Changes, and the optimizer steps that each would add; what buys most comes first."""
    before = plan(rates, work, budget).steps
    faster: Mapping[str, Callable[[], tuple[Rates, Workload]]] = {
        "rollouts twice as fast": lambda: (replace(rates, completion_token=rates.completion_token / 2), work),
        "training twice as fast": lambda: (replace(rates, trained_token=rates.trained_token / 2), work),
        "weight sync twice as fast": lambda: (replace(rates, sync=rates.sync / 2), work),
        "completions a quarter shorter": lambda: (rates, replace(work, tokens=0.75 * work.tokens)),
        "validation half as often": lambda: (rates, replace(work, validate_every=2 * work.validate_every)),
        "half the problems on the way": lambda: (rates, replace(work, problems=work.problems // 2)),
        "half the problems at the end": lambda: (rates, replace(work, final_problems=work.final_problems // 2)),
        "half the start-up": lambda: (replace(rates, start=rates.start / 2), work),
        "checkpoints half as often": lambda: (
            rates,
            replace(work, save_every=2 * work.save_every if work.save_every else None),
        ),
        "twice the updates per rollout": lambda: (rates, replace(work, updates=2 * work.updates)),
    }
    found = [(name, plan(*change(), budget).steps - before) for name, change in faster.items()]
    return sorted(found, key=lambda lever: -lever[1])


def measured(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Rates:
    """Rates of a run, from its `metrics.jsonl`, `summary.json` and resolved settings.

    Raises:
        ValueError: it has too few steps or rollouts, or they were logged before rollouts were timed.
    """
    late = late_steps(metrics, updates_of(settings))[1:]
    tokens = float(settings["rollout_batch_size"]) * mean_of(late, "completions/mean_length")  # of a rollout
    updates, epochs = updates_of(settings), float(settings.get("epochs_per_rollout_batch") or 1)
    rollout, sync = mean_of(late, "rollout_time"), mean_of(late, "sync_time")
    training = mean_of(late, "step_time") * updates - rollout - sync  # seconds of a rollout's optimizer steps
    validations = summary["validations"]
    problem = [entry["seconds"] / entry["problems"] for entry in validations]
    saved = float(summary.get("seconds_to_save") or 0.0)
    made = float(summary.get("seconds_to_make_policy") or 0.0)  # once; another run finds it in the cache
    return Rates(
        start=validations[0]["wall_clock_s"] - validations[0]["seconds"] - made,
        completion_token=rollout / tokens,
        trained_token=max(0.0, training) / (tokens * epochs),
        sync=sync,
        step=overhead(metrics, validations, settings, saved),
        problem=mean(problem[1:] or problem),  # the first is slow: it warms up
        slowest_problem=max(problem),
        save=saved,
    )


def late_steps(metrics: Sequence[Mapping[str, Any]], updates: int) -> list[Mapping[str, Any]]:
    """What was logged of the whole rollouts of a run's last quarter, at least one, and before it the entry they follow.

    Args:
        updates: optimizer steps per rollout.

    Raises:
        ValueError: as of `measured`.
    """
    steps = [entry for entry in metrics if "step_time" in entry]
    ends = [i for i, entry in enumerate(steps) if entry["step"] % updates == 0]  # of rollouts
    starts = [i for i in ends[:-1] if i < (1 - _LATE) * ends[-1]]
    done = steps[-1]["step"] if steps else 0
    late = steps[starts[-1] : ends[-1] + 1] if starts and done >= max(_STEPS, _ROLLOUTS * updates) else []
    if not any("rollout_time" in entry for entry in late[1:]):
        raise ValueError(
            f"{done} logged steps of {done // updates} rollouts say too little of how fast it is; {_STEPS} steps of at "
            f"least {_ROLLOUTS} rollouts are needed, with rollout_time"
        )
    return late


def overhead(
    metrics: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    save: float,
) -> float:
    """Seconds between a step's end and the next one's begin that are neither validation nor saving."""
    late = late_steps(metrics, updates_of(settings))
    first, last = late[0], late[-1]
    between = [v for v in validations if first["step"] <= v["step"] < last["step"]]
    every = settings.get("save_steps") if settings.get("save_strategy", "steps") != "no" else None
    saves = sum(1 for step in range(first["step"], last["step"]) if every and step % int(every) == 0)
    logged = pairwise(late)  # the mean of the steps since the entry before
    stepping = sum(entry["step_time"] * (entry["step"] - before["step"]) for before, entry in logged)
    spent = stepping + sum(v["seconds"] for v in between) + saves * save
    return max(0.0, (last["wall_clock_s"] - first["wall_clock_s"] - spent) / (last["step"] - first["step"]))


def workload(metrics: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Workload:
    """What a run does, by its resolved settings and the completions that it has sampled."""
    problems = int(settings["validation_problems"])
    return Workload(
        rollout_batch_size=int(settings["rollout_batch_size"]),
        updates=updates_of(settings),
        epochs=int(settings.get("epochs_per_rollout_batch") or 1),
        tokens=mean_of(late_steps(metrics, updates_of(settings))[1:], "completions/mean_length"),
        validate_every=int(settings.get("validate_every", 20)),
        problems=problems,
        final_problems=int(settings.get("final_validation_problems") or problems),
        save_every=int(settings["save_steps"]) if settings.get("save_strategy", "steps") != "no" else None,
        restore_best=bool(settings.get("restore_best")),
    )


def updates_of(settings: Mapping[str, Any]) -> int:
    """Optimizer steps on a rollout."""
    epochs = int(settings.get("epochs_per_rollout_batch") or 1)
    return epochs * int(settings["rollout_batch_size"]) // int(settings["train_batch_size"])


def mean_of(entries: Sequence[Mapping[str, Any]], name: str) -> float:
    """Mean of a metric where it was logged; 0 where it never was."""
    values = [float(entry[name]) for entry in entries if entry.get(name) is not None]
    return mean(values) if values else 0.0
