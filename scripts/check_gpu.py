"""What needs a GPU, in one go and without a download: a model of random weights in Qwen2.5-Math-1.5B's shape takes a
few GRPO steps with the settings of a recipe, and a JSON says what it cost: rollout and training tokens per second,
seconds per weight sync, memory. With two GPUs under ZeRO-2; with one alone; without any a tiny model on the CPU, which
shows that the script works and nothing else.

    python scripts/check_gpu.py
    python scripts/check_gpu.py --accelerate accelerate_configs/two_gpus_zero3.yaml --json docs/results/gpu.json
    python scripts/check_gpu.py -- --micro_train_batch_size 4 --vllm_enable_sleep_mode true

What follows `--` are flags of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_model import SHAPES, save_random_model
from trl.import_utils import is_vllm_available

from trl_ext.data.load import load_problems
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.runs.provenance import provenance
from trl_ext.training.preemption import patient_environment

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "grpo_math_qwen2.5_math_1.5b.yaml"
GIB = 2**30
ON_A_CPU = [
    *("--bf16", "false", "--rollout_batch_size", "16", "--train_batch_size", "16", "--group_size", "4"),
    *("--sampling_max_tokens", "32", "--vllm_max_model_length", "256", "--use_vllm", str(is_vllm_available())),
]


def length_matters(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group, so that every row has a gradient."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


class Stopwatch:
    """Seconds of every call of a method, the device's work included."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds: list[float] = []
        self._call = getattr(owner, method)
        setattr(owner, method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it and note the time."""
        began = now()
        result = self._call(*args, **kwargs)
        self.seconds.append(now() - began)
        return result


def now() -> float:
    """Seconds, after the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def worker(arguments: Sequence[str], result: Path) -> None:
    """One rank: train, and let the first write what all of them measured."""
    _, model, config = parse(GRPO_SETTINGS, __doc__, RECIPE, arguments)
    rows = load_problems("mini_math", "train", "r1_zero", n=config.generation_batch_size)
    config.model_init_kwargs = {"dtype": "float32"}
    began = now()
    trainer = ExtGRPOTrainer(str(model.model_name_or_path), length_matters, config, rows)
    start_s = now() - began
    steps, rollouts = Stopwatch(trainer, "training_step"), Stopwatch(trainer, "_generate")
    syncs = Stopwatch(trainer.vllm_generation, "sync_weights") if config.use_vllm else None
    began = now()
    trainer.train()
    trained_s = now() - began
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    tokens = trainer.state.num_input_tokens_seen or logs[-1]["num_tokens"]
    generated = sum(entry["completions/mean_length"] for entry in logs) * config.generation_batch_size
    rollout_s = sum(rollouts.seconds) - (sum(syncs.seconds) if syncs else 0.0)
    found = {
        "engine": "vLLM" if config.use_vllm else "HF generate",
        "optimizer_steps": len(logs),
        "rollout_tokens_per_s": generated / rollout_s,
        "training_tokens_per_s": tokens / (sum(steps.seconds) - sum(rollouts.seconds)),
        "sync_s": median(syncs.seconds) if syncs else None,
        "start_s": start_s,
        "step_s": trained_s / len(logs),
        "sampling_logp_difference_max": logs[-1].get("sampling/sampling_logp_difference/max"),
        **_memory(),
    }
    if trainer.is_world_process_zero():
        result.write_text(json.dumps(found), encoding="utf-8")


def _memory() -> dict[str, float | None]:
    if not torch.cuda.is_available():
        return {"peak_training_gib": None, "device_used_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_training_gib": torch.cuda.max_memory_allocated() / GIB, "device_used_gib": (total - free) / GIB}


def main() -> None:
    """Make the model, launch the ranks, print and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="default: qwen2.5-math-1.5b on a GPU, else tiny")
    parser.add_argument("--accelerate", type=Path, metavar="FILE", help="default: two_gpus_zero2, one_gpu or one_cpu")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("recipe", nargs="*", help="flags of the recipe, after --")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("no GPU here: a tiny model on the CPU shows that this script works, and nothing else")
    if not is_vllm_available():
        print("vLLM is not installed: HF generate makes the rollouts, and there is no sync to time")
    shape = args.shape or ("qwen2.5-math-1.5b" if gpus else "tiny")
    default = ("one_cpu", "one_gpu", "two_gpus_zero2")[min(gpus, 2)]
    chosen = args.accelerate or ROOT / "accelerate_configs" / f"{default}.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = save_random_model(folder / shape, shape, torch.bfloat16 if gpus else torch.float32)
        flags = ["--model_name_or_path", str(model), "--output_dir", str(folder / "run"), "--save_strategy", "no"]
        flags += ["--n_grpo_steps", str(args.steps), *([] if gpus else ON_A_CPU), *args.recipe]
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(chosen), __file__]
        environment = patient_environment() | {"CHECK_GPU_RESULT": str(folder / "result.json")}
        done = subprocess.run([*launch, *flags], env=environment, check=False)
        if done.returncode:
            sys.exit(f"error: the run failed with status {done.returncode}; its output is above")
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result = {"shape": shape, "accelerate_config": chosen.stem, "flags": args.recipe, **found, **provenance()}
    for name, value in found.items():
        print(f"{name:<30} {value:.3g}" if isinstance(value, float) else f"{name:<30} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "CHECK_GPU_RESULT" in os.environ:
        worker(sys.argv[1:], Path(os.environ["CHECK_GPU_RESULT"]))
    else:
        main()
