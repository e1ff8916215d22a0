"""What goes together trains, and what does not is refused in a line; bitsandbytes' weights where it is installed."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from trl import ModelConfig, get_quantization_config

from tests.support.tiny import CONFIG, ends_early, prompts, save_tiny, save_wide, tiny_model, tiny_tokenizer
from tests.support.versions import needs_bitsandbytes
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.adapters import refuse_untrainable
from trl_ext.recipes.compatibility import AXES, TRIED, Choice, outcome

HERE = Path(__file__).parents[1]
NAMED = {axis: {choice.name: choice for choice in choices} for axis, choices in AXES.items()}
ADAPTERS, SAVINGS, QUANTIZED = NAMED["adapter"], NAMED["saving"], NAMED["quantization"]
WITH_SAVINGS = [(adapter, saving) for adapter in ADAPTERS for saving in SAVINGS]
PUSHED = ("LoRA", "prefix tuning")
COMPILED = "`torch_compile`"  # takes half a minute


def on_push(name: str, *pushed: str) -> Any:
    """Marks that leave all but these to the night."""
    return () if name in pushed else pytest.mark.nightly


EACH_ADAPTER = [pytest.param(name, marks=on_push(name, *PUSHED)) for name in ADAPTERS]


def trained(folder: Path, *choices: Choice) -> Any:
    """A trainer of one step with these choices."""
    settings = {name: value for one in choices for name, value in one.settings.items()}
    if settings.get("torch_compile"):
        settings["torch_compile_backend"] = "eager"
    loaded = {name: value for one in choices for name, value in one.model.items()}
    adapter = next((one.adapter for one in choices if one.adapter is not None), None)
    own = {**CONFIG, "max_steps": 1, "preset": "grpo_clip", "stop": ["stop"], "gradient_checkpointing": False}
    trainer = ExtGRPOTrainer(
        model=str(save_wide(folder / "model")),
        reward_funcs=ends_early,
        args=ExtGRPOConfig(output_dir=str(folder / "run"), **{**own, **settings}),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        peft_config=copy.deepcopy(adapter),
        quantization_config=get_quantization_config(ModelConfig(use_peft=True, dtype="float32", **loaded)),
    )
    trainer.train()
    return trainer


def trains_or_is_refused(folder: Path, *choices: Choice) -> None:
    said = outcome(*choices, on_cpu=True)
    if said.refused:
        with pytest.raises(ValueError, match=re.escape(said.refused)):
            trained(folder, *choices)
        return
    trainer = trained(folder, *choices)
    assert trainer.state.global_step == 1
    assert trainer.state.log_history[0]["grad_norm"] > 0
    if said.off:
        assert trainer._planner is None or not trainer._planner.batching.share_prompts


def test_what_is_refused_is_refused_by_two_choices_in_a_line() -> None:
    pairs = {
        frozenset((one.name, other.name)): outcome(one, other)
        for first, second in itertools.combinations(AXES.values(), 2)
        for one, other in itertools.product(first, second)
    }
    lines = [found.refused or found.off for found in pairs.values() if found.refused or found.off]
    assert all("\n" not in line for line in lines)
    assert len(set(lines)) > 5
    for choices in itertools.product(*AXES.values()):
        of_pairs = [pairs[frozenset((a.name, b.name))].refused for a, b in itertools.combinations(choices, 2)]
        assert bool(outcome(*choices).refused) == any(of_pairs), [one.name for one in choices]


def test_each_pair_of_axes_names_a_test_that_there_is() -> None:
    assert list(TRIED) == list(itertools.combinations(AXES, 2))
    for file, test in re.findall(r"`([\w/]+)::(\w+)`", " ".join(TRIED.values())):
        assert f"def {test}(" in (HERE / f"{file}.py").read_text(encoding="utf-8"), (file, test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "saving"),
    [pytest.param(*pair, marks=on_push(pair[0] * (pair[1] != COMPILED), *PUSHED)) for pair in WITH_SAVINGS],
)
def test_every_adapter_trains_with_every_saving(adapter: str, saving: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    trains_or_is_refused(tmp_path, ADAPTERS[adapter], SAVINGS[saving])
    assert (counters["stats"]["unique_graphs"] > 0) == (saving == COMPILED)


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("adapter", EACH_ADAPTER)
def test_every_adapter_trains_on_quantized_weights(adapter: str, quantization: str, tmp_path: Path) -> None:
    trains_or_is_refused(tmp_path, ADAPTERS[adapter], QUANTIZED[quantization])


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("saving", [pytest.param(name, marks=on_push(name, "shared prompts")) for name in SAVINGS])
def test_every_saving_is_of_quantized_weights_too(saving: str, quantization: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    trains_or_is_refused(tmp_path, ADAPTERS["LoRA"], QUANTIZED[quantization], SAVINGS[saving])


def test_tokens_of_a_tied_embedding_are_refused(tmp_path: Path) -> None:
    tokens = ADAPTERS["LoRA, `trainable_token_indices`"].adapter
    for model in (tiny_model(), str(save_tiny(tmp_path))):
        with pytest.raises(ValueError, match=r"trainable_token_indices: the model's output head .* modules_to_save"):
            refuse_untrainable(tokens, False, model)
    refuse_untrainable(ADAPTERS["LoRA"].adapter, False, tiny_model())


@needs_bitsandbytes
@pytest.mark.slow
def test_4bit_layers_have_their_gradient_after_a_rollout(tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    model = trained(tmp_path, ADAPTERS["LoRA"], QUANTIZED["`load_in_4bit`"]).model.train()
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == 14
    for layer in layers:
        x = torch.randn(3, layer.in_features, requires_grad=True)
        layer(x).sum().backward()
        expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().sum(dim=0)
        assert x.grad is not None
        # Matrix products in bfloat16, whose 8 bits are of the largest of some hundred terms.
        assert (x.grad - expected).abs().max() < 0.02 * expected.abs().max()
