from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import ROWS, loss_inputs, totals_of
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.types import StepTotals

EVERY = sorted(AGGREGATIONS)
CUTS = [[ROWS], [3, 3], [1, 2, 3], [1] * ROWS]


def case() -> tuple[Tensor, Tensor, StepTotals]:
    x = loss_inputs()
    return x.logp, x.mask, totals_of(x.mask)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_micro_batches_sum_to_the_step_in_value_and_gradient(name: str, sizes: list[int]) -> None:
    loss, mask, totals = case()
    aggregate = AGGREGATIONS.build(name)
    whole = aggregate(loss, mask, totals)
    parts = [aggregate(*part, totals) for part in zip(loss.split(sizes), mask.split(sizes), strict=True)]
    assert_close(torch.stack(parts).sum(), whole, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(value, loss)[0] for value in (torch.stack(parts).sum(), whole)]
    assert_close(*gradients, rtol=0, atol=1e-12)
    assert gradients[1].abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_padding_row_order_and_masked_values_change_nothing(name: str) -> None:
    loss, mask, totals = case()
    aggregate = AGGREGATIONS.build(name)
    wanted = aggregate(loss, mask, totals)
    padded = [torch.nn.functional.pad(t, (0, 4)) for t in (loss, mask)]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    poisoned = loss.masked_fill(~mask, 1e6)
    for changed in (aggregate(*padded, totals), aggregate(loss[order], mask[order], totals)):
        assert_close(changed, wanted, rtol=0, atol=1e-14)  # a sum in another order
    assert_close(aggregate(poisoned, mask, totals), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", EVERY)
def test_nonfinite_masked_value_affects_no_value_or_gradient(name: str, poison: float) -> None:
    loss, mask, totals = case()
    poisoned = loss.detach().masked_fill(~mask, poison).requires_grad_()
    value, wanted = (AGGREGATIONS.build(name)(x, mask, totals) for x in (poisoned, loss))
    assert_close(value, wanted, rtol=0, atol=0)
    assert_close(torch.autograd.grad(value, poisoned), torch.autograd.grad(wanted, loss), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_it_is_linear_and_gives_a_scalar_of_the_losses_precision(name: str) -> None:
    loss, mask, totals = case()
    aggregate = AGGREGATIONS.build(name)
    assert (aggregate(loss, mask, totals).shape, aggregate(loss, mask, totals).dtype) == ((), torch.float64)
    assert_close(aggregate(3 * loss, mask, totals), 3 * aggregate(loss, mask, totals), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_step_in_which_no_token_trains_costs_nothing(name: str) -> None:
    loss, mask, _ = case()
    nothing = torch.zeros_like(mask)
    assert AGGREGATIONS.build(name)(loss, nothing, totals_of(nothing)).item() == 0


# 1 2 | 3: three tokens of a step that has 4 sequences, 10 tokens, and at most 5 tokens per completion
LOSS = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, False, False]])
TOTALS = StepTotals(sequences=4, tokens=10, max_tokens=5)


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("sequence_mean", {}, (1.5 + 3) / 4),
        ("token_mean", {}, 6 / 10),
        ("constant", {}, 6 / 5 / 4),
        ("constant", {"normalize_constant": 2.0}, 6 / 2 / 4),
    ],
)
def test_values_by_hand(name: str, options: dict[str, Any], value: float) -> None:
    assert AGGREGATIONS.build(name, **options)(LOSS, MASK, TOTALS).item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "reads"),
    [("sequence_mean", {"sequences"}), ("token_mean", {"tokens"}), ("constant", {"sequences", "max_tokens"})],
)
def test_a_member_reads_its_own_totals_only(name: str, reads: set[str]) -> None:
    for field in ("sequences", "tokens", "max_tokens"):
        doubled = dataclasses.replace(TOTALS, **{field: 2 * getattr(TOTALS, field)})
        ratio = AGGREGATIONS.build(name)(LOSS, MASK, doubled) / AGGREGATIONS.build(name)(LOSS, MASK, TOTALS)
        assert ratio.item() == pytest.approx(0.5 if field in reads else 1.0, abs=1e-6)
