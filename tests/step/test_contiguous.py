"""Rows with all padding at their end: the same log-probabilities without a mask, in fewer columns."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from trl.trainer.utils import add_fused_lm_head

from tests.support.tiny import tiny_model
from trl_ext.grpo.savings import attention_cost
from trl_ext.step.contiguous import can_pack, contiguous_log_probs, contiguous_rows
from trl_ext.step.packing import sharing_pays

# The last row's completion is masked, as one that was cut off is.
PROMPT_MASK = torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1]])
COMPLETION_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
PROMPTS = torch.tensor([[0, 0, 3], [4, 5, 6], [0, 7, 8], [0, 9, 9]])
COMPLETIONS = torch.tensor([[5, 6, 7, 1], [8, 1, 0, 0], [1, 0, 0, 0], [4, 4, 4, 4]])


def test_prompts_move_to_the_left_and_completions_follow() -> None:
    ids, places = contiguous_rows(PROMPTS, PROMPT_MASK, COMPLETIONS, columns=5)
    assert ids.tolist() == [[3, 5, 6, 7, 1], [4, 5, 6, 8, 1], [7, 8, 1, 0, 0], [9, 9, 4, 4, 4]]
    assert places[0].tolist() == [1, 2, 3, 4]
    assert places[1, :2].tolist() == [3, 4]
    assert places[2, :1].tolist() == [2]
    assert contiguous_rows(PROMPTS, PROMPT_MASK, COMPLETIONS, columns=8)[0].shape == (4, 8)


def fused_model() -> Any:
    model = tiny_model().double()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def alone(model: Any, row: int) -> tuple[Tensor, Tensor]:
    """A row's log-probabilities and entropies from logits, without any padding."""
    prompt, completion = PROMPTS[row][PROMPT_MASK[row] > 0], COMPLETIONS[row][COMPLETION_MASK[row] > 0]
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
    logps = logits.log_softmax(dim=-1)
    return logps.gather(1, completion[:, None])[:, 0], -(logps.exp() * logps).sum(dim=-1)


def by_position(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """In place of FlashAttention's kernel: rows begin where the positions that transformers gives it are 0."""
    assert mask is None
    starts = (kwargs["position_ids"][0] == 0).nonzero()[1:, 0].tolist()
    rows = zip(*(x.tensor_split(starts, dim=2) for x in (query, key, value)), strict=True)
    found = [torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True) for row in rows]
    assert len(found) == 4
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(("columns", "packed"), [(5, False), (8, False), (5, True), (8, True)])
def test_log_probabilities_are_those_of_each_row_alone(columns: int, packed: bool) -> None:
    model = fused_model()
    if packed:
        AttentionInterface.register("by_position", by_position)
        AttentionMaskInterface.register("by_position", lambda *_, **__: None)
        model.set_attn_implementation("by_position")
    given = (PROMPTS, PROMPT_MASK, COMPLETIONS, COMPLETION_MASK)
    logp, entropy = contiguous_log_probs(model, *given, columns, packed)
    model.set_attn_implementation("sdpa")
    assert logp.shape == entropy.shape == (4, 4)
    assert not logp[COMPLETION_MASK == 0].any()
    weights = torch.arange(1.0, 17).view(4, 4).double()
    mine = torch.autograd.grad((logp * weights).sum(), list(model.parameters()), retain_graph=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        expected, spread = alone(model, row)
        n = len(expected)
        assert (logp[row, :n] - expected).abs().max() < 1e-6  # TRL's head returns float32
        assert (entropy[row, :n] - spread).abs().max() < 1e-6
        total = total + (expected * weights[row, :n]).sum()
    for a, b in zip(mine, torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))


def test_only_flash_attention_without_a_state_takes_packed_rows() -> None:
    model = tiny_model()
    assert not can_pack(model)
    model.config._attn_implementation = "flash_attention_2"
    assert can_pack(model)
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert not can_pack(model)


def test_attention_has_no_mask_of_queries_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask would take memory with the square of the length, and keep attention from its causal kernel."""
    seen = []
    module = sys.modules["transformers.integrations.sdpa_attention"].torch.nn.functional
    original = module.scaled_dot_product_attention
    monkeypatch.setattr(
        module,
        "scaled_dot_product_attention",
        lambda *a, **k: seen.append((k["attn_mask"], k["is_causal"])) or original(*a, **k),
    )
    contiguous_log_probs(fused_model(), PROMPTS, PROMPT_MASK, COMPLETIONS, COMPLETION_MASK, columns=5)
    assert seen == [(None, True)] * 2  # layers


def test_attentions_cost_is_the_ratio_of_counted_operations() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")  # whose products are counted in full

    def counted(length: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model(torch.ones(1, length, dtype=torch.long))
        return int(counter.get_total_flops())

    # a n + b n^2 at two lengths; a rotary embedding's small product grows with n as well
    short, long = counted(16), counted(64)
    square = (long / 64 - short / 16) / (64 - 16)
    assert attention_cost(model) == pytest.approx(square / (short / 16 - 16 * square), rel=0.03)


@pytest.mark.parametrize("attention", [0.0, 0.001, 0.01, 0.1])
def test_sharing_pays_if_it_is_less_work(attention: float) -> None:
    for prompt, completions in [(10, [5, 7, 9]), (10, [50, 70, 90]), (200, [30] * 8), (64, [300]), (64, [40, 160])]:
        apart = sum((prompt + n) + attention * (prompt + n) ** 2 / 2 for n in completions)
        shared = prompt + attention * prompt**2 / 2 + sum(n + attention * n * (prompt + n) for n in completions)
        assert sharing_pays(prompt, completions, attention) == (shared <= apart)
