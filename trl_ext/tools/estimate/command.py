"""A run's memory and time before it is started, on a machine without its GPUs: what fits, what binds, what to change.

    trl-ext estimate --config recipes/grpo_math_qwen2.5_math_1.5b.yaml --gpus 2 --gpu h100
    trl-ext estimate --config recipes/grpo_math_qwen2.5_math_1.5b.yaml --gpu h100 \
        --accelerate accelerate_configs/two_gpus_zero2.yaml --set micro_train_batch_size=8 completion=400
    trl-ext estimate --config recipes/grpo_gsm8k_qwen3_0.6b.yaml --gpu l4 --quick --budget 14400
    trl-ext estimate --config recipes/grpo_gsm8k_qwen3_0.6b.yaml --gpu h100 --two_gpus

One optimizer step of the real trainer runs on fake tensors, at full depth, without weights. `--set` takes the recipe's
settings, and the lengths that data would tell: prompt and completion (means), longest_prompt, in tokens. Time is a
roofline with assumed efficiencies, which `--pilot` replaces with the pace of a finished run of a few minutes on such
GPUs, with these or other settings, and `--check` with what `python -m scripts.benchmarks.gpu --json FILE` measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from trl_ext.compat.startup import silence_misleading_messages, use_all_cores
from trl_ext.tools.estimate.hardware import GPUS


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="trl-ext estimate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a YAML file of recipes/")
    parser.add_argument("--gpus", type=int, help="of all hosts (default: as --accelerate says, else 1)")
    parser.add_argument("--gpu", default="h100", help=f"one of: {', '.join(GPUS)} (default: h100)")
    parser.add_argument("--accelerate", type=Path, help="a file of accelerate_configs/, for the ZeRO stage")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings than the file's")
    parser.add_argument("--quick", action="store_true", help="leave out the largest that fits: half the time")
    parser.add_argument(
        "--two_gpus", action="store_true", help="only compare 2 colocated GPUs with 1 and a server on 1"
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="plan so much time (default: time_budget)")
    parser.add_argument("--pilot", type=Path, metavar="RUN", help="a finished run on such GPUs, whose pace is taken")
    parser.add_argument("--check", type=Path, metavar="FILE", help="of scripts.benchmarks.gpu --json, likewise")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Estimate what the command line names; the exit status is 1 if it does not fit."""
    args = arguments()
    silence_misleading_messages()  # of the imports below
    from trl_ext.tools.estimate import layouts, recipe

    use_all_cores()
    try:
        reason = None
        if args.two_gpus:
            layouts.report(args)
        else:
            reason = recipe.report(args)
    except (ValueError, OSError, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    if reason:
        sys.exit(f"does not fit: {reason}")


if __name__ == "__main__":
    main()
