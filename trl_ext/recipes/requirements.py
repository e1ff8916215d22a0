"""Settings that need a package, a device or an evaluation that is not there: refused in a line, before a model loads.

Where transformers has a check of its own, which comes after the model is loaded, that check is called here.
"""

from __future__ import annotations

import os
import re

import torch
from torch import nn
from transformers import GenerationConfig, Trainer, TrainingArguments, get_scheduler
from transformers.utils import is_liger_kernel_available

from trl_ext.compat.compilation import check_compilation
from trl_ext.registry import unknown

# Of `torch.utils.checkpoint.checkpoint`, which says what it does not know in the first backward pass.
_OF_CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def check_requirements(config: TrainingArguments) -> None:
    """Refuse a trainer's settings that could only fail after the model is loaded, by a `ValueError`."""
    _refuse_sharding_alone(config)
    _refuse_values(config)
    _refuse_trainers_evaluation(config)
    _refuse_optimizer(config)
    _refuse_schedule(config)
    _refuse_kernels(config)
    check_compilation(config)
    if (cache := getattr(config, "cache_implementation", None)) is not None:
        try:
            GenerationConfig(cache_implementation=cache).validate(strict=True)
        except ValueError as error:
            raise ValueError(f"cache_implementation {cache!r}: {_one_line(error)}; or leave it out") from error
    if config.use_vllm and config.vllm_mode == "colocate":
        _refuse_engine(config)


def _refuse_sharding_alone(config: TrainingArguments) -> None:
    """DeepSpeed and FSDP look for the launcher's variables when the model is there, and name another package."""
    name = "deepspeed" if config.deepspeed else "fsdp" if config.fsdp else None
    if name is not None and "LOCAL_RANK" not in os.environ:
        raise ValueError(
            f"{name} shards a model over processes that a launcher starts: accelerate launch --config_file "
            "accelerate_configs/two_gpus_zero2.yaml, or leave it out"
        )


def _refuse_values(config: TrainingArguments) -> None:
    """Values that torch or transformers refuse in a training that has begun."""
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {config.seed}")
    if str(getattr(config.save_strategy, "value", config.save_strategy)) == "steps" and config.save_steps <= 0:
        raise ValueError(
            f"save_steps must be positive, got {config.save_steps:g}; a run without checkpoints has save_strategy: no"
        )
    for name in config.gradient_checkpointing_kwargs or {}:
        if name not in _OF_CHECKPOINTING:
            raise ValueError(f"gradient_checkpointing_kwargs: {unknown('argument', name, _OF_CHECKPOINTING)}")


def _refuse_trainers_evaluation(config: TrainingArguments) -> None:
    strategy, saving = (str(getattr(value, "value", value)) for value in (config.eval_strategy, config.save_strategy))
    asked = {f"eval_strategy: {strategy}": strategy != "no"}
    asked |= {f"{name}: true": bool(getattr(config, name)) for name in ("eval_on_start", "load_best_model_at_end")}
    for setting in (setting for setting, is_set in asked.items() if is_set):
        raise ValueError(
            f"{setting} is an evaluation by transformers' Trainer, which a recipe has no data for: it validates every "
            "--validate_every steps, and --restore_best true ends with the best weights"
        )
    if saving == "best":
        raise ValueError(
            "save_strategy: best saves at evaluations by transformers' Trainer, which a recipe has none of: take "
            "save_strategy steps, with --restore_best true to end with the best weights"
        )


def _refuse_optimizer(config: TrainingArguments) -> None:
    """By transformers' own function, which imports an optimizer's package."""
    name = str(getattr(config.optim, "value", config.optim))
    try:
        make, options = Trainer.get_optimizer_cls_and_kwargs(config)
        if make.__module__.startswith("torch."):  # others may want a model's parameters
            make([nn.Parameter(torch.zeros(1))], **options)
    except (ImportError, ValueError, RuntimeError, TypeError) as error:
        if re.search("pass a .?model", str(error)):  # which is not loaded yet; all else is there
            return
        raise ValueError(f"optim {name}: {_one_line(error)}; or take another, such as adamw_torch") from error


def _refuse_schedule(config: TrainingArguments) -> None:
    """Make one for a parameter of no use: most schedules want or have no options, and say so when they are made."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type))
    options = config.lr_scheduler_kwargs
    try:
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"lr_scheduler_type {name} with lr_scheduler_kwargs {options}: {_one_line(error)}") from error


def _refuse_kernels(config: TrainingArguments) -> None:
    if config.use_liger_kernel and not (torch.accelerator.is_available() and is_liger_kernel_available()):
        raise ValueError("use_liger_kernel needs a GPU and liger-kernel (pip install liger-kernel); or leave it out")
    for name in ("activation_offloading", "use_transformers_continuous_batching"):
        if getattr(config, name, False) and not torch.accelerator.is_available():
            raise ValueError(f"{name} needs a GPU; leave it out")


def _refuse_engine(config: TrainingArguments) -> None:
    quantization = config.vllm_quantization
    if quantization is not None and not quantization.startswith("simulated") and not torch.accelerator.is_available():
        raise ValueError(
            f"vllm_quantization {quantization} needs a GPU; on a CPU simulated_fp8, simulated_int4 and simulated_int3 "
            "round the rollouts' weights"
        )
    dtypes = ("auto", "bfloat16", "float16", "float32", "half", "float")
    if config.vllm_dtype not in (None, *dtypes):
        raise unknown("vllm_dtype", str(config.vllm_dtype), dtypes)
    models = ("auto", "vllm", "transformers")
    if getattr(config, "vllm_model_impl", "auto") not in models:
        raise unknown("vllm_model_impl", str(config.vllm_model_impl), models)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
