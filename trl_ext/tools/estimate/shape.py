"""`RunShape`: what decides a run's memory and time, from the settings of a recipe as they are parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from trl_ext.errors import InputError
from trl_ext.io import read_yaml
from trl_ext.runs.recipes import recipe_of

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig, TrainingArguments
    from trl import ModelConfig

# What a loss is made of, and how it is computed; resolved settings of a config.
OF_LOSS = (
    "advantage", "advantage_options", "policy_loss", "policy_loss_options", "aggregation", "aggregation_options",
    "kl_estimator", "kl_estimator_options", "beta", "temperature", "entropy_coef", "top_entropy_quantile",
    "cast_lm_head_to_fp32", "gradient_checkpointing_kwargs", "off_policy_mask_threshold", "normalize_constant",
    "completion_only_loss", "pad_to_multiple_of", "max_grad_norm",
)  # fmt: skip
_MAX_NUM_SEQS = 256  # vLLM's own, where a recipe has no rollout of GRPO (vllm.config.SchedulerConfig)


class NoEstimateError(ValueError):
    """The memory of these settings, this model or this launch is not known before it runs; the message says why."""


@dataclass(frozen=True)
class Launch:
    """How the processes of a run are started, as a configuration of accelerate says."""

    gpus: int = 1  # of all hosts
    hosts: int = 1
    zero_stage: int = 0

    @classmethod
    def of_accelerate(cls, path: Path) -> Launch:
        """Read a file of `accelerate_configs/`.

        Raises:
            InputError: the file is not there, or has no `num_processes`.
            NoEstimateError: it is FSDP's, or DeepSpeed's with offloading, a file of its own or no stage.
        """
        if not path.is_file():
            raise InputError(f"--accelerate {path}: no such file; accelerate_configs/ has some")
        found = read_yaml(path) or {}
        if "num_processes" not in found:
            raise InputError(f"--accelerate {path}: no num_processes, so it is no configuration of accelerate")
        deepspeed = dict(found.get("deepspeed_config") or {})
        own_file, kind = deepspeed.get("deepspeed_config_file"), str(found.get("distributed_type"))
        offloads = [deepspeed.get(f"offload_{what}_device") for what in ("optimizer", "param")]
        stage = zero_stage(kind, own_file, deepspeed.get("zero_stage"), offloads)
        return cls(int(found["num_processes"]), int(found.get("num_machines", 1)), stage)


def zero_stage(kind: str, config_file: object, stage: object, offloads: Sequence[object]) -> int:
    """The stage of ZeRO that a launch has, 0 without DeepSpeed.

    Args:
        kind: accelerate's `distributed_type`.
        offloads: the devices that optimizer state and parameters are offloaded to, as accelerate names them.

    Raises:
        NoEstimateError: the launch shards in a way that is not modeled.
    """
    if kind == "FSDP":
        raise NoEstimateError("FSDP's shards are not modeled")
    if kind != "DEEPSPEED":
        return 0
    if config_file not in (None, "", "none"):
        raise NoEstimateError("a configuration file of DeepSpeed's own is not read")
    if any(device not in (None, "", "none") for device in offloads):
        raise NoEstimateError("DeepSpeed's offloading is not modeled")
    if stage is None:
        raise NoEstimateError("the launch has DeepSpeed without a zero_stage")
    return int(str(stage))


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions, of the rows that are trained on."""

    prompt: float  # on average
    longest_prompt: int
    completion: float  # on average
    max_completion: int


@dataclass(frozen=True)
class RunShape:
    """What decides a run's memory and time; counts are over all GPUs unless said otherwise, lengths in tokens."""

    config: PretrainedConfig  # of the model that is trained
    recipe: str  # grpo, sft or expert_iteration
    launch: Launch
    peft: PeftConfig | None  # of an adapter; None where all parameters are trained
    weights_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    attention: str  # sdpa, eager or flash_attention_2
    checkpointing: bool
    lengths: Lengths
    rollout: int  # completions per rollout; rows of a step where nothing is rolled out
    group: int  # completions per prompt
    step: int  # rows per optimizer step
    epochs: int  # passes over a rollout
    micro_rows: int  # rows of a micro-batch, on a GPU
    micro_tokens: int | None  # most tokens of a micro-batch; None: of `micro_rows` longest rows
    shares_prompts: bool  # asked for; the model and the launch may refuse it
    dynamic: bool  # micro-batches are packed by tokens and trimmed
    skips: bool  # rows without gradient are left out
    beta: float  # of the KL penalty; above 0 there is a reference model
    optimizer: str  # transformers' name, such as adamw_torch_fused
    engine: str  # vllm (colocated), hf (HF generate), or server (vLLM servers elsewhere)
    engine_fraction: float  # of a GPU's memory, for colocated vLLM
    engine_max_length: int | None  # tokens of prompt and completion; None: the model's context
    engine_sequences: int  # that vLLM decodes at a time, on a GPU
    engine_sleeps: bool  # gives its memory back while the policy is trained
    engine_dtype: str  # as vLLM knows it; auto is the weights'
    engine_quantization: str | None
    engine_tensor_parallel: int
    validate_every: int  # optimizer steps
    validation_problems: int | None  # None: all
    final_problems: int | None
    save_every: int | None  # optimizer steps; None: never
    time_budget: float | None  # seconds
    trained_fraction: float = 1.0  # of a rollout's rows that a step trains on
    loss: Mapping[str, Any] = field(default_factory=dict)  # settings of the objective, see `OF_LOSS`
    settings: Mapping[str, Any] = field(default_factory=dict)  # as given
    longest_row: int | None = None  # tokens of a row of SFT and expert iteration; None: prompt and completion

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout."""
        return max(1, self.epochs * self.rollout // self.step)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step and GPU, at most."""
        return max(1, self.step // (self.micro_rows * self.launch.gpus))


def context_of(network: PretrainedConfig) -> int:
    """Tokens that a model's positions reach.

    Raises:
        NoEstimateError: its configuration does not say.
    """
    text = network.get_text_config()
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if not found:
        raise NoEstimateError("the model's configuration has no length of its context: set vllm_max_model_length")
    return int(found)


def shape_of(
    task: Any,
    model: ModelConfig,
    config: TrainingArguments,
    network: PretrainedConfig,
    launch: Launch,
    lengths: Lengths,
    given: Mapping[str, Any],
) -> RunShape:
    """The shape of a run, from its settings as a process on any machine has parsed them.

    Args:
        task, model, config: of a recipe.
        network: the model's configuration.
        given: the settings as written; `use_vllm`, `train_batch_size` and the sizes of a rollout are resolved for the
            machine that has parsed them, which need not be the one that runs.

    Raises:
        NoEstimateError: the weights are quantized, which a step on fake tensors would count in full.
    """
    if model.load_in_4bit or model.load_in_8bit or getattr(network, "quantization_config", None):
        raise NoEstimateError("quantized weights are not modeled")
    recipe = recipe_of(task)
    gpus = launch.gpus
    of_all = config.per_device_train_batch_size * config.gradient_accumulation_steps * gpus
    step = int(given.get("train_batch_size") or of_all)
    rollout, group, epochs = _rollout(recipe, config, given, step)
    return RunShape(
        config=network,
        recipe=recipe,
        launch=launch,
        lengths=lengths,
        longest_row=None if recipe == "grpo" else config.max_length or lengths.longest_prompt + lengths.max_completion,
        rollout=rollout,
        group=group,
        step=step,
        epochs=epochs,
        loss={name: getattr(config, name) for name in OF_LOSS if getattr(config, name, None) is not None},
        settings=dict(given),
        **_of_weights(model, config, network),
        **_of_micro_batches(config, max(1, step // gpus), network),
        **_of_engine(config, given, max(1, rollout // gpus) if recipe == "grpo" else _MAX_NUM_SEQS),
        **_of_run(task, config),
    )


def _of_weights(model: ModelConfig, config: Any, network: PretrainedConfig) -> dict[str, Any]:
    """How the model is loaded and computed, and what changes its weights."""
    from trl import get_peft_config

    from trl_ext.generation.adapters import saved_config

    return {
        "peft": get_peft_config(model) or saved_config(model.model_name_or_path),
        "weights_dtype": _dtype(model.dtype, network),
        "autocast_dtype": torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None,
        "attention": model.attn_implementation or "sdpa",
        "checkpointing": bool(config.gradient_checkpointing),
        "optimizer": str(getattr(config.optim, "value", config.optim)),
    }


def _of_micro_batches(config: Any, rows: int, network: PretrainedConfig) -> dict[str, Any]:
    """How the rows of a step on one GPU are divided, as far as the recipe's settings and the network say."""
    from trl_ext.grpo.savings import unpacked

    model = cast(Any, SimpleNamespace(config=network))
    packs = getattr(config, "dynamic_micro_batches", False) and config.uses_axes and not unpacked(config, model)
    return {
        "micro_rows": min(config.per_device_train_batch_size, rows),
        "micro_tokens": config.micro_batch_tokens if packs else None,
        "shares_prompts": bool(getattr(config, "share_prompt_prefix", False)),
        "dynamic": bool(packs),
        "skips": bool(getattr(config, "skip_zero_advantage_rows", False)),
        "beta": float(getattr(config, "beta", 0.0)),
    }


def _of_engine(config: Any, given: Mapping[str, Any], sequences: int) -> dict[str, Any]:
    """What generates on GPUs; a machine without one resolves `use_vllm: auto` to HF generate."""
    is_hf = str(given.get("use_vllm", "auto")).lower() == "false"
    return {
        "engine": "hf" if is_hf else "server" if config.vllm_mode == "server" else "vllm",
        "engine_fraction": config.vllm_gpu_memory_utilization,
        "engine_max_length": config.vllm_max_model_length or getattr(config, "engine_context", None),
        "engine_sequences": config.vllm_max_num_seqs or sequences,
        "engine_sleeps": config.vllm_enable_sleep_mode,
        "engine_dtype": config.vllm_dtype or "auto",
        "engine_quantization": config.vllm_quantization,
        "engine_tensor_parallel": getattr(config, "vllm_tensor_parallel_size", 1),
    }


def _of_run(task: Any, config: Any) -> dict[str, Any]:
    """Validations, checkpoints and the end."""
    never_saves = str(getattr(config.save_strategy, "value", config.save_strategy)) == "no"
    return {
        "validate_every": task.validate_every,
        "validation_problems": task.validation_problems,
        "final_problems": task.final_validation_problems or task.validation_problems,
        "save_every": None if never_saves else int(config.save_steps),
        "time_budget": config.time_budget,
    }


def _rollout(recipe: str, config: Any, given: Mapping[str, Any], step: int) -> tuple[int, int, int]:
    """Completions per rollout, completions per prompt, and passes over a rollout."""
    if recipe == "grpo":
        rollout = int(given.get("rollout_batch_size") or given.get("generation_batch_size") or step)
        return rollout, int(config.num_generations), int(config.num_iterations)
    if recipe == "expert_iteration":
        return config.questions_per_step * config.group_size, config.group_size, config.epochs_per_step
    return step, 1, 1


def _dtype(name: str | None, network: PretrainedConfig) -> torch.dtype:
    """The dtype that weights are loaded in, as transformers understands the setting."""
    if name in (None, "auto"):
        own = network.dtype
        return own if isinstance(own, torch.dtype) else torch.float32
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype {name!r} is none of torch's; such as float32 or bfloat16")
    return found
