"""Which adapters, quantized weights, engines, kinds of parallelism and savings of a step go together.

Nothing here decides that: the checks that a run begins with are asked about each pair, without a model. A page of the
documentation is written from it, and tests train what is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig

from trl_ext.compat.compilation import check_compilation
from trl_ext.generation.adapter_sync import check_lora_sync
from trl_ext.generation.adapters import adapter_of_places, check_adapter, check_quantization, refuse_untrainable
from trl_ext.grpo.savings import UNDER_FSDP

_ON = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@dataclass(frozen=True)
class Choice:
    """One value of an axis."""

    name: str
    adapter: PeftConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the trainer
    model: Mapping[str, Any] = field(default_factory=dict)  # of TRL's `ModelConfig`
    needs_gpus: bool = False  # so that no test has trained with it


def _plugin(stage: int) -> SimpleNamespace:
    return SimpleNamespace(zero_stage=stage)


AXES: dict[str, tuple[Choice, ...]] = {
    "adapter": (
        Choice("LoRA", LoraConfig(**_ON)),
        Choice("rsLoRA", LoraConfig(**_ON, use_rslora=True)),
        Choice("DoRA", LoraConfig(**_ON, use_dora=True)),
        Choice("LoRA on all linear layers", LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")),
        Choice("LoRA, `modules_to_save` norm", LoraConfig(**_ON, modules_to_save=["norm"])),
        Choice("LoRA, `modules_to_save` lm_head", LoraConfig(**_ON, modules_to_save=["lm_head"])),
        Choice("LoRA, `trainable_token_indices`", LoraConfig(**_ON, trainable_token_indices=[3])),
        Choice("IA3", IA3Config(target_modules=["v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")),
        Choice("prompt tuning", PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
        Choice("prefix tuning", PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")),
    ),
    "quantization": (
        Choice("`load_in_8bit`", model={"load_in_8bit": True}),
        Choice("`load_in_4bit`", model={"load_in_4bit": True}),
    ),
    "engine": (
        Choice("HF generate", settings={"use_vllm": False}),
        Choice("vLLM, colocated", settings={"use_vllm": True, "vllm_mode": "colocate"}),
        Choice("vLLM server", settings={"use_vllm": True, "vllm_mode": "server"}),
        Choice("`vllm_lora_sync: adapter`", settings={"use_vllm": True, "vllm_lora_sync": "adapter"}),
    ),
    "parallelism": (
        Choice("one process"),
        Choice("DDP"),
        Choice("ZeRO-2", settings={"deepspeed_plugin": _plugin(2)}),
        Choice("ZeRO-3", settings={"deepspeed_plugin": _plugin(3)}),
        Choice("FSDP", settings={"fsdp": ["full_shard"]}, needs_gpus=True),
    ),
    "saving": (
        Choice("shared prompts", settings={"share_prompt_prefix": True}),
        Choice("`gradient_checkpointing`", settings={"gradient_checkpointing": True}),
        Choice("`torch_compile`", settings={"torch_compile": True}),
    ),
}
_NEITHER: dict[str, Any] = {
    "use_vllm": False, "vllm_lora_sync": "merge", "deepspeed_plugin": None, "fsdp": [], "share_prompt_prefix": False,
    "gradient_checkpointing": False, "fp16": False, "torch_compile": False, "torch_compile_backend": "aot_eager",
    "torch_compile_mode": None,
}  # fmt: skip

_OF_TEXT = SimpleNamespace(tie_word_embeddings=False)
_UNTIED = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: _OF_TEXT))  # what is asked of a model


@dataclass(frozen=True)
class Outcome:
    """Of a combination; neither text: it is trained as it is asked for."""

    refused: str | None = None  # in a line, before a model loads
    off: str | None = None  # why a saving switches itself off


def outcome(*choices: Choice, on_cpu: bool = False) -> Outcome:
    """What the checks of a run say of choices of different axes; on a CPU without `bf16`, as is the default there."""
    chosen = {name: value for one in choices for name, value in one.settings.items()}
    settings = {**_NEITHER, "use_cpu": on_cpu, "bf16": not on_cpu, **chosen}
    adapter = next((one.adapter for one in choices if one.adapter is not None), None)
    given = {name: value for one in choices for name, value in one.model.items()}
    config = cast("Any", SimpleNamespace(**settings))
    try:
        check_quantization(next(iter(given), None), adapter, config)
        check_compilation(config)
        refuse_untrainable(adapter, config.gradient_checkpointing)
        if config.use_vllm and adapter is not None:
            check_adapter(cast("Any", _UNTIED), adapter)
        if config.use_vllm and (adapter is not None or config.fsdp):
            check_lora_sync(config.vllm_lora_sync, adapter, sharded=bool(config.fsdp))
    except ValueError as error:
        return Outcome(refused=str(error))
    if not config.share_prompt_prefix:
        return Outcome()
    if config.fsdp:
        return Outcome(off=UNDER_FSDP)
    with_adapter = SimpleNamespace(peft_config={} if adapter is None else {"default": adapter})
    return Outcome(off=adapter_of_places(cast("Any", with_adapter)))


# By the pair of axes, the tests that train what the checks let pass, or why none does here.
_SAVED_ON_RANKS = "`grpo/test_distributed::test_several_sets_of_shared_prompts_change_nothing`"
_ITS_OWN = "`recipes/test_compatibility"
TRIED: dict[tuple[str, str], str] = {
    ("adapter", "quantization"): f"{_ITS_OWN}::test_every_adapter_trains_on_quantized_weights`",
    ("adapter", "engine"): (
        "`generation/test_adapters::test_engine_gets_peft_merged_weights_and_policy_is_unchanged`, "
        "`generation/test_adapter_sync::test_the_colocated_engine_adds_the_adapter`, "
        "`generation/test_vllm::test_lora_is_merged_on_the_fly_and_the_policy_is_unchanged` and "
        "`generation/test_server::test_lora_is_merged_for_the_server_and_policy_is_unchanged`"
    ),
    ("adapter", "parallelism"): (
        "`grpo/test_distributed::test_on_two_ranks_engine_and_policy_agree_after_a_sync` (LoRA; DDP and ZeRO)"
    ),
    ("adapter", "saving"): (
        f"{_ITS_OWN}::test_every_adapter_trains_with_every_saving`, with the same gradient in "
        "`grpo/test_adapters_in_a_step::test_each_adapter_has_its_gradient_or_a_reason`"
    ),
    ("quantization", "engine"): (
        f"{_ITS_OWN}::test_every_adapter_trains_on_quantized_weights` (HF generate) and "
        "`generation/test_vllm::test_an_engine_and_a_quantized_policy_agree`"
    ),
    ("quantization", "parallelism"): (
        "`grpo/test_distributed::test_adapters_on_quantized_weights_train_on_two_ranks`; FSDP needs GPUs"
    ),
    ("quantization", "saving"): f"{_ITS_OWN}::test_every_saving_is_of_quantized_weights_too`",
    ("engine", "parallelism"): (
        "`grpo/test_distributed::test_on_two_ranks_engine_and_policy_agree_after_a_sync` and "
        "`generation/test_server::test_two_ranks_and_the_server_agree_after_a_push`; FSDP needs GPUs"
    ),
    ("engine", "saving"): (
        "`generation/test_vllm::test_sampler_and_trainer_agree_after_steps_only_due_to_sync` and, without an engine of "
        "vLLM, `training/test_compilation::test_sampling_calls_layers_as_they_are`"
    ),
    ("parallelism", "saving"): (
        f"{_SAVED_ON_RANKS} and `grpo/test_distributed::test_compiled_layers_learn_the_same_on_two_ranks`; FSDP needs "
        "GPUs"
    ),
}
