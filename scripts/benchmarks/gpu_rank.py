"""One rank of `gpu.py`, which launches it: GRPO steps with a stopwatch at rollouts, training and weight syncs.

The first argument is the JSON file to write; the others are flags of the recipe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trl_ext.data.dataset import DatasetSettings
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_math_qwen2.5_math_1.5b.yaml"
GIB = 2**30


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
        """Call it and record the time."""
        began = now()
        result = self._call(*args, **kwargs)
        self.seconds.append(now() - began)
        return result


def now() -> float:
    """Seconds, after the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(arguments: Sequence[str], result: Path) -> None:
    """One rank: train, and let the first write what all of them measured."""
    _, model, config = parse(GRPO_SETTINGS, None, RECIPE, arguments)
    rows = DatasetSettings().read("train", config.generation_batch_size, seed=0).rows
    if not config.use_vllm:
        config.stop = None  # transformers looks for its characters in a vocabulary that is made up
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
    rows = len(logs) * config.generation_batch_size
    rollout_s = sum(rollouts.seconds) - (sum(syncs.seconds) if syncs else 0.0)
    figures = {
        "engine": "vLLM" if config.use_vllm else "HF generate",
        "optimizer_steps": len(logs),
        "rollout_tokens_per_s": generated / rollout_s,
        "training_tokens_per_s": tokens / (sum(steps.seconds) - sum(rollouts.seconds)),
        "sync_s": median(syncs.seconds) if syncs else None,
        "start_s": start_s,
        "step_s": trained_s / len(logs),
        "completion_tokens": generated / rows,
        "prompt_tokens": (tokens - generated) / rows,
        "sampling_logp_difference_max": logs[-1].get("sampling/sampling_logp_difference/max"),
        **_memory(),
    }
    if trainer.is_world_process_zero():
        result.write_text(json.dumps(figures), encoding="utf-8")


def _memory() -> dict[str, float | None]:
    if not torch.cuda.is_available():
        return {"peak_training_gib": None, "device_used_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_training_gib": torch.cuda.max_memory_allocated() / GIB, "device_used_gib": (total - free) / GIB}


if __name__ == "__main__":
    measure(sys.argv[2:], Path(sys.argv[1]))
