"""The loss of my_loss.py by hand: `pytest` in the folder of both files, in seconds and without a model."""

import math

import pytest
import torch
from my_loss import soft_clip

from trl_ext import LossInputs


def inputs(*ratios: float, advantage: float) -> LossInputs:
    """One completion, a token for each ratio of the new to the old probability."""
    logp = torch.tensor([ratios]).log().requires_grad_()  # (B, T)
    mask = torch.ones_like(logp, dtype=torch.bool)
    return LossInputs(logp, torch.zeros_like(logp), torch.tensor([[advantage]]), mask)


def test_on_policy_it_is_the_policy_gradient() -> None:
    x = inputs(1.0, 1.0, advantage=2.0)
    token_loss = soft_clip(x)
    token_loss.loss.sum().backward()
    assert token_loss.loss.tolist() == [[-2.0, -2.0]]
    assert x.logp.grad is not None
    assert x.logp.grad.tolist() == [[-2.0, -2.0]]  # -A, for any width


@pytest.mark.parametrize("width", [0.2, 0.5])
def test_off_policy_the_gradient_fades_as_the_formula_says(width: float) -> None:
    x = inputs(1.5, 0.75, advantage=1.0)
    soft_clip(x, width=width).loss.sum().backward()
    # d/dlogp of -(1 + w tanh((r - 1) / w)) is -r / cosh((r - 1) / w)^2
    slopes = [-r / math.cosh((r - 1) / width) ** 2 for r in (1.5, 0.75)]
    assert x.logp.grad is not None
    assert x.logp.grad.tolist()[0] == pytest.approx(slopes)
