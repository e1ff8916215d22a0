"""What four hours on two H100s get: an estimate for each arm of the leaderboard, over what nobody knows before the run.

    python -m scripts.benchmarks.estimate_leaderboard

A prediction with assumed efficiencies, not a measurement. It varies the mean length of a completion, the fraction of
rows with a gradient, and the assumptions: as they are, and with half of every ceiling and twice the host's seconds.
Next to the steps that each arm's GRPO has done by then are the marks of a public run of the same task.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import GPUS, Gpu, gpu_by_name
from trl_ext.tools.estimate.memory.step import estimate_memory
from trl_ext.tools.estimate.networks import published
from trl_ext.tools.estimate.plan import seconds_of
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun
from trl_ext.tools.estimate.recipe import planned_run
from trl_ext.tools.estimate.roofline import count_costs, estimate_time
from trl_ext.tools.estimate.timing import Timing
from trl_ext.tools.experiments.pipeline.settings import read_pipeline

_MEANS = (300.0, 450.0, 600.0)  # tokens of a completion
_TRAINED = (0.4, 0.7, 1.0)  # fraction of the rows
_MIDDLE = (450.0, 0.7)
_AS_IT_IS = Efficiency()
_HALF = dataclasses.replace(
    _AS_IT_IS,
    **{name: getattr(_AS_IT_IS, name) / 2 for name in ("compute", "memory", "interconnect")},
    **{name: 2 * getattr(_AS_IT_IS, name) for name in ("op_seconds", "engine_step_seconds", "reward_seconds",
                                                       "tensor_seconds", "step_seconds", "start_seconds")},
)  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "no micro_batch_tokens": {"micro_batch_tokens": None},
    "micro_batch_tokens 8192": {"micro_batch_tokens": 8192},
    "micro_batch_tokens 32768": {"micro_batch_tokens": 32_768},
    "gradient_checkpointing false": {"gradient_checkpointing": False},
    "save_steps 100": {"save_steps": 100},
    "validation_problems 5000": {"validation_problems": 5000},
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of a pipeline, as if it had been chosen, and its GRPO, the last stage."""

    name: str
    run: PlannedRun
    budget: float  # seconds of the stage, after all pilots and the arm's earlier stages
    begins: float  # seconds after which GRPO begins on the arm's own clock, which has no other arm's pilot


def arms_of(config: Path) -> list[Arm]:
    """The arms of a pipeline, or all of one without any.

    Raises:
        InputError: an arm does not end with GRPO, or there is no time budget.
    """
    pipeline = read_pipeline(config)
    launch = Launch.of_accelerate(Path(pipeline.launch[1])) if pipeline.launch else Launch()
    names, pilot = list(dict.fromkeys(stage.arm for stage in pipeline.stages)), pipeline.pilot_seconds or 0.0
    arms = []
    for name in names:
        *before, stage = [stage for stage in pipeline.stages if stage.arm == name]
        if pipeline.time_budget is None or stage.recipe != "grpo" or stage.config is None:
            raise InputError(f"{config}: it needs a time_budget, and each arm's last stage must be grpo with a config")
        earlier = pipeline.time_budget * sum(one.share or 0.0 for one in before)
        budget = pipeline.time_budget - len(names) * pilot - earlier
        changes = [f"{key}={value}" for key, value in {**stage.settings, "time_budget": budget}.items()]
        run = planned_run(Path(stage.config), changes, launch)
        arms.append(Arm(name or "all", run, budget, pilot + earlier if before else 0.0))
    return arms


def steps_by(timing: Timing, seconds: float) -> int:
    """Optimizer steps that are done so many seconds after the start, without what is kept for the end."""
    rates, work = timing.rates, timing.workload
    left = seconds - rates.start - rates.problem * work.problems
    return max(0, int(left / sum(seconds_of(rates, work, 1).values())))


def marks_table(arms: list[Arm], timings: dict[tuple[str, str], Timing], model: str) -> list[str]:
    """What a public run of the same task had reached, and the steps that each arm has done by then."""
    known = published()["marks"][model]
    head = [f"by {hours:g} h (mark: {accuracy:.1%})" for hours, accuracy in known["accuracy"]]
    rows = [f"marks: {known['source']}", ""]
    rows += [f"| arm | assumptions | steps in all | {' | '.join(head)} |", "|---" * (3 + len(head)) + "|"]
    for (name, reached), timing in timings.items():
        arm = next(arm for arm in arms if arm.name == name)
        by_then = [steps_by(timing, 3600 * hours - arm.begins) for hours, _ in known["accuracy"]]
        rows.append(f"| {name} | {reached} | {timing.plan(arm.budget).steps} | {' | '.join(map(str, by_then))} |")
    return rows


def of_plan(timing: Timing, budget: float) -> str:
    """Steps, the last validation, and what the budget goes to."""
    plan = timing.plan(budget)
    parts = "/".join(f"{100 * plan.seconds[name] / budget:.0f}" for name in ("rollout", "training", "validation"))
    last = next(phase.seconds for phase in timing.phases if phase.name == "validation at the end")
    return f"{plan.steps} | {last:.0f} s | {parts} %"


def main() -> None:
    """Estimate and print, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("recipes/leaderboard_qwen2.5_math_1.5b.yaml"))
    parser.add_argument("--gpu", default="h100", help=f"one of: {', '.join(GPUS)} (default: h100)")
    args = parser.parse_args()
    arms, gpu = arms_of(args.config), gpu_by_name(args.gpu)
    costs = count_costs(arms[0].run)
    for arm in arms:
        memory = estimate_memory(arm.run, gpu.memory)
        peak = f"{memory.total(memory.peak) / 2**30:.1f} GiB at the peak ({memory.peak})"
        print(f"{arm.name}, {arm.budget:.0f} s, {peak}\n{estimate_time(arm.run, gpu, costs=costs).table()}\n")
    head = " | ".join(f"{arm.name}: steps | last validation | rollouts/training/validation" for arm in arms)
    print(f"| assumptions | mean length | rows trained | {head} |\n{'|---' * (3 + 3 * len(arms))}|")
    in_the_middle: dict[tuple[str, str], Timing] = {}
    for name, reached in (("as they are", _AS_IT_IS), ("half as fast", _HALF)):
        for mean, trained in itertools.product(_MEANS, _TRAINED):
            each = {arm.name: estimate_time(with_lengths(arm.run, mean, trained), gpu, reached, costs) for arm in arms}
            cells = " | ".join(of_plan(each[arm.name], arm.budget) for arm in arms)
            print(f"| {name} | {mean:.0f} | {trained:.0%} | {cells} |")
            if (mean, trained) == _MIDDLE:
                in_the_middle |= {(arm, name): timing for arm, timing in each.items()}
    print("\n" + "\n".join(marks_table(arms, in_the_middle, read_pipeline(args.config).model_name_or_path or "")))
    head = " | ".join(f"{arm.name}: micro-batches | steps" for arm in arms)
    print(f"\n| change, else as they are at 450 and 70% | {head} |\n{'|---' * (1 + 2 * len(arms))}|")
    for name, change in _CHANGES.items():
        print(f"| {name} | {' | '.join(of_change(arm, change, gpu, costs) for arm in arms)} |")


def of_change(arm: Arm, change: dict[str, Any], gpu: Gpu, costs: ModelCosts) -> str:
    """The micro-batches of a step and the steps of the budget, with this change."""
    timing = estimate_time(with_lengths(arm.run, *_MIDDLE).with_settings(**change), gpu, costs=costs)
    step = next(phase for phase in timing.phases if phase.name == "micro-batches")
    return f"{step.seconds:.2f} s, {step.bound} | {timing.plan(arm.budget).steps}"


def with_lengths(run: PlannedRun, mean: float, trained: float) -> PlannedRun:
    """With another mean length of a completion and another fraction of rows that are trained on."""
    known = run.lengths
    lengths = Lengths(known.prompt, known.longest_prompt, mean, known.max_completion)
    return dataclasses.replace(run, lengths=lengths, trained_fraction=trained)


if __name__ == "__main__":
    main()
