"""Settings that every trainer's config has: of the run, of sampling from the policy, and of the engine that does it."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from trl_ext.compat.given import RecordsGiven, given
from trl_ext.compat.startup import on_cpu_ranks
from trl_ext.generation import determinism
from trl_ext.generation.engine_choice import choose_engine, choose_precision_on_cpu
from trl_ext.hosts.process_group import join_on_cpu
from trl_ext.redaction import redact
from trl_ext.registry import parse_options, unknown
from trl_ext.setting import Group, OnResume, check_intervals, setting
from trl_ext.training.options import check_evaluation, check_files, stop_strings

# What a colocated engine is made with, and a server is not: TRL's settings; ours are those that `RunSettings` adds.
_TRLS_ENGINE = (
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_model_impl",
)  # fmt: skip


@dataclass
class RunSettings(RecordsGiven):
    """Mixin for TRL's configs."""

    # Resuming.
    resume: str | None = setting(
        None,
        (
            "Resume from a checkpoint: auto, or its folder. auto takes the newest intact one in "
            "output_dir, and starts a new run if there is none."
        ),
        Group.OUTPUT,
        on_resume=OnResume.OF_PROCESS,
    )
    resume_changed: bool = setting(
        False,
        "Resume even though settings differ from those of the run so far.",
        Group.OUTPUT,
        on_resume=OnResume.OF_PROCESS,
    )

    # Pushing to the Hub.
    hub_merge_adapter: bool = setting(
        False,
        "Merge the adapter into the base model before pushing to the Hub.",
        Group.OUTPUT,
        on_resume=OnResume.MAY_CHANGE,
    )

    # Fault tolerance and time limits.
    max_nonfinite_steps: int = setting(
        3,
        "End the run after N steps in a row with a non-finite gradient. Each of them is skipped.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
        rare=True,
    )
    time_budget: float | None = setting(
        None,
        (
            "The wall-clock limit in seconds. It includes start-up, the final validation and "
            "saving, whose cost is estimated from the slowest so far."
        ),
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="(0, inf)",
        unit="seconds",
    )

    lr_decay_fraction: float | None = setting(
        None,
        (
            "Decay the learning rate linearly to zero over this last fraction of --time_budget. "
            "The decay follows the clock and multiplies the schedule over steps; runs are then no "
            "longer bit-reproducible. The default is no such decay."
        ),
        Group.OPTIMIZER,
        within="(0, 1]",
    )

    bf16: bool | None = setting(
        None,
        (
            "Train in bfloat16 by autocast. The default is on with a GPU that has it (unless fp16 is set; on one "
            "without, fp16 is on), and for a large model on a CPU that multiplies it fast (AMX, AVX512-BF16). "
            "Else it is off on a CPU, where TRL has it on: other CPUs are slower in bfloat16, and all are less "
            "exact."
        ),
        Group.OPTIMIZER,
    )

    # Sampling from the policy: rollouts and validation.
    stop: list[str] | None = setting(
        None,
        "Generation stops at any of these strings, which stay in the text.",
        Group.SAMPLING,
        on_resume=OnResume.VALIDATION,
    )
    sampling_min_tokens: int | None = setting(
        None,
        "The minimum completion length in tokens (handout: 4).",
        Group.SAMPLING,
        on_resume=OnResume.VALIDATION,
        also_called="min_tokens",
        within="[0, inf)",
    )

    chat_template_kwargs: dict[str, Any] | str | None = setting(
        None, "Variables of the model's chat template, such as enable_thinking=false.", Group.MODEL
    )

    # The engine that generates.
    use_vllm: str = setting(
        "auto",
        (
            "Generate with colocated vLLM: auto, true or false. auto uses it where there are a GPU and vLLM, and on a "
            "CPU where its build for CPUs is installed and the model is large enough; HF generate otherwise."
        ),
        Group.SAMPLING,
        nargs="?",
        const="true",
    )
    vllm_max_num_seqs: int | None = setting(
        None,
        (
            "The maximum number of sequences that vLLM decodes at a time. The default is a whole "
            "GRPO rollout, else vLLM's own."
        ),
        Group.SAMPLING,
        within="[1, inf)",
        rare=True,
    )
    vllm_dtype: str | None = setting(None, "The engine's dtype: bfloat16, float16, float32 or auto.", Group.SAMPLING)
    vllm_quantization: str | None = setting(
        None,
        (
            "Quantize the engine's weights, such as to fp8. The policy that is trained is not quantized. "
            "simulated_fp8, simulated_int4 and simulated_int3 round them instead, for rollouts, not for validations: "
            "to see on any hardware what that does to a run."
        ),
        Group.SAMPLING,
    )
    vllm_lora_sync: str = setting(
        "auto",
        (
            "How an adapter's updates reach vLLM: merge sends all weights with them, adapter sends the adapter alone, "
            "which vLLM adds at every token. auto chooses what takes less time for a rollout."
        ),
        Group.SAMPLING,
        choices=("auto", "merge", "adapter"),
        rare=True,
    )
    vllm_enable_prefix_caching: bool | None = setting(
        None,
        "Cache the KV states of prompts that a group shares. vLLM's own default is on.",
        Group.SAMPLING,
        rare=True,
    )
    vllm_enforce_eager: bool | None = setting(
        None,
        (
            "Disable compilation and CUDA graphs: slower rollouts, less memory, faster start-up. The default is "
            "false on a GPU, true on a CPU."
        ),
        Group.SAMPLING,
    )

    deterministic: bool = setting(
        False,
        (
            "Compute so that two runs are bit-identical: torch's deterministic algorithms and, on GPUs, vLLM's "
            "kernels that do not depend on the batch, with the policy's attention. What is not covered is refused. "
            "Slower."
        ),
        Group.SAMPLING,
        rare=True,
    )

    def to_dict(self) -> dict[str, Any]:
        """What trackers log and files hold: secrets are masked."""
        parent: Any = super()
        masked: dict[str, Any] = redact(parent.to_dict())
        return masked

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, as into the `training_args.bin` of every checkpoint: secrets are masked."""
        state: dict[str, Any] = redact(self.__dict__)
        return state

    def __copy__(self) -> Any:
        return self._copied(lambda value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copied(lambda value: copy.deepcopy(value, memo))

    def _copied(self, how: Callable[[Any], Any]) -> Any:
        """Keep secrets: a copy is used, not written to a file."""
        new = object.__new__(type(self))
        new.__dict__ |= {name: how(value) for name, value in self.__dict__.items()}
        return new

    def resolve_run_settings(self) -> None:
        """Check the limits, choose the engine and the precision; call it before TRL's `__post_init__`."""
        config: Any = self
        if isinstance(config.report_to, str):
            config.report_to = config.report_to.split(",")  # several in a flag
        check_intervals(self)
        if self.lr_decay_fraction is not None and self.time_budget is None:
            raise ValueError("lr_decay_fraction is a fraction of the time budget: give --time_budget too")
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"):
            if not 0 <= getattr(config, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(config, name)}")
        if config.max_steps == 0 or config.max_steps < -1:
            raise ValueError(
                f"max_steps is {config.max_steps}, which trains nothing; use recipes/evaluate.py to evaluate a model"
            )
        self.stop = stop_strings(self.stop) or None
        self.chat_template_kwargs = parse_options("chat_template_kwargs", self.chat_template_kwargs)
        check_files(config)
        check_evaluation(config)
        self.engine_context: int | None = None  # of the rows, where `vllm_max_model_length` is not given
        if on_cpu_ranks():
            config.use_cpu = True
            join_on_cpu(config.ddp_timeout)
        self.precision_reason = None
        if card := card_without_bf16(config.use_cpu):
            if self.bf16 or config.bf16_full_eval:
                raise ValueError(
                    f"bf16: {card} has no bfloat16, and would convert every number: set fp16: true (float16 with a "
                    "scaled loss), or bf16: false for float32"
                )
            if self.bf16 is None and not config.fp16:
                config.fp16, self.precision_reason = True, f"float16 with a scaled loss, since {card} has no bfloat16"
        elif self.bf16 is None and not config.fp16 and (config.use_cpu or not torch.cuda.is_available()):
            self.bf16, self.precision_reason = self._precision_without_cuda()
        if (self.bf16 or config.bf16_full_eval) and not (config.use_cpu or torch.accelerator.is_available()):
            config.use_cpu = True  # which transformers asks for
            self.precision_reason = self.precision_reason or "bfloat16 by autocast on this CPU, as bf16 asks for"
        if config.fp16 and is_without_fp16(config.use_cpu):
            self.precision_reason = "float32, since fp16 has no effect on a CPU (bf16: true is bfloat16 there)"
        config.use_vllm, self.engine_reason = choose_engine(self.use_vllm)
        self._refuse_what_generation_ignores()
        if self.deterministic:
            self._switch_on_determinism()

    def _precision_without_cuda(self) -> tuple[bool, str]:
        config: Any = self
        if not config.use_cpu and torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            return False, f"float32 on {kind}, where no other precision was tried and bf16 is not set"
        return choose_precision_on_cpu()

    def _refuse_what_generation_ignores(self) -> None:
        config: Any = self
        if config.use_vllm and config.vllm_mode == "server":
            of_colocated = [f.name for f in fields(config) if f.name in OF_COLOCATED]
            if ignored := given(config, of_colocated, off=False):
                raise ValueError(
                    f"{', '.join(ignored)} with vllm_mode: server: the server's own command line sets this; give it "
                    "there, or set vllm_mode: colocate"
                )
        if (quantization := str(self.vllm_quantization)).startswith("simulated"):
            from trl_ext.generation.vllm import SIMULATED

            if quantization not in SIMULATED:
                raise unknown("vllm_quantization", quantization, SIMULATED)
        batching = "use_transformers_continuous_batching"
        if not config.use_vllm and self.stop and getattr(config, batching, False):
            raise ValueError(f"{batching} with stop: generate_batch has no stop strings; leave one of them out")

    def _switch_on_determinism(self) -> None:
        """Refuse what is not covered, and have transformers' Trainer and the engine compute so."""
        config: Any = self
        if self.lr_decay_fraction is not None:
            raise ValueError("deterministic with lr_decay_fraction, which follows the clock: leave one of them out")
        given: dict[str, Any] = {"quantization": self.vllm_quantization, "top_p": getattr(config, "top_p", 1.0)}
        engine, device = self.engine_and_device
        determinism.prepare_process(engine, determinism.check_covered(engine, device, self.vllm_dtype, **given))
        config.full_determinism = True

    @property
    def engine_and_device(self) -> tuple[str, str]:
        """What samples and where, as the table of `determinism` has them."""
        config: Any = self
        in_vllm = determinism.SERVER if getattr(config, "vllm_mode", "") == "server" else determinism.COLOCATED
        return in_vllm if config.use_vllm else determinism.HF, determinism.device_of(config.use_cpu)

    @property
    def covered(self) -> determinism.Row | None:
        """What `deterministic` covers here; None without it."""
        return determinism.row_of(*self.engine_and_device) if self.deterministic else None

    def engine_settings(self) -> dict[str, Any]:
        """Keyword arguments of vLLM in addition to TRL's own settings, and `covered` where that is something."""
        settings = {name.removeprefix("vllm_"): getattr(self, name) for name in _OUR_ENGINE}
        if getattr(self, "vllm_max_model_length", None) is None:
            settings["max_model_len"] = self.engine_context
        settings["covered"] = self.covered
        return {name: value for name, value in settings.items() if value is not None}


_OUR_ENGINE = [f.name for f in fields(RunSettings) if f.name.startswith("vllm_") and f.name != "vllm_lora_sync"]
OF_COLOCATED = (*_OUR_ENGINE, *_TRLS_ENGINE)


def card_without_bf16(use_cpu: bool) -> str | None:
    """The name of a GPU that computes bfloat16 by conversion, such as a T4; None where there is none."""
    if use_cpu or not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
        return None
    return torch.cuda.get_device_name()


def is_without_fp16(use_cpu: bool) -> bool:
    """Whether accelerate drops `fp16` in silence: on a CPU, unless DeepSpeed decides."""
    by_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return (use_cpu or not torch.accelerator.is_available()) and not by_deepspeed
