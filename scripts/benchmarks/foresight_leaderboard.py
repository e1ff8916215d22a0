"""What four hours on two H100s get: the leaderboard's GRPO stage foreseen, over what nobody knows before the run.

    python -m scripts.benchmarks.foresight_leaderboard

A prediction with assumed efficiencies, not a measurement. It varies the mean length of a completion, the fraction of
rows with a gradient, and the assumptions: as they are, and with half of every ceiling and twice the host's seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from trl_ext.experiments.foresee import read_shape
from trl_ext.foresight.efficiency import Efficiency
from trl_ext.foresight.hardware import GPUS, gpu_by_name
from trl_ext.foresight.roofline import Timing, count_costs, foresee_time
from trl_ext.foresight.shape import Launch, Lengths, RunShape
from trl_ext.io import read_yaml

_MEANS = (300.0, 450.0, 600.0)  # tokens of a completion
_TRAINED = (0.4, 0.7, 1.0)  # fraction of the rows
_AS_IT_IS = Efficiency()
_HALF = dataclasses.replace(
    _AS_IT_IS,
    **{name: getattr(_AS_IT_IS, name) / 2 for name in ("compute", "memory", "interconnect")},
    **{name: 2 * getattr(_AS_IT_IS, name) for name in ("op_seconds", "engine_step_seconds", "reward_seconds",
                                                       "tensor_seconds", "step_seconds", "start_seconds")},
)  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "micro_train_batch_size 4": {"micro_rows": 4},
    "micro_train_batch_size 8": {"micro_rows": 8},
    "gradient_checkpointing false": {"checkpointing": False},
    "save_steps 100": {"save_every": 100},
    "validation_problems 5000": {"validation_problems": 5000},
    "micro_train_batch_size 8, save_steps 100": {"micro_rows": 8, "save_every": 100},
}


def stage_of(config: Path) -> tuple[RunShape, float]:
    """The GRPO stage of a pipeline: its shape, and the seconds that the stages before leave it."""
    pipeline = read_yaml(config)
    *before, stage = pipeline["stages"]
    budget = pipeline["time_budget"] * (1 - sum(earlier["share"] for earlier in before))
    changes = [f"{name}={value}" for name, value in {**stage["settings"], "time_budget": budget}.items()]
    launch = Launch.of_accelerate(Path(pipeline["launch"][1]))
    return read_shape(Path(stage["config"]), changes, launch), budget


def line(timing: Timing, budget: float, *about: Any) -> str:
    """A row of the table."""
    found = timing.plan(budget)
    parts = " | ".join(f"{found.seconds[name] / budget:.0%}" for name in ("rollout", "training", "validation"))
    validations = found.steps // timing.workload.validate_every + 2
    last = next(phase.seconds for phase in timing.phases if phase.name == "validation at the end")
    return f"| {' | '.join(map(str, about))} | {found.steps} | {validations} | {last:.0f} s | {parts} |"


def main() -> None:
    """Foresee and print, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("recipes/leaderboard_qwen2.5_math_1.5b.yaml"))
    parser.add_argument("--gpu", default="h100", help=f"one of: {', '.join(GPUS)} (default: h100)")
    args = parser.parse_args()
    shape, budget = stage_of(args.config)
    gpu, costs = gpu_by_name(args.gpu), count_costs(shape)
    print(foresee_time(shape, gpu, costs=costs).table())
    print("\n| assumptions | mean length | rows trained | steps | validations | last one | rollouts | training |"
          " validation |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, reached in (("as they are", _AS_IT_IS), ("half as fast", _HALF)):
        for mean in _MEANS:
            for trained in _TRAINED:
                one = with_lengths(shape, mean, trained)
                print(line(foresee_time(one, gpu, reached, costs), budget, name, f"{mean:.0f}", f"{trained:.0%}"))
    print("\n| change, else as they are at 450 and 70% | micro-batches | steps |\n|---|---|---|")
    for name, change in _CHANGES.items():
        timing = foresee_time(dataclasses.replace(with_lengths(shape, 450.0, 0.7), **change), gpu, costs=costs)
        step = next(phase for phase in timing.phases if phase.name == "micro-batches")
        print(f"| {name} | {step.seconds:.2f} s, {step.bound} | {timing.plan(budget).steps} |")


def with_lengths(shape: RunShape, mean: float, trained: float) -> RunShape:
    """With another mean length of a completion and another fraction of rows that are trained on."""
    known = shape.lengths
    lengths = Lengths(known.prompt, known.longest_prompt, mean, known.max_completion)
    return dataclasses.replace(shape, lengths=lengths, trained_fraction=trained)


if __name__ == "__main__":
    main()
