"""How a wall-clock budget is spent: a run's measured rates -> how many steps another one gets, and what buys more."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

from trl_ext.runs.clock import reserve_seconds

_SETTLED = 0.75  # of a run's steps, the last ones: the first compile, capture and fill caches
_LATE = 0.25  # the ones that say how long completions will be
_STEPS, _ROLLOUTS = 10, 5  # that a run needs to say anything
_MOST_STEPS = 10**9  # that are planned


@dataclass(frozen=True)
class Rates:
    """Seconds, as measured."""

    start: float  # from the process's start to the first validation, once the policy is there
    completion_token: float  # of a rollout, per token of a completion
    trained_token: float  # of the optimizer steps, per token of a completion that is not left out
    sync: float  # of the policy's weights to the engine
    step: float  # of an optimizer step outside rollout and training, such as logging
    problem: float  # of a validation on the way
    slowest_problem: float  # of the slowest validation, by which the time for the last one is reserved
    save: float  # of a checkpoint


@dataclass(frozen=True)
class Workload:
    """What a run does, and what the run that was looked at (the pilot) did."""

    rollout_batch_size: int  # completions per rollout
    updates: int  # optimizer steps per rollout
    epochs: int  # passes over a rollout
    tokens: float  # of a completion, on average
    validate_every: int  # optimizer steps
    problems: int  # of a validation on the way
    final_problems: int  # of the one at the end
    save_every: int | None  # optimizer steps; None for never
    pilot_steps: int = 1
    pilot_rows: float = 1.0  # fraction of the pilot's rows that was trained on; the others are zero-advantage rows
    # Power of the number of steps by which the rows that are trained on add up; 1 where every step has as many, less
    # where ever more are left out.
    rows_growth: float = 1.0
    restore_best: bool = False  # whether the best weights are read again at the end


@dataclass(frozen=True)
class BudgetPlan:
    """Optimizer steps that fit in, and the seconds of each part of the budget."""

    steps: int
    seconds: dict[str, float]


def fraction_trained(work: Workload, steps: int) -> float:
    """The fraction of their rows that so many steps train on: the pilot's, extrapolated by its power law."""
    return min(1.0, work.pilot_rows * (steps / work.pilot_steps) ** (work.rows_growth - 1)) if steps else 0.0


def seconds_of(rates: Rates, work: Workload, steps: int) -> dict[str, float]:
    """Seconds of so many optimizer steps by what they are spent on; what is not done in each one, in proportion."""
    completion_tokens = work.rollout_batch_size * work.tokens
    trained_tokens = completion_tokens * work.epochs * fraction_trained(work, steps)
    parts = {
        "rollout": rates.completion_token * completion_tokens / work.updates,
        "training": rates.trained_token * trained_tokens / work.updates,
        "weight sync": rates.sync / work.updates,
        "overhead": rates.step,
        "validation": rates.problem * work.problems / work.validate_every,
        "checkpoints": rates.save / work.save_every if work.save_every else 0.0,
    }
    return {name: steps * seconds for name, seconds in parts.items()}


def plan(rates: Rates, work: Workload, budget: float) -> BudgetPlan:
    """How a budget is spent: start, first validation, as many steps as fit, final validation with its reserve."""
    start, first = rates.start, rates.problem * work.problems
    saving = rates.save * (2 if work.restore_best else 1)
    final = reserve_seconds(rates.slowest_problem * work.final_problems, saving)
    left = budget - start - first - final
    fitting = bisect_right(range(_MOST_STEPS), left, key=lambda steps: sum(seconds_of(rates, work, steps).values()))
    steps = max(0, fitting - 1)  # none at all is one of the numbers that fit
    seconds = seconds_of(rates, work, steps)
    seconds["validation"] += first
    return BudgetPlan(steps, {"start": start, **seconds, "end": final})


def measured(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Rates:
    """Rates by a run's `metrics.jsonl`, `summary.json` and settings; a ValueError where it says too little of them."""
    work = workload(metrics, settings)
    before, *settled = last_steps(metrics, work.updates, _SETTLED)
    tokens = work.rollout_batch_size * mean_of(settled, "completions/mean_length")  # of a rollout
    rollout, sync = mean_of(settled, "rollout_time"), mean_of(settled, "sync_time")
    training = mean_of(settled, "step_time") * work.updates - rollout - sync  # seconds of a rollout's optimizer steps
    trained = tokens * work.epochs * mean_of(settled, "step/rows_trained", 1.0)
    validations = summary["validations"]
    problem = [entry["seconds"] / entry["problems"] for entry in validations]
    saved = float(summary.get("seconds_to_save") or 0.0)
    made = float(summary.get("seconds_to_make_policy") or 0.0)  # once; another run finds it in the cache
    return Rates(
        start=validations[0]["wall_clock_s"] - validations[0]["seconds"] - made,
        completion_token=rollout / tokens,
        trained_token=max(0.0, training) / trained if trained else 0.0,
        sync=sync,
        step=_overhead([before, *settled], validations, work.save_every, saved),
        problem=mean(problem[1:] or problem),  # the first is slow: it warms up
        slowest_problem=max(problem),
        save=saved,
    )


def last_steps(metrics: Sequence[Mapping[str, Any]], updates: int, fraction: float) -> list[Mapping[str, Any]]:
    """What was logged of the whole rollouts in the last `fraction` of steps, at least one, after the entry before."""
    steps = [entry for entry in metrics if "step_time" in entry]
    ends = [i for i, entry in enumerate(steps) if entry["step"] % updates == 0]  # of rollouts
    starts = [i for i in ends[:-1] if i < (1 - fraction) * ends[-1]]
    done = steps[-1]["step"] if steps else 0
    last = steps[starts[-1] : ends[-1] + 1] if starts and done >= max(_STEPS, _ROLLOUTS * updates) else []
    if not any("rollout_time" in entry for entry in last[1:]):
        raise ValueError(
            f"too few steps to measure rates: {done} logged steps of {done // updates} rollouts; at least {_STEPS} "
            f"steps of {_ROLLOUTS} rollouts are needed, with rollout_time"
        )
    return last


def _overhead(
    settled: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], every: int | None, save: float
) -> float:
    """Seconds between a step's end and the next one's begin that are neither validation nor saving."""
    first, last = settled[0], settled[-1]
    between = [v for v in validations if first["step"] <= v["step"] < last["step"]]
    saves = sum(1 for step in range(first["step"], last["step"]) if every and step % every == 0)
    logged = pairwise(settled)  # the mean of the steps since the entry before
    stepping = sum(entry["step_time"] * (entry["step"] - before["step"]) for before, entry in logged)
    spent = stepping + sum(v["seconds"] for v in between) + saves * save
    return max(0.0, (last["wall_clock_s"] - first["wall_clock_s"] - spent) / (last["step"] - first["step"]))


def workload(metrics: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Workload:
    """What a run does, by its settings and the completions that it has sampled; a ValueError as of `measured`."""
    rollout, problems = int(settings["rollout_batch_size"]), int(settings["validation_problems"])
    epochs = int(settings.get("epochs_per_rollout_batch") or 1)
    updates = epochs * rollout // int(settings["train_batch_size"])
    late = last_steps(metrics, updates, _LATE)[1:]
    steps = [entry for entry in metrics if "step_time" in entry]
    pilot_rows = mean_of(steps, "step/rows_trained", 1.0)
    first_half = mean_of(steps[: len(steps) // 2], "step/rows_trained", 1.0)
    return Workload(
        rollout_batch_size=rollout,
        updates=updates,
        epochs=epochs,
        tokens=mean_of(late, "completions/mean_length"),
        validate_every=int(settings.get("validate_every", 20)),
        problems=problems,
        final_problems=int(settings.get("final_validation_problems") or problems),
        save_every=int(settings["save_steps"]) if settings.get("save_strategy", "steps") != "no" else None,
        pilot_steps=steps[-1]["step"],
        pilot_rows=pilot_rows,
        # Of rows that add up to R n^p after n steps: R n^p / R (n / 2)^p = 2^p.
        rows_growth=1 + math.log2(pilot_rows / first_half) if first_half else 1.0,
        restore_best=bool(settings.get("restore_best")),
    )


def mean_of(entries: Sequence[Mapping[str, Any]], name: str, otherwise: float = 0.0) -> float:
    """Mean of a metric where it was logged, or what holds where it never was."""
    values = [float(entry[name]) for entry in entries if entry.get(name) is not None]
    return mean(values) if values else otherwise
