"""TRL's `ModelConfig` of a recipe: checked before a model loads, and handed to the trainer."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_bitsandbytes_available, is_flash_attn_2_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_ext.generation.adapters import check_quantization, quantized_by
from trl_ext.generation.model_files import check_loadable
from trl_ext.registry import unknown
from trl_ext.training.settings import card_without_bf16, is_without_fp16
from trl_ext.training.settings_table import MODEL
from trl_ext.training.trl_settings import check_needs

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import TrainingArguments

    from trl_ext.generation.model_source import ModelSource

FLASH = "flash_attention_2"
# What transformers imports for the later ones; they need a GPU as well.
_FLASH_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn.cute"}
_OF_DEVICES = ("revision", "dtype", "device_map", "max_memory", "quantization_config", "offload_folder")


def check_model_settings(model: ModelConfig, config: TrainingArguments) -> None:
    """Refuse what would be ignored, and quantized weights where they cannot be loaded or handed to the engine."""
    check_needs(model, MODEL)
    if model.attn_implementation == FLASH and not is_flash_attn_2_available():
        raise ValueError(
            f"attn_implementation {FLASH} needs a GPU and flash-attn (pip install flash-attn); auto does without"
        )
    _refuse_attention(model.attn_implementation)
    flag = quantized_by(None, model)
    if flag is not None and getattr(config, "deterministic", False):
        raise ValueError(f"deterministic with {flag}: bitsandbytes' kernels are not covered; leave one of them out")
    if flag is not None and not is_bitsandbytes_available():
        raise ValueError(f"{flag} needs bitsandbytes, which is not installed: pip install 'trl_ext[quantized]'")
    check_quantization(flag, adapter_of(model), config)


def check_model_is_made(source: ModelSource, model: ModelConfig, config: TrainingArguments) -> None:
    """Refuse files, arguments and an adapter of which no model is made, by trying it without weights."""
    given = init_kwargs(model, config.model_init_kwargs)
    kwargs = {name: value for name, value in given.items() if name not in _OF_DEVICES}
    made = check_loadable(source, for_training=True, trust_remote_code=config.trust_remote_code, **kwargs)
    if made is None or not model.use_peft:
        return
    try:
        with torch.device("meta"):
            get_peft_model(made, adapter_of(model), low_cpu_mem_usage=True)
    except Exception as error:  # of the tuner's layers, of which each has its own
        said = " ".join(str(error).split())
        raise ValueError(
            f"use_peft: no adapter can be put on {source.name!r} with the lora settings given: {said}"
        ) from error


def check_dtype(model: ModelConfig, config: TrainingArguments) -> None:
    """Refuse weights in a dtype that the card does not have, or whose gradients the loss scaler does not take."""
    if model.dtype == "bfloat16" and (card := card_without_bf16(config.use_cpu)):
        raise ValueError(f"dtype bfloat16: {card} has no bfloat16, and would convert every number: set dtype: float32")
    is_trained = not model.use_peft or model.lora_modules_to_save  # an adapter's own weights are in float32
    scales = config.fp16 and not is_without_fp16(config.use_cpu) and getattr(config, "deepspeed_plugin", None) is None
    if model.dtype == "float16" and is_trained and scales:
        raise ValueError(
            "dtype float16 with fp16: the loss scaler takes no gradients of float16 weights: set dtype: float32 (fp16 "
            "computes in float16), or train an adapter (use_peft: true)"
        )


def _refuse_attention(name: str | None) -> None:
    """Refuse an implementation that transformers does not know, or whose package is missing."""
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.keys())
    if name is None or (name in known and name not in _FLASH_PACKAGES):
        return
    if name in _FLASH_PACKAGES:
        package = _FLASH_PACKAGES[name]
        if torch.cuda.is_available() and importlib.util.find_spec(package.partition(".")[0]):
            return
        raise ValueError(f"attn_implementation {name} needs a GPU and the package {package}; auto does without")
    if "/" not in name:
        raise unknown("attn_implementation", name, ("auto", *known))
    if importlib.util.find_spec("kernels") is None:
        raise ValueError(f"attn_implementation {name} is one of the Hub's: pip install kernels; auto does without")


def choose_attention(model: ModelConfig) -> str | None:
    """Replace `attn_implementation: auto` by FlashAttention-2 where it can be had, else by torch's; returns a line."""
    if model.attn_implementation != "auto":
        return None
    is_available = is_flash_attn_2_available()
    model.attn_implementation = FLASH if is_available else None
    return (
        f"attention: {FLASH}"
        if is_available
        else "attention: sdpa, since flash-attn is not installed or there is no GPU"
    )


def loaded_as(model: ModelConfig) -> dict[str, Any]:
    """A trainer's arguments that say which model to load and how: path, adapter and quantization."""
    return {
        "model": model.model_name_or_path,
        "peft_config": adapter_of(model),
        "quantization_config": get_quantization_config(model),
    }


def adapter_of(model: ModelConfig) -> PeftConfig | None:
    """The adapter that is put on the model; None without `use_peft`.

    TRL makes a text of a list of one module, which PEFT takes for a regular expression of a module's whole path.
    """
    config = get_peft_config(model)
    modules = None if config is None else config.target_modules
    if config is not None and isinstance(modules, str) and re.fullmatch(r"[\w.]+", modules):
        config.target_modules = {modules}
    return config


def init_kwargs(model: ModelConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the model is loaded with: revision, dtype and attention, then the user's own `model_init_kwargs`."""
    known = {"revision": model.model_revision, "dtype": model.dtype, "attn_implementation": model.attn_implementation}
    return {**{name: value for name, value in known.items() if value}, **(given or {})}
