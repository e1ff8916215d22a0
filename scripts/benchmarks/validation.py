"""Seconds of one validation inside training: TRL's own `evaluate()` three ways, and ours, in alternation.

    python -m scripts.benchmarks.validation
    python -m scripts.benchmarks.validation --problems 5000 --model Qwen/Qwen2.5-Math-1.5B --use_vllm --max_tokens 1024

The same policy, problems, length limit and grader. TRL as it comes samples each problem as often as a group has members
and takes 8 completions at a time; the other two ways are what a careful user would set.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm
from trl import GRPOConfig, GRPOTrainer

from trl_ext import REWARDS, ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.startup import use_all_cores
from trl_ext.data.dataset import DatasetSettings
from trl_ext.evaluation.evaluator import evaluate
from trl_ext.mini.policy import make_base_policy
from trl_ext.rewards.graders import GRADERS
from trl_ext.runs.provenance import provenance

OURS = "trl_ext's validation"
WAYS: dict[str, dict[str, int]] = {
    "TRL as it comes (8 samples each, batches of 8)": {},
    "TRL, one sample each, batches of 8": {"num_generations_eval": 1},
    "TRL, one sample each, batches of 256": {"num_generations_eval": 1, "per_device_eval_batch_size": 256},
}


def ways_of(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Each way of validating, ready to be called."""
    problems = DatasetSettings().read("validation", args.problems, seed=0).rows
    reward = REWARDS.build("compatible", answer_format="r1_zero")
    grader = GRADERS.build("compatible", answer_format="r1_zero")
    common: dict[str, Any] = {
        "report_to": "none", "disable_tqdm": True, "max_completion_length": args.max_tokens, "use_vllm": args.use_vllm,
        "vllm_gpu_memory_utilization": 0.2, "bf16": args.use_vllm,
    }  # fmt: skip
    ways: dict[str, Callable[[], Any]] = {}
    for name, settings in WAYS.items():
        config = GRPOConfig(output_dir=str(folder / str(len(ways))), **common, **settings)
        stock = GRPOTrainer(model, reward, config, problems.select(range(8)), eval_dataset=problems)
        ways[name] = stock.evaluate
    mine = ExtGRPOConfig(output_dir=str(folder / "ours"), preset="grpo_clip", stop=["</answer>"], **common)
    ours = ExtGRPOTrainer(model, reward, mine, problems.select(range(8)))
    rows = list(problems)
    ways[OURS] = lambda: evaluate(rows, lambda prompts: ours.sample(prompts, batch_size=256, seed=0), grader)
    return ways


def main() -> None:
    """Measure, print, and write the JSON asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=512, help="of mini-MATH (default: 512)")
    parser.add_argument("--model", help="a folder or a Hub id (default: the base policy)")
    parser.add_argument("--max_tokens", type=int, default=80, help="of a response (default: 80)")
    parser.add_argument("--use_vllm", action="store_true", help="colocated engines for all; needs a GPU")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    use_all_cores()
    model = args.model or str(make_base_policy(seed=0))
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        ways = ways_of(args, model, Path(scratch))
        for round_ in tqdm(range(args.repeats + 1), desc="rounds"):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if round_:  # the first warms up
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
    ours = seconds[OURS]
    ratios = {name: median(t / o for t, o in zip(times, ours, strict=True)) for name, times in seconds.items()}
    print(f"\none validation on {args.problems} problems, median of {args.repeats} alternating rounds")
    for name, times in seconds.items():
        print(f"{name:<50} {median(times):>8.2f} s {ratios[name]:>6.1f}x")
    if args.json:
        record = {"problems": args.problems, "model": args.model or "the base policy", "seconds": seconds,
                 "ratio_to_ours": ratios, **provenance()}  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
