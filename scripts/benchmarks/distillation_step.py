"""Seconds and memory of an optimizer step with a teacher, without one, and of TRL's `DistillationTrainer`.

    python -m scripts.benchmarks.distillation_step --teacher runs/distillation/teacher

Every trainer starts from the base policy, samples 128 completions of at most 80 tokens by HF generate (16 problems,
each 8 times) and makes one optimizer step of them, in a process of its own; one after the other, several rounds. The
figures are CPU seconds of a step, rollout included, medians over steps and rounds, and the process's highest memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from trl_ext.runs.provenance import provenance

ROOT = Path(__file__).parents[2]
PROBLEMS, GROUP, WARM = 16, 8, 2
OURS: dict[str, dict[str, Any]] = {
    "GRPO, no teacher": {"preset": "grpo_clip"},
    "OPD": {"preset": "opd"},
    "GKD, 64 tokens and the rest": {"preset": "gkd"},
    "GKD, every token": {"preset": "gkd", "teacher_top_k": 1_000_000},
}
KINDS = ("TRL's DistillationTrainer", *OURS)


def main() -> None:
    """Time each kind in turn, in processes of their own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a run's folder with the base policy's tokenizer")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.kind:
        print(json.dumps(measured(asked.kind, asked.teacher, asked.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(asked.rounds):
        for kind in KINDS:
            command = [sys.executable, "-m", "scripts.benchmarks.distillation_step", "--teacher", asked.teacher]
            command += ["--kind", kind, "--steps", str(asked.steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            found[kind].append(json.loads(done.stdout.splitlines()[-1]))
            print(kind, found[kind][-1], flush=True)
    figures = {
        kind: {
            "cpu_seconds": median(second for run in runs for second in run["cpu_seconds"]),
            "peak_mib": median(run["peak_mib"] for run in runs),
        }
        for kind, runs in found.items()
    }
    least = figures["GRPO, no teacher"]["cpu_seconds"]
    for kind, figure in figures.items():
        seconds = figure["cpu_seconds"]
        print(f"{kind:32}{seconds:8.2f} s {seconds / least:6.2f} x{figure['peak_mib']:8.0f} MiB")
    if asked.json:
        written = {"figures": figures, "rounds": found, **provenance()}
        asked.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def measured(kind: str, teacher: str, steps: int) -> dict[str, Any]:
    """CPU seconds of each step but the first ones, and the highest memory in MiB."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.distillation_config import DistillationConfig
    from trl.trainer.distillation_trainer import DistillationTrainer

    from trl_ext import REWARDS, ExtGRPOConfig, ExtGRPOTrainer
    from trl_ext.generation.prompts import load_prompt
    from trl_ext.mini.policy import make_base_policy
    from trl_ext.mini.problems import mini_math

    class Clock(TrainerCallback):
        """CPU time at the end of each step."""

        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.at.append(time.process_time())

    template, count = load_prompt("r1_zero"), PROBLEMS * steps
    rows = [
        {"prompt": template.replace("{question}", str(row["problem"])), "answer": row["answer"]}
        for row in mini_math("train", count)
    ]
    clock, policy = Clock(), str(make_base_policy(seed=0))
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
            "disable_tqdm": True, "learning_rate": 3e-4, "max_steps": steps, "gradient_checkpointing": False,
            "per_device_train_batch_size": 64, "gradient_accumulation_steps": 2, "temperature": 1.0,
            "max_completion_length": 80, "logging_steps": 1, "seed": 0, "lr_scheduler_type": "constant",
        }  # fmt: skip
        trainer: Any
        if kind in OURS:
            own = {"num_generations": GROUP, **OURS[kind], **({"teacher": teacher} if "GRPO" not in kind else {})}
            config = ExtGRPOConfig(**common, **own)
            trainer = ExtGRPOTrainer(
                policy, REWARDS.build("strict"), config, Dataset.from_list(rows), callbacks=[clock]
            )
        else:
            repeated = Dataset.from_list([{"prompt": row["prompt"]} for row in rows for _ in range(GROUP)])
            stock = DistillationConfig(**common, beta=0.5, shuffle_dataset=False)
            trainer = DistillationTrainer(policy, teacher, stock, train_dataset=repeated, callbacks=[clock])
        trainer.train()
    seconds = [after - before for before, after in zip(clock.at, clock.at[1:], strict=False)][WARM - 1 :]
    return {"cpu_seconds": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    main()
