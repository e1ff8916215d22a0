"""Every kind of adapter that PEFT has: a step's savings give the gradient of whole sequences, or are off by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor
from transformers import GenerationConfig

from tests.grpo.test_step import ALL, PLAIN, trained, trainer_of
from tests.step.test_prompt_sharing import (
    GROUPS,
    MICRO_BATCHES,
    PROMPTS,
    completions,
    gradient_of_whole_sequences,
    gradient_on_shared_prompts,
    loss_of,
    model_of,
    taken_from,
)
from tests.support.tiny import tiny_sft, weight_difference
from trl_ext.generation.adapters import adapter_of_places
from trl_ext.generation.decoding import own_loop_unsupported
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.step.contiguous import contiguous_log_probs

SETTINGS: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 2, "target_modules": "self_attn"},
    "ADALORA": {"total_step": 100},
    "C3A": {"block_size": 8},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "CPT": {"cpt_token_ids": [3, 4], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {"n_frequency": 16},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 1},
    "POLY": {"r": 2, "n_tasks": 1},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5, 6, 7]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}
OFF = {
    "PROMPT_TUNING": "tokens of its own", "P_TUNING": "tokens of its own", "PREFIX_TUNING": "tokens of its own",
    "CARTRIDGE": "tokens of its own", "CPT": "tokens of its own", "MULTITASK_PROMPT_TUNING": "tokens of its own",
    "ADAPTION_PROMPT": "queries once more", "LILY": "a mean over all tokens", "PVERA": "draws noise",
    "POLY": "the task of a row",
}  # fmt: skip
# What needs another package, another model, or weights in float32; SHADOW's forward pass fails without TRL as well.
NOT_MADE = {"ADAMSS", "XLORA", "PSOFT", "SHADOW"}
UNKNOWN_TO_TRL = ("CPT", "MULTITASK_PROMPT_TUNING", "POLY")  # need inputs that TRL does not give


def config_of(name: str, **more: Any) -> Any:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name)]
    given = {**SETTINGS.get(name, {}), **more}
    if "target_modules" in inspect.signature(kind.__init__).parameters:
        given.setdefault("target_modules", ["q_proj", "v_proj", "up_proj"])
    return kind(task_type="CAUSAL_LM", **given)


def adapted(name: str) -> Any:
    """A model of two layers with such an adapter, whose weights are not at their start, where most have no effect."""
    model = peft.get_peft_model(model_of("llama"), config_of(name)).double()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype))
    return model


def fine_tuned(folder: Path, **more: Any) -> Any:
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, folder, [], **more)


def gradient_of_contiguous_rows(model: Any) -> dict[str, Tensor]:
    for number, groups in enumerate(MICRO_BATCHES):
        ids, mask = completions(len(groups), number)
        prompts = PROMPTS[[GROUPS.index(group) for group in groups]]
        columns = int(((prompts != 0).sum(dim=1) + mask.sum(dim=1)).max())
        loss_of(contiguous_log_probs(model, prompts, (prompts != 0).long(), ids, mask, columns)[0]).backward()
    return taken_from(model)


@pytest.mark.parametrize("name", sorted({kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - NOT_MADE))
def test_each_adapter_has_its_gradient_or_a_reason(name: str) -> None:
    model = adapted(name)
    reason, of_loop = adapter_of_places(model), own_loop_unsupported(model, GenerationConfig(max_new_tokens=4))
    if name in OFF:
        assert name in str(reason)
        assert OFF[name] in str(reason)
        assert of_loop == reason
        return
    assert reason is of_loop is None
    plain = gradient_of_whole_sequences(model)
    largest = max(gradient.abs().max() for gradient in plain.values())
    assert largest > 0
    for ours in (gradient_on_shared_prompts(model), gradient_of_contiguous_rows(model)):
        assert ours.keys() == plain.keys()
        for parameter in plain:  # norms compute in float32
            assert (ours[parameter] - plain[parameter]).abs().max() < 2e-6 * largest, parameter


def test_an_activated_lora_depends_on_its_place() -> None:
    activated = peft.get_peft_model(model_of("llama"), config_of("LORA", alora_invocation_tokens=[3]))
    assert "begins at a place in the prompt" in str(adapter_of_places(activated))


@pytest.mark.moderate
@pytest.mark.parametrize("name", ["PREFIX_TUNING", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(OFF))])
def test_a_step_is_trls_where_the_savings_are_off(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if name in (*UNKNOWN_TO_TRL, "ADAPTION_PROMPT", "PVERA"):
        pytest.skip("does not train, is not for this model, or draws noise")
    found = []
    for label, on in (("plain", PLAIN), ("ours", ALL)):
        torch.manual_seed(0)
        found.append(trained(tmp_path / label, peft_config=config_of(name), n_grpo_steps=1, **on))
    plain, ours = (trainer.model for trainer in found)
    untrained = trainer_of(tmp_path, peft_config=config_of(name)).model
    assert weight_difference(plain, untrained) > 1e-5
    assert weight_difference(plain, ours) < 1e-7
    assert f"the adapter ({name})" in caplog.text
    assert "share_prompt_prefix" in caplog.text or "TRL's micro-batches" in caplog.text


@pytest.mark.parametrize("name", UNKNOWN_TO_TRL)
def test_adapters_that_trl_cannot_train_are_refused_by_name(name: str, tmp_path: Path) -> None:
    for make in (lambda **more: trainer_of(tmp_path, **more), lambda **more: fine_tuned(tmp_path, **more)):
        with pytest.raises(ValueError, match=f"peft_type {name} cannot be trained .* such as LORA"):
            make(peft_config=config_of(name))


@pytest.mark.parametrize("name", ["PREFIX_TUNING", "CARTRIDGE"])
def test_tokens_in_a_cache_are_not_checkpointed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} with gradient_checkpointing: .*set gradient_checkpointing: false"):
        trainer_of(tmp_path, peft_config=config_of(name), gradient_checkpointing=True)
