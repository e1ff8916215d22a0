"""A run's memory and time before it is started, on a machine without its GPUs: what fits, what binds, what to change.

    trl-ext foresee --config recipes/grpo_math_qwen2.5_math_1.5b.yaml --gpus 2 --gpu h100
    trl-ext foresee --config recipes/grpo_math_qwen2.5_math_1.5b.yaml --gpu h100 \
        --accelerate accelerate_configs/two_gpus_zero2.yaml --set micro_train_batch_size=8 completion=400
    trl-ext foresee --config recipes/grpo_gsm8k_qwen3_0.6b.yaml --gpu l4 --quick --budget 14400

One optimizer step of the real trainer runs on fake tensors, at full depth, without weights. `--set` takes the recipe's
settings, and the lengths that data would tell: prompt and completion (means), longest_prompt, in tokens. Time is a
roofline with assumed efficiencies, which `--pilot` replaces with the pace of a finished run of a few minutes on such
GPUs, with these or other settings, and `--check` with what `python -m scripts.benchmarks.gpu --json FILE` measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import yaml

from trl_ext.compat.startup import use_all_cores

# isort: split
from trl_ext.errors import InputError
from trl_ext.foresight.costs.counting import ModelCosts
from trl_ext.foresight.hardware import GPUS, Gpu, gpu_by_name
from trl_ext.foresight.memory.limits import largest, preempting, refusal
from trl_ext.foresight.memory.report import engine_line, figures, limit_lines, table
from trl_ext.foresight.pilot import read_run
from trl_ext.foresight.roofline import Timing, count_costs, foresee_time
from trl_ext.foresight.shape import Launch, RunShape
from trl_ext.foresight.waste import larger_micro_batches
from trl_ext.io import write_json


def timing_of(shape: RunShape, gpu: Gpu, args: argparse.Namespace, costs: ModelCosts) -> Timing:
    """Time at the pace of a pilot or a check of the machine, where there is one; costs are of the shape's model."""
    from trl_ext.experiments.foresee import pace_of_check, pace_of_pilot

    if args.pilot is not None:
        _, work = read_run(args.pilot)
        of_pilot = replace(shape, lengths=replace(shape.lengths, completion=work.tokens))
        return foresee_time(of_pilot, gpu, pace_of_pilot(args.pilot, shape.launch, gpu), costs)
    reached = pace_of_check(args.check, args.config, shape.launch, gpu) if args.check is not None else None
    return foresee_time(shape, gpu, reached, costs)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="trl-ext foresee", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a YAML file of recipes/")
    parser.add_argument("--gpus", type=int, help="of all hosts (default: as --accelerate says, else 1)")
    parser.add_argument("--gpu", default="h100", help=f"one of: {', '.join(GPUS)} (default: h100)")
    parser.add_argument("--accelerate", type=Path, help="a file of accelerate_configs/, for the ZeRO stage")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings than the file's")
    parser.add_argument("--quick", action="store_true", help="leave out the largest that fits: a third of the time")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="plan so much time (default: time_budget)")
    parser.add_argument("--pilot", type=Path, metavar="RUN", help="a finished run on such GPUs, whose pace is taken")
    parser.add_argument("--check", type=Path, metavar="FILE", help="of scripts.benchmarks.gpu --json, likewise")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def run(args: argparse.Namespace) -> str | None:
    """Print what is foreseen, and return why the run does not fit or would waste its time, if so.

    Raises:
        ValueError: an argument or a setting is wrong, or the run cannot be foreseen.
    """
    if args.gpus is not None and args.gpus < 1:
        raise InputError(f"--gpus {args.gpus}: at least 1")
    if args.budget is not None and args.budget <= 0:
        raise InputError(f"--budget {args.budget:g}: more than 0 seconds")
    from datasets import disable_progress_bars

    from trl_ext.experiments.foresee import read_shape
    from trl_ext.foresight.memory.step import foresee

    disable_progress_bars()
    gpu = gpu_by_name(args.gpu)
    launch = Launch.of_accelerate(args.accelerate) if args.accelerate else Launch()
    shape = read_shape(args.config, args.set, replace(launch, gpus=args.gpus or launch.gpus))
    time = partial(timing_of, gpu=gpu, args=args, costs=count_costs(shape))
    timing = time(shape)
    compute = partial(foresee, capacity=gpu.memory)
    memory = compute(shape)
    limits = None if args.quick else largest(shape, memory, compute)
    print("\n".join([*table(memory), *engine_line(memory), *(limit_lines(limits) if limits else [])]))
    print("\n" + timing.table(args.budget or shape.time_budget))
    reason = refusal(shape, memory, compute) or preempting(shape, memory)
    if not reason and (advice := larger_micro_batches(shape, timing, time, lambda other: compute(other).free >= 0)):
        print("\n" + advice)
    if args.json:
        phases = [asdict(phase) for phase in timing.phases]
        write_json(args.json, {"refusal": reason, **figures(memory, limits), "phases": phases})
    return reason


def main() -> None:
    """Foresee what the command line names; the exit status is 1 if it does not fit."""
    args = arguments()
    use_all_cores()
    try:
        reason = run(args)
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    if reason:
        sys.exit(f"does not fit: {reason}")


if __name__ == "__main__":
    main()
