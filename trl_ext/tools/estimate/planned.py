"""`PlannedRun`: a recipe's settings as they are parsed, and what decides memory and time in addition to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trl_ext.errors import InputError
from trl_ext.generation.adapters import saved_config
from trl_ext.generation.model_source import locate
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.savings import unpacked
from trl_ext.io import read_yaml

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig
    from trl import ModelConfig

_MAX_NUM_SEQS = 256  # vLLM's own, where a recipe has no rollout of GRPO (vllm.config.SchedulerConfig)
_SERVER_MEMORY = 0.92  # vLLM's own gpu_memory_utilization (vllm.config.CacheConfig)


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
        options = read_yaml(path) or {}
        if "num_processes" not in options:
            raise InputError(f"--accelerate {path}: no num_processes, so it is no configuration of accelerate")
        deepspeed = dict(options.get("deepspeed_config") or {})
        own_file, kind = deepspeed.get("deepspeed_config_file"), str(options.get("distributed_type"))
        offloads = [deepspeed.get(f"offload_{what}_device") for what in ("optimizer", "param")]
        stage = zero_stage(kind, own_file, deepspeed.get("zero_stage"), offloads)
        return cls(int(options["num_processes"]), int(options.get("num_machines", 1)), stage)


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
class PlannedRun:
    """A run before it is started; counts are over all GPUs unless said otherwise, lengths in tokens.

    Args:
        task, model, config: a recipe's settings, as a process of the launch has them. Where memory alone is estimated,
            `task` may be None.
        network: the configuration of the model that is trained.
        trained_fraction: of a rollout's rows, those that a step trains on.

    Raises:
        NoEstimateError: the weights are quantized in a way that a step on fake tensors does not have.
    """

    task: Any
    model: ModelConfig
    config: Any
    network: PretrainedConfig
    launch: Launch
    lengths: Lengths
    trained_fraction: float = 1.0

    def __post_init__(self) -> None:
        if getattr(self.network, "quantization_config", None):
            raise NoEstimateError("the quantized weights of a checkpoint are not modeled")
        if self.quantized_bits and (self.launch.zero_stage or self.model.use_dora):
            other = "DeepSpeed" if self.launch.zero_stage else "DoRA"
            raise NoEstimateError(f"quantized weights with {other} are not modeled")

    def with_settings(self, **changes: Any) -> PlannedRun:
        """With other values of some settings; what others were resolved to by their earlier values stays."""
        parts = {name: copy.copy(getattr(self, name)) for name in ("task", "model", "config")}
        for name, value in changes.items():
            setattr(next(part for part in parts.values() if hasattr(part, name)), name, value)
        return replace(self, **parts)

    def with_rows(self, rows: int) -> PlannedRun:
        """With micro-batches of so many rows, and a step that has at least two."""
        accumulation = max(2, self.rows_per_gpu // rows)
        changes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
        if self.recipe == "grpo":
            steps = self.config.steps_per_generation * accumulation // self.config.gradient_accumulation_steps
            changes["steps_per_generation"] = max(1, steps)
        return self.with_settings(**changes)

    @property
    def recipe(self) -> str:
        """Its name in `RECIPES`."""
        if isinstance(self.config, ExtGRPOConfig):
            return "grpo"
        return "expert_iteration" if hasattr(self.config, "questions_per_step") else "sft"

    @cached_property
    def peft(self) -> PeftConfig | None:
        """Of an adapter; None where all parameters are trained."""
        from trl_ext.recipes.model_settings import adapter_of

        return adapter_of(self.model) or saved_config(self.model.model_name_or_path)

    @property
    def quantized_bits(self) -> int:
        """Of a weight of a linear layer, as bitsandbytes loads it; 0 where it is not quantized."""
        return 4 if self.model.load_in_4bit else 8 if self.model.load_in_8bit else 0

    @property
    def weights_dtype(self) -> torch.dtype:
        """That weights are loaded in."""
        return _dtype(self.model.dtype, self.network)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """That weights are cast to for a pass; None where they are not."""
        return torch.bfloat16 if self.config.bf16 else torch.float16 if self.config.fp16 else None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products."""
        return self.autocast_dtype or self.weights_dtype

    @property
    def attention(self) -> str:
        """sdpa, eager or flash_attention_2."""
        return self.model.attn_implementation or "sdpa"

    @property
    def rows_per_gpu(self) -> int:
        """Rows of an optimizer step on one GPU."""
        return int(self.config.per_device_train_batch_size * self.config.gradient_accumulation_steps)

    @property
    def step(self) -> int:
        """Rows of an optimizer step."""
        return self.rows_per_gpu * self.launch.gpus

    @property
    def rollout(self) -> int:
        """Completions per rollout; rows of a step where nothing is rolled out."""
        if self.recipe == "expert_iteration":
            return int(self.config.questions_per_step * self.config.group_size)
        return int(self.config.generation_batch_size) if self.recipe == "grpo" else self.step

    @property
    def group(self) -> int:
        """Completions per prompt."""
        return int(getattr(self.config, "num_generations", getattr(self.config, "group_size", 1)))

    @property
    def epochs(self) -> int:
        """Passes over a rollout."""
        return int(getattr(self.config, "num_iterations", getattr(self.config, "epochs_per_step", 1)))

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout."""
        return max(1, self.epochs * self.rollout // self.step)

    @property
    def longest_row(self) -> int | None:
        """Tokens of a row of SFT and expert iteration; None in GRPO: prompt and completion."""
        if self.recipe == "grpo":
            return None
        return int(self.config.max_length or self.lengths.longest_prompt + self.lengths.max_completion)

    @property
    def packs(self) -> bool:
        """Whether micro-batches are packed by tokens and trimmed."""
        model = cast(Any, SimpleNamespace(config=self.network))
        asked = getattr(self.config, "dynamic_micro_batches", False) and self.config.uses_axes
        return bool(asked and not unpacked(self.config, model))

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a micro-batch; None: of as many longest rows as it has."""
        return self.config.micro_batch_tokens if self.packs else None

    @property
    def beta(self) -> float:
        """Of the KL penalty; above 0 there is a reference model."""
        return float(getattr(self.config, "beta", 0.0))

    @property
    def teacher_bytes(self) -> int:
        """Of all teachers' weights, in the dtype that they are loaded in."""
        total, given = 0, getattr(self.config, "teacher_init_kwargs", None) or {}
        for model in getattr(self.config, "teacher_models", {}).values():
            with torch.device("meta"):
                made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(locate(model).base))
            dtype = getattr(torch, str(given.get("dtype", "")), self.weights_dtype)
            bits = 4 if given.get("load_in_4bit") else 8 if given.get("load_in_8bit") else 8 * dtype.itemsize
            total += sum(parameter.numel() for parameter in made.parameters()) * bits // 8
        return total

    @property
    def learns_divergence(self) -> bool:
        """Whether a step goes through the LM head a second time, for a teacher's distribution."""
        return bool(getattr(self.config, "learns_divergence", False))

    @property
    def engine(self) -> str:
        """One of vllm (colocated), hf (HF generate) and server (vLLM servers elsewhere)."""
        return "hf" if not self.config.use_vllm else "server" if self.config.vllm_mode == "server" else "vllm"

    @property
    def samples_ahead(self) -> bool:
        """Whether servers sample the next rollout while steps on this one are made."""
        return bool(getattr(self.config, "rollout_ahead", 0)) and self.engine == "server"

    @property
    def engine_memory(self) -> float:
        """Of a GPU's memory, what vLLM takes; a server has its GPU for itself, and that default of vLLM."""
        return _SERVER_MEMORY if self.engine == "server" else float(self.config.vllm_gpu_memory_utilization)

    @property
    def engine_dtype(self) -> str:
        """As vLLM knows it; auto is the weights'."""
        return self.config.vllm_dtype or "auto"

    @property
    def engine_parallel(self) -> int:
        """GPUs that an engine is spread over."""
        return int(getattr(self.config, "vllm_tensor_parallel_size", 1))

    @property
    def engine_sequences(self) -> int:
        """Sequences that vLLM decodes at a time, on a GPU."""
        rollout = max(1, self.rollout // self.launch.gpus) if self.recipe == "grpo" else _MAX_NUM_SEQS
        return int(self.config.vllm_max_num_seqs or rollout)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion that the engine has room for.

        Raises:
            NoEstimateError: it is the model's, whose configuration does not say.
        """
        given = self.config.vllm_max_model_length or getattr(self.config, "engine_context", None)
        return int(given or _context_of(self.network))

    @property
    def final_problems(self) -> int | None:
        """Of the validation at the end; None: all."""
        return self.task.final_validation_problems or self.task.validation_problems

    @property
    def save_every(self) -> int | None:
        """Optimizer steps between checkpoints; None: never."""
        never = str(getattr(self.config.save_strategy, "value", self.config.save_strategy)) == "no"
        return None if never else int(self.config.save_steps)


def _context_of(network: PretrainedConfig) -> int:
    """Tokens that a model's positions reach.

    Raises:
        NoEstimateError: its configuration does not say.
    """
    text = network.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if not context:
        raise NoEstimateError("the model's configuration has no length of its context: set vllm_max_model_length")
    return int(context)


def _dtype(name: str | None, network: PretrainedConfig) -> torch.dtype:
    """The dtype that weights are loaded in, as transformers understands the setting."""
    if name in (None, "auto"):
        own = network.dtype
        return own if isinstance(own, torch.dtype) else torch.float32
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype {name!r} is none of torch's; such as float32 or bfloat16")
    return dtype
