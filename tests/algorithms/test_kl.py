from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from tests.support.cases import loss_inputs
from trl_ext.algorithms.kl import KL_ESTIMATORS

EVERY = sorted(KL_ESTIMATORS)
NEVER_NEGATIVE = {"k2", "k3"}
UNBIASED = {"k1", "k3"}

# A policy and a reference over three tokens, whose KL can be summed.
LOGP = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
REF = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
KL = 0.5 * math.log(5 / 4) + 0.3 * math.log(3 / 4)


@pytest.mark.parametrize("name", EVERY)
def test_kl_estimator_is_per_token_and_zero_for_equal_policies(name: str) -> None:
    x = loss_inputs()
    kl = KL_ESTIMATORS.build(name)
    assert (kl(x.logp, x.old_logp).shape, kl(x.logp, x.old_logp).dtype) == (x.logp.shape, torch.float64)
    assert kl(x.logp, x.old_logp).abs().min() > 0
    assert kl(x.logp, x.logp.detach()).abs().max() == 0


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_is_the_derivative(name: str) -> None:
    x = loss_inputs()
    assert torch.autograd.gradcheck(lambda logp: KL_ESTIMATORS.build(name)(logp, x.old_logp), (x.logp,))


@pytest.mark.parametrize("name", sorted(UNBIASED))
def test_the_mean_over_the_policy_is_the_divergence(name: str) -> None:
    assert (LOGP.exp() * KL_ESTIMATORS.build(name)(LOGP, REF)).sum().item() == pytest.approx(KL, abs=1e-12)


@pytest.mark.parametrize("name", sorted(NEVER_NEGATIVE))
def test_it_is_never_negative_in_float32_either(name: str) -> None:
    log_ratio = torch.linspace(-20, 20, 4001)
    assert (KL_ESTIMATORS.build(name)(log_ratio, torch.zeros_like(log_ratio)) >= 0).all()
    # near 0 a difference of exponentials would lose its digits: k3 is d^2 / 2 there, to a relative d / 3
    small = torch.tensor([1e-5, -1e-5])
    assert_close(KL_ESTIMATORS.build(name)(small, torch.zeros(2)), small**2 / 2, rtol=0.15, atol=0)


@pytest.mark.parametrize(
    ("name", "logp", "ref", "value", "slope"),
    [
        ("k1", -1.0, -2.0, 1.0, 1.0),
        ("k1", -2.0, -1.0, -1.0, 1.0),
        ("k2", -1.0, -3.0, 2.0, 2.0),
        ("k2", -3.0, -1.0, 2.0, -2.0),
        ("k3", -1.0, -2.0, math.exp(-1), 1 - math.exp(-1)),  # e^-1 - 1 + 1
        ("k3", -2.0, -1.0, math.e - 2, 1 - math.e),
    ],
)
def test_values_by_hand(name: str, logp: float, ref: float, value: float, slope: float) -> None:
    x = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS.build(name)(x, torch.tensor([[ref]], dtype=torch.float64))
    assert kl.item() == pytest.approx(value, abs=1e-12)
    assert torch.autograd.grad(kl.sum(), x)[0].item() == pytest.approx(slope, abs=1e-12)
