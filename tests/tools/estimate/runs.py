"""A small run, of which each test changes what it is about."""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import Qwen3Config
from trl import ModelConfig

from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.imitation.expert_iteration import ExpertIterationConfig
from trl_ext.imitation.sft import ExtSFTConfig
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun

NETWORK = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": True}  # fmt: skip
_RUN = {"bf16": False, "gradient_checkpointing": False, "use_cpu": True, "use_vllm": False, "report_to": "none",
        "lr_scheduler_type": "constant"}  # fmt: skip
_CONFIGS: dict[str, Any] = {
    "grpo": functools.partial(ExtGRPOConfig, advantage="group_mean", policy_loss="reinforce", aggregation="sequence_mean"),
    "sft": ExtSFTConfig, "expert_iteration": ExpertIterationConfig,
}  # fmt: skip


def network(**changes: Any) -> Qwen3Config:
    """A decoder of three layers."""
    return Qwen3Config(**NETWORK | changes)


@functools.cache
def _config(recipe: str) -> Any:
    return _CONFIGS[recipe](**_RUN)


def planned(recipe: str = "grpo", **changes: Any) -> PlannedRun:
    """Sixteen completions in groups of four, two updates, one process, HF generate.

    Args:
        changes: fields of `PlannedRun`, resolved settings by their names, and `step`, the rows of an optimizer step.
    """
    of_grpo = {"share_prompt_prefix": False, "generation_batch_size": 16, "num_generations": 4}
    found: dict[str, Any] = {
        "network": network(), "launch": Launch(), "lengths": Lengths(8, 8, 10, 20), "trained_fraction": 1.0,
        "step": 8, "per_device_train_batch_size": 2, "dtype": "float32", "vllm_gpu_memory_utilization": 0.3,
        "validate_every": 10, "validation_problems": 20, "final_validation_problems": 50, "save_steps": 20,
    } | (of_grpo if recipe == "grpo" else {}) | changes  # fmt: skip
    own = {name: found.pop(name) for name in ("network", "launch", "lengths", "trained_fraction")}
    step, rows = found.pop("step"), found["per_device_train_batch_size"]
    found["gradient_accumulation_steps"] = accumulation = step // (rows * own["launch"].gpus)
    if recipe == "grpo":
        found["steps_per_generation"] = accumulation * max(1, found["generation_batch_size"] // step)
    run = PlannedRun(GRPOTask(), ModelConfig(), copy.copy(_config(recipe)), **own)
    return run.with_settings(**found)
