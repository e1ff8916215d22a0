"""TRL's `ModelConfig` of a recipe: checked before a model loads, and handed to the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import is_bitsandbytes_available, is_flash_attn_2_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_ext.training.settings_table import MODEL
from trl_ext.training.trl_settings import check_needs

FLASH = "flash_attention_2"


def check_model_settings(model: ModelConfig, use_vllm: bool) -> None:
    """Refuse what would be ignored, and quantized weights where they cannot be loaded or handed to the engine."""
    check_needs(model, MODEL)
    if model.attn_implementation == FLASH and not is_flash_attn_2_available():
        raise ValueError(
            f"attn_implementation {FLASH} needs a GPU and flash-attn (pip install flash-attn); auto does without"
        )
    flag = "load_in_4bit" if model.load_in_4bit else "load_in_8bit" if model.load_in_8bit else None
    if flag is None:
        return
    if not is_bitsandbytes_available():
        raise ValueError(f"{flag} needs bitsandbytes, which is not installed: pip install bitsandbytes")
    if use_vllm:
        raise ValueError(
            f"{flag}: vLLM would be handed the quantized weights as they are stored; set use_vllm: false, or load the "
            "model unquantized (the engine alone is quantized by vllm_quantization)"
        )


def choose_attention(model: ModelConfig) -> str | None:
    """Replace `attn_implementation: auto` by FlashAttention-2 where it can be had, else by torch's; returns a line."""
    if model.attn_implementation != "auto":
        return None
    found = is_flash_attn_2_available()
    model.attn_implementation = FLASH if found else None
    return f"attention: {FLASH}" if found else "attention: sdpa, since flash-attn is not installed or there is no GPU"


def loaded_as(model: ModelConfig) -> dict[str, Any]:
    """A trainer's arguments that say which model to load and how: path, adapter and quantization."""
    return {
        "model": model.model_name_or_path,
        "peft_config": get_peft_config(model),
        "quantization_config": get_quantization_config(model),
    }


def init_kwargs(model: ModelConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the model is loaded with: revision, dtype and attention, then the user's own `model_init_kwargs`."""
    known = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return {**{name: value for name, value in known.items() if value}, **(given or {})}
