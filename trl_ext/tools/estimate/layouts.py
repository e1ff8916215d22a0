"""`trl-ext estimate --two_gpus`: the modes of two GPUs for a recipe, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trl_ext.errors import InputError
from trl_ext.io import write_json
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu, gpu_by_name
from trl_ext.tools.estimate.planned import Launch
from trl_ext.tools.estimate.recipe import pace_of_check, pace_of_pilot, planned_run
from trl_ext.tools.estimate.roofline import count_costs, estimate_time
from trl_ext.tools.estimate.sides import TwoGpus

ZERO2 = Launch(gpus=2, zero_stage=2)  # accelerate_configs/two_gpus_zero2.yaml
_COLOCATED = ["vllm_mode=colocate", "rollout_ahead=0"]
_SERVED = ["vllm_mode=server", "rollout_ahead=0"]


def two_gpus(
    config: Path,
    changes: Sequence[str],
    gpu: Gpu,
    launch: Launch = ZERO2,
    efficiency: Efficiency | None = None,
    costs: ModelCosts | None = None,
) -> TwoGpus:
    """A recipe on two colocated GPUs, and on one with a server on the other.

    Args:
        changes: `name=value`, as `planned_run` takes them.
        launch: of the colocated ones.
        efficiency: what such GPUs reach; None for assumptions.
        costs: of the recipe's model, where they have been counted already.

    Raises:
        InputError: the recipe is not GRPO with vLLM, or its rollouts are larger on two GPUs than on one.
    """
    one = planned_run(config, [*changes, *_SERVED], Launch())
    both = planned_run(config, [*changes, *_COLOCATED], launch)
    if one.recipe != "grpo" or one.engine != "server":
        raise InputError(f"{config}: --two_gpus compares ways to sample GRPO's rollouts with vLLM")
    if (one.rollout, one.step) != (both.rollout, both.step):
        raise InputError(
            f"{config}: rollouts of {one.rollout} rows and steps of {one.step} on one, {both.rollout} and {both.step} "
            "on two; set rollout_batch_size and train_batch_size, so that they are the same"
        )
    counted = costs or count_costs(one)
    served, colocated = (estimate_time(run, gpu, efficiency, counted).sides for run in (one, both))
    return TwoGpus(colocated, served)


def report(args: argparse.Namespace) -> None:
    """Print the comparison.

    Raises:
        ValueError: an argument or a setting is wrong, or the run cannot be estimated.
    """
    launch = Launch.of_accelerate(args.accelerate) if args.accelerate else ZERO2
    launch = replace(launch, gpus=args.gpus or launch.gpus)
    if launch.gpus != 2:
        raise InputError(f"--two_gpus: of 2 GPUs, not of {launch.gpus}")
    gpu, reached = gpu_by_name(args.gpu), None
    if args.pilot is not None:
        reached = pace_of_pilot(args.pilot, launch, gpu)
    elif args.check is not None:
        reached = pace_of_check(args.check, args.config, launch, gpu)
    compared = two_gpus(args.config, args.set, gpu, launch, reached)
    print(compared.table())
    if args.json:
        sides = {name: {**vars(side), "seconds": side.seconds} for name, side in compared.sides().items()}
        write_json(args.json, {"ratio": compared.ratio, "turns": compared.turns(), "modes": sides})
