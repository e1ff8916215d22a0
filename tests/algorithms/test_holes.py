"""Every member of every axis of tokens, with tokens of tools between those of the model: as if they were not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import ROWS, TOKENS, loss_inputs, totals_of
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.types import LossInputs, StepTokens

# Where the model's tokens are among twice as many places; those between them are a tool's, with any values.
PLACES = torch.tensor([2 * n + n % 2 for n in range(TOKENS)])


def spread(values: Tensor) -> Tensor:
    """(B, T) -> (B, 2 T + 1), with something else in the holes."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(ROWS, 2 * TOKENS + 1, generator=generator, dtype=torch.float64)
    if values.dtype is torch.bool:
        return torch.zeros(ROWS, 2 * TOKENS + 1, dtype=torch.bool).index_copy(1, PLACES, values)
    return wide.index_copy(1, PLACES, values.detach())


def with_holes(x: LossInputs) -> LossInputs:
    advantage = x.advantage if x.advantage.shape[1] == 1 else spread(x.advantage)
    return LossInputs(spread(x.logp).requires_grad_(), spread(x.old_logp), advantage, spread(x.mask))


def check(dense: LossInputs, holed: LossInputs, values: tuple[Tensor, Tensor]) -> None:
    """The same value, the same gradient at the model's tokens, and none at a tool's."""
    assert_close(values[1], values[0], rtol=0, atol=1e-12)
    wanted, found = (
        torch.autograd.grad(value, x.logp)[0] for value, x in zip(values, (dense, holed), strict=True)
    )  # fmt: skip
    assert_close(found[:, PLACES], wanted, rtol=0, atol=1e-12)
    is_hole = torch.ones(2 * TOKENS + 1, dtype=torch.bool).index_fill(0, PLACES, False)
    assert not found[:, is_hole].any()


@pytest.mark.parametrize("per_token", [False, True], ids=["an advantage each", "an advantage per token"])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_policy_loss_does_not_see_a_tools_tokens(name: str, per_token: bool) -> None:
    dense = loss_inputs(per_token=per_token)
    holed, totals = with_holes(dense), totals_of(dense.mask)
    objective = Objective(POLICY_LOSSES[name], AGGREGATIONS["token_mean"], KL_ESTIMATORS["k3"])

    def value(x: LossInputs) -> Tensor:
        more = {"ref_logp": x.old_logp, "entropy": -x.old_logp, "group": torch.arange(ROWS), "step": StepTokens.of(x)}
        return objective(x, totals, sampled_logp=x.old_logp - 0.1, **more)[0]

    check(dense, holed, (value(dense), value(holed)))


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_an_aggregation_counts_the_models_tokens_only(name: str) -> None:
    dense = loss_inputs()
    holed, totals = with_holes(dense), totals_of(dense.mask)
    objective = Objective(POLICY_LOSSES["ppo_clip"], AGGREGATIONS[name], KL_ESTIMATORS["k3"])
    check(dense, holed, (objective(dense, totals)[0], objective(holed, totals)[0]))


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_a_kl_penalty_is_of_the_models_tokens(name: str, corrected: bool) -> None:
    dense = loss_inputs()
    holed, totals, ref = with_holes(dense), totals_of(dense.mask), dense.old_logp + 0.2
    objective = Objective(
        POLICY_LOSSES["ppo_clip"], AGGREGATIONS["sequence_mean"], KL_ESTIMATORS[name], 0.7, kl_bias_correction=corrected
    )
    values = objective(dense, totals, ref_logp=ref)[0], objective(holed, totals, ref_logp=spread(ref))[0]
    check(dense, holed, values)


@pytest.mark.parametrize("axis", [SAMPLER_WEIGHTS, SAMPLER_REJECTIONS], ids=["weight", "rejection"])
def test_a_correction_of_the_sampler_is_by_the_models_tokens(axis: dict[str, object]) -> None:
    dense = loss_inputs()
    holed, sampled = with_holes(dense), dense.old_logp + 0.1 * torch.cos(torch.arange(TOKENS, dtype=torch.float64))
    for member in map(axis.__getitem__, sorted(axis)):
        wanted = member(dense.old_logp, sampled, dense.mask)  # type: ignore[operator]
        found = member(holed.old_logp, spread(sampled), holed.mask)  # type: ignore[operator]
        of_tokens = found if found.shape[1] == 1 else found[:, PLACES]
        own = dense.mask if wanted.shape[1] > 1 else torch.ones_like(wanted, dtype=torch.bool)
        assert_close(of_tokens[own], wanted[own], rtol=0, atol=1e-12)
