"""What needs a GPU, in one go and without a download: a model of random weights in Qwen2.5-Math-1.5B's shape takes a
few GRPO steps with the settings of a recipe, and a JSON says what it cost: rollout and training tokens per second,
seconds per weight sync, memory. With two GPUs under ZeRO-2; with one alone; without any a tiny model on the CPU, which
shows that the script works and nothing else.

    python -m scripts.benchmarks.gpu
    python -m scripts.benchmarks.gpu --accelerate accelerate_configs/two_gpus_zero3.yaml --json docs/results/gpu.json
    python -m scripts.benchmarks.gpu -- --micro_train_batch_size 4 --vllm_enable_sleep_mode true

What follows `--` are flags of the recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from trl.import_utils import is_vllm_available

from trl_ext.hosts.shutdown_timeout import patient_environment
from trl_ext.runs.provenance import provenance

from .random_model import SHAPES, save_random_model

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("gpu_rank.py")
ON_A_CPU = [
    *("--bf16", "false", "--rollout_batch_size", "16", "--train_batch_size", "16", "--group_size", "4"),
    *("--sampling_max_tokens", "32", "--vllm_max_model_length", "256", "--use_vllm", str(is_vllm_available())),
]


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
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(chosen)]
        command = [*launch, str(RANK), str(folder / "result.json"), *flags]
        done = subprocess.run(command, env=patient_environment(), check=False)
        if done.returncode:
            sys.exit(f"error: the run failed with status {done.returncode}; its output is above")
        figures = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result = {"shape": shape, "accelerate_config": chosen.stem, "flags": args.recipe, **figures, **provenance()}
    for name, value in figures.items():
        print(f"{name:<30} {value:.3g}" if isinstance(value, float) else f"{name:<30} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
