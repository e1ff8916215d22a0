"""A graph under autocast that keeps weights and not their copies has the same gradients (its memory: tests of the estimate)."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn

from trl_ext.compat import weight_casts
from trl_ext.compat.weight_casts import casts_made_again


def gradients(model: nn.Module, again: bool) -> list[Tensor]:
    """Of the input and the weights, and the output."""
    torch.manual_seed(0)
    given = torch.randn(3, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), casts_made_again() if again else contextlib.nullcontext():
        output = model(given)
    return [output, *torch.autograd.grad(output.float().square().sum(), [given, *model.parameters()])]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_bit_identical(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32, bias=bias), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 16, bias=bias))
    plain = gradients(model, again=False)
    made: list[nn.Parameter] = []
    unpack = weight_casts._unpack
    monkeypatch.setattr(
        weight_casts, "_unpack", lambda kept: made.append(getattr(kept, "weight", None)) or unpack(kept)
    )
    for one, other in zip(plain, gradients(model, again=True), strict=True):
        assert torch.equal(one, other)
    weights = [model[0].weight, model[3].weight]
    assert {id(weight) for weight in weights} <= {id(weight) for weight in made}


def test_what_is_no_copy_of_a_weight_is_kept_as_it_is() -> None:
    """A product of casts of an activation; its own output, which must not keep itself alive."""
    given = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), casts_made_again():
        product = (given * 2) @ (given * 3)
        output = product.float().sigmoid()
    (found,) = torch.autograd.grad(output.sum(), given)
    with torch.autocast("cpu", torch.bfloat16):
        expected = ((given * 2) @ (given * 3)).float().sigmoid()
    assert torch.equal(found, torch.autograd.grad(expected.sum(), given)[0])


def test_a_weight_whose_values_are_taken_away_is_kept_itself() -> None:
    """As ZeRO-3 does between the passes."""
    weight, given = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2, requires_grad=True)
    with casts_made_again():
        output = given * weight
    values = weight.data
    weight.data = torch.empty(0)
    weight.data = values * 3
    (found,) = torch.autograd.grad(output.sum(), given)
    assert found.tolist() == [[6.0, 6.0]]
