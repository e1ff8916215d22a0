"""A model's costs, counted without weights, against torch's counter on real passes and against its sizes."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tests.tools.estimate.runs import network
from trl_ext.tools.estimate.costs.counting import ModelCosts, count_model

ROWS, TOKENS = 3, 10
# Rotary positions: older versions of transformers have a product for them, which rows share and our costs count for each.
FREQUENCIES = 4 if " @ " in inspect.getsource(Qwen3RotaryEmbedding.forward) else 0
ANGLES = 2 * FREQUENCIES * (ROWS - 1) * TOKENS
PAIRS = 3 * 4 * 4 * 8  # FLOPs of attention per query and key: layers x 4 x heads x head size


@functools.cache
def counted() -> ModelCosts:
    return count_model(network())


def really_counted(backward: bool) -> int:
    """FLOPs of the decoder with real weights, by torch's own counter, which knows attention as plain products."""
    model = AutoModelForCausalLM.from_config(network()).model
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(backward):
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.slow
def test_forward_flops_are_those_of_a_real_pass() -> None:
    found = counted().decoder(ROWS, TOKENS, TOKENS).flops
    assert found == pytest.approx(really_counted(backward=False) + ANGLES, rel=1e-9)


@pytest.mark.slow
def test_training_flops_are_those_of_a_real_step() -> None:
    """Fused attention computes its scores once more in the backward pass, a fifth product next to the four."""
    again = ROWS * TOKENS**2 * PAIRS / 2
    found = counted().decoder_trained(ROWS, TOKENS, TOKENS).flops
    assert found == pytest.approx(really_counted(backward=True) + ANGLES + again, rel=1e-9)


@pytest.mark.moderate
def test_the_head_is_one_product_and_four_in_training() -> None:
    product = 2 * 32 * 100 * ROWS * TOKENS  # hidden size x vocabulary
    assert counted().head(ROWS, TOKENS, 0).flops == pytest.approx(product)
    assert counted().head_trained(ROWS, TOKENS, 0).flops == pytest.approx(4 * product)  # logits twice, two gradients


def test_every_pass_reads_the_weights() -> None:
    weights = 3 * 2 * 32 * 32 + 3 * 2 * 32 * 16 + 3 * 3 * 32 * 48  # of the layers' products
    assert counted().decoder(1, 0, 0).product_bytes == pytest.approx(4 * (weights + FREQUENCIES))


@pytest.mark.slow
def test_sizes_are_those_of_the_model() -> None:
    model = AutoModelForCausalLM.from_config(network())
    costs = counted()
    assert costs.parameters == costs.trained_parameters == costs.read_parameters == model.num_parameters()
    assert costs.kv_elements == 3 * 2 * 2 * 8  # layers x keys and values x heads x head size
    assert (costs.vocabulary, costs.tensors) == (100, len(list(model.parameters())))
    untied = count_model(network(tie_word_embeddings=False, num_hidden_layers=1))
    assert untied.parameters - untied.read_parameters == 100 * 32


@pytest.mark.slow
def test_layers_of_one_kind_are_counted_once() -> None:
    deep = network(num_hidden_layers=4)
    alternating = network(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2)
    assert len(set(alternating.layer_types)) == 2  # so that all are counted
    short, whole = count_model(deep), count_model(alternating)
    for name in ("decoder", "decoder_trained"):
        ours, theirs = (getattr(costs, name)(2, 8, 8) for costs in (short, whole))
        assert ours.flops == pytest.approx(theirs.flops)


@pytest.mark.slow
def test_an_adapter_trains_its_own_parameters_only() -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    found = count_model(network(), adapt=lambda model: get_peft_model(model, lora))
    assert found.trained_parameters == 3 * 2 * (32 + 32 + 32 + 16)  # layers x rank x widths of both projections
    # no gradient of the frozen weights: about a third less
    plain, adapted = (costs.decoder_trained(ROWS, TOKENS, TOKENS).flops for costs in (counted(), found))
    assert 0.6 < adapted / plain < 0.85
    # the head forward, once more in the backward pass, and the gradient of its input; not that of its weights
    plain, adapted = (costs.head_trained(ROWS, TOKENS, TOKENS).flops for costs in (counted(), found))
    assert adapted == pytest.approx(0.75 * plain)
