"""Supervised fine-tuning: TRL's `SFTTrainer` with the handout's normalizer, atomic checkpoints, and a policy to sample.

Letters: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from trl import SFTConfig, SFTTrainer
from trl.distributed import DistributedBackend

from trl_ext.compat.given import given
from trl_ext.compat.lazy_vllm import load_vllm
from trl_ext.errors import brief_in_notebooks
from trl_ext.generation.adapter_models import with_adapter_loaded
from trl_ext.generation.adapters import (
    check_adapter,
    check_quantization,
    check_stored_weights,
    quantized_by,
    refuse_untrainable,
)
from trl_ext.generation.hf import eos_ids_of
from trl_ext.generation.policy import sampling_kwargs
from trl_ext.generation.tokens import prompt_ids
from trl_ext.generation.vllm import ColocatedEngine, ServerEngine
from trl_ext.registry import unknown
from trl_ext.setting import Group, OnResume, check_intervals, setting
from trl_ext.training.handout_settings import resolve_train_batch, take_over_names
from trl_ext.training.progress import show_rewards_in_notebook
from trl_ext.training.settings import RunSettings
from trl_ext.training.settings_table import SFT
from trl_ext.training.trainer import ReliableTrainer
from trl_ext.training.trl_settings import check_needs


@brief_in_notebooks
@dataclass
class ExtSFTConfig(RunSettings, SFTConfig):
    """TRL's `SFTConfig` plus the handout's normalizer and batch sizes, and the settings of sampling from the policy.

    Raises:
        ValueError: settings that contradict each other; the message has the numbers.
    """

    normalize_constant: float | None = setting(
        None,
        (
            "Divide each row's summed token loss by this constant, then average over rows "
            "(handout). The default is TRL's mean over all response tokens of the optimizer step."
        ),
        Group.ALGORITHM,
        also_called="constant_normalizer",
        within="(0, inf)",
    )
    train_batch_size: int | None = setting(
        None, "The number of rows per optimizer step, over all ranks.", Group.OPTIMIZER, within="[1, inf)"
    )
    micro_train_batch_size: int | None = setting(
        None,
        "The number of rows per forward pass.",
        Group.OPTIMIZER,
        trl="per_device_train_batch_size",
        also_called="n_microbatches_per_rollout_batch",
        within="[1, inf)",
    )
    completion_only_loss: bool | None = setting(
        True, "Compute the loss on the response tokens only; false includes the prompt.", Group.ALGORITHM
    )
    sampling_temperature: float = setting(
        1.0, "The sampling temperature of rollouts and validations.", Group.SAMPLING, within="[0, inf)"
    )
    sampling_max_tokens: int = setting(
        1024,
        "The maximum length of a sampled response, in tokens.",
        Group.SAMPLING,
        also_called="max_tokens",
        within="[1, inf)",
    )
    vllm_gpu_memory_utilization: float = setting(
        0.3, "The fraction of GPU memory that vLLM takes.", Group.SAMPLING, also_called="gpu_memory_utilization"
    )
    vllm_max_model_length: int | None = setting(
        None,
        (
            "The maximum length of prompt and response together, in tokens. The default is what the longest prompt "
            "and response of the rows need."
        ),
        Group.SAMPLING,
    )
    vllm_enable_sleep_mode: bool = setting(
        False, "Release the engine's memory while the policy is trained.", Group.SAMPLING
    )

    # As TRL's GRPO has them; its SFT samples nothing.
    vllm_mode: str = setting(
        "colocate", "Sample with an engine on each GPU (colocate), or on vLLM servers (server).", Group.SAMPLING
    )
    vllm_server_base_url: str | None = setting(
        None,
        "The address of a vLLM server, http://HOST:PORT; several are separated by commas.",
        Group.SAMPLING,
        on_resume=OnResume.MAY_CHANGE,
    )
    vllm_server_host: str = setting(
        "0.0.0.0", "Its host, without base_url.", Group.SAMPLING, on_resume=OnResume.MAY_CHANGE
    )
    vllm_server_port: int = setting(8000, "Its port, without base_url.", Group.SAMPLING, on_resume=OnResume.MAY_CHANGE)
    vllm_server_timeout: float = setting(
        240.0, "The number of seconds to wait for it at the start.", Group.SAMPLING, on_resume=OnResume.MAY_CHANGE
    )
    vllm_group_port: int = setting(
        51216,
        "The port of the NCCL group that sends it the weights, with GPUs on both sides.",
        Group.SAMPLING,
        on_resume=OnResume.MAY_CHANGE,
    )

    def __post_init__(self) -> None:
        check_intervals(self)
        if self.vllm_mode not in ("colocate", "server"):
            raise unknown("vllm_mode", self.vllm_mode, ("colocate", "server"))
        self._refuse_what_does_not_go_together()
        data_seed: int | None = self.data_seed  # type: ignore[has-type]
        # Without one the order is drawn from torch's state, which an engine sets to another on each rank.
        self.data_seed = self.seed if data_seed is None else data_seed
        self.resolve_run_settings()
        resolve_train_batch(self)
        take_over_names(self)
        super().__post_init__()
        # Trainer reads this name as rows per forward pass; the handout's meaning has been resolved by now.
        self.train_batch_size = self.per_device_train_batch_size * max(1, self.n_gpu)

    def _refuse_what_does_not_go_together(self) -> None:
        check_needs(self, SFT)
        for name, value in given(self, (name for name, rule in SFT.items() if rule.refused), off=False).items():
            raise ValueError(f"{name}={value!r} would be ignored: {SFT[name].note}. Leave it out")
        if self.normalize_constant is not None and (self.packing or self.padding_free):
            raise ValueError(
                "normalize_constant divides by rows, and with packing: true or padding_free: true a row is no longer "
                "one response. Leave one of them out"
            )
        if self.normalize_constant is not None and not self.average_tokens_across_devices:
            raise ValueError("normalize_constant counts the rows of all ranks: leave average_tokens_across_devices on")
        if self.padding_free and not self.packing and self.max_length is not None:
            raise ValueError(f"padding_free: true does not keep to max_length ({self.max_length}); add packing: true")

    # The names that GRPO's config has for the same.

    @property
    def max_completion_length(self) -> int:
        """The maximum length of a sampled response, in tokens."""
        return self.sampling_max_tokens

    @property
    def temperature(self) -> float:
        """The sampling temperature."""
        return self.sampling_temperature


class ExtSFTTrainer(ReliableTrainer, SFTTrainer):
    """`SFTTrainer` on rows from `tokenized`; without `normalize_constant` its loss is TRL's."""

    args: ExtSFTConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args")
        if not isinstance(config, ExtSFTConfig):
            raise TypeError("ExtSFTTrainer needs args=ExtSFTConfig(...)")
        given = inspect.signature(SFTTrainer).bind(*args, **kwargs).arguments
        refuse_untrainable(given.get("peft_config"), config.gradient_checkpointing, given["model"])
        quantized = quantized_by(given["model"], given.get("quantization_config"))
        check_quantization(quantized, given.get("peft_config"), config)
        if config.use_vllm:
            check_adapter(given["model"], given.get("peft_config"))
            if config.vllm_mode == "colocate":
                check_stored_weights(given["model"])
            load_vllm()
        with with_adapter_loaded(given, config):
            super().__init__(**given)
        show_rewards_in_notebook(self)
        if config.normalize_constant is not None:
            self.model_accepts_loss_kwargs = True  # the loss is divided once, by what is counted below
        self._dist = DistributedBackend(self.accelerator)
        self.use_vllm = bool(config.use_vllm)
        self.eos_token_ids = eos_ids_of(self.model.generation_config, self._tokenizer.eos_token_id)
        self.set_sampling({})
        if self.use_vllm:
            self.vllm_generation = self._make_engine(config)
            self.vllm_generation.seed_requests(config.seed, self.place_in_run)
            set_seed(config.seed)  # an engine sets the random state to its rank's
            self.invalidate_engine_weights()

    def _make_engine(self, config: ExtSFTConfig) -> ColocatedEngine:
        engine = ServerEngine if config.vllm_mode == "server" else ColocatedEngine
        return engine(
            model=self.model,
            mode=config.vllm_mode,
            server_base_url=config.vllm_server_base_url,
            server_host=config.vllm_server_host,
            server_port=config.vllm_server_port,
            server_timeout=config.vllm_server_timeout,
            group_port=config.vllm_group_port,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            max_model_length=config.vllm_max_model_length,
            enable_sleep_mode=config.vllm_enable_sleep_mode,
            trust_remote_code=config.trust_remote_code,
            temperature=config.sampling_temperature,
            max_completion_length=config.sampling_max_tokens,
            logprobs=0,  # of the sampled tokens only
            generation_kwargs=sampling_kwargs(config),
            engine_settings=config.engine_settings(),
            lora_sync=config.vllm_lora_sync,
        )

    def turn_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        """One completion of the current policy per prompt, up to a call of a tool."""
        if not self.use_vllm:
            return self._hf_completion_ids(prompts)
        self.sync_engine()
        _, ids, logps, _ = self.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)
        self.generated_logps = [[of_token[0] for of_token in row] for row in logps]
        return list(ids)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """What TRL divides the summed loss of the optimizer step by: its response tokens, or the handout's constant.

        sum over rows of (sum over tokens / constant), averaged over the rows of all micro-batches and ranks.
        """
        if self.args.normalize_constant is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        rows = torch.tensor([sum(_rows(batch) for batch in batch_samples)], device=self.accelerator.device)
        return self.accelerator.gather(rows).sum() * self.args.normalize_constant

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; a micro-batch without a trained token logs no entropy of 0."""
        computed = super().compute_loss(model, inputs, *args, **kwargs)
        metrics = self._mode_metrics
        trained = self.accelerator.gather((inputs["labels"][:, 1:] != -100).sum()[None]).sum()
        for name in () if trained else ("entropy", "mean_token_accuracy"):
            metrics[name].pop()
            if not metrics[name]:
                del metrics[name]
        return computed


def _rows(batch: Mapping[str, torch.Tensor]) -> int:
    """Rows of a micro-batch with a trained token; the others only give all ranks as many."""
    return int((batch["labels"] != -100).any(dim=1).sum())


def tokenized(
    rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Rows with `prompt` and `response` -> `input_ids` and `completion_mask`, and how many were too long.

    As in the handout, prompt and response are tokenized separately; in a row with `turns` each of them is, and those of
    tools are read and not learned. One EOS ends each response, so that the model learns to stop also where no stop
    string does.

    Args:
        max_length: of prompt and response together, in tokens; what is longer is left out, since half a trace has no
            answer.
    """
    listed = list(rows)
    if not listed:
        return [], 0
    prompts = prompt_ids(tokenizer, [row["prompt"] for row in listed])
    parts = [_parts(row) for row in listed]
    texts = iter(tokenizer(text=[text for row in parts for text, _ in row], add_special_tokens=False)["input_ids"])
    examples, end = [], tokenizer.eos_token_id
    for prompt, row in zip(prompts, parts, strict=True):
        ids, mask = list[int](), list[int]()
        for (_, is_own), said in zip(row, texts, strict=False):
            ids += said
            mask += [int(is_own)] * len(said)
        if end is not None and ids[-1:] != [end]:
            ids, mask = [*ids, end], [*mask, 1]
        examples.append({"input_ids": [*prompt, *ids], "completion_mask": [0] * len(prompt) + mask})
    kept = [row for row in examples if max_length is None or len(row["input_ids"]) <= max_length]
    return kept, len(examples) - len(kept)


def _parts(row: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """A response's texts in their order, and whether the model wrote them."""
    if not row.get("turns"):
        return [(row["response"], True)]
    return [(turn["text"], turn["role"] == "assistant") for turn in row["turns"]]
