"""A small run's shape, of which each test changes what it is about."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config

from trl_ext.tools.estimate.shape import Launch, Lengths, RunShape

NETWORK = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": True}  # fmt: skip


def network(**changes: Any) -> Qwen3Config:
    """A decoder of three layers."""
    return Qwen3Config(**NETWORK | changes)


def shape(**changes: Any) -> RunShape:
    """Sixteen completions in groups of four, two updates, one process, HF generate."""
    values: dict[str, Any] = {
        "config": network(), "recipe": "grpo", "launch": Launch(), "peft": None, "weights_dtype": torch.float32,
        "autocast_dtype": None, "attention": "sdpa", "checkpointing": False, "lengths": Lengths(8, 8, 10, 20),
        "rollout": 16, "group": 4, "step": 8, "epochs": 1, "micro_rows": 2, "micro_tokens": None,
        "shares_prompts": False, "dynamic": True, "skips": True, "trained_fraction": 1.0,
        "beta": 0.0, "optimizer": "adamw_torch_fused", "engine": "hf", "engine_fraction": 0.3,
        "engine_max_length": None, "engine_sequences": 256, "engine_sleeps": False, "engine_dtype": "auto",
        "engine_quantization": None, "engine_tensor_parallel": 1, "validate_every": 10,
        "validation_problems": 20, "final_problems": 50, "save_every": 20, "time_budget": None,
    }  # fmt: skip
    return RunShape(**values | changes)
