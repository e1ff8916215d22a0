"""Every member of every axis on a device apart from the host: its tensors are made there, and none is in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.devices import WithoutFloat64, on_a_device, without_kernel
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.distillation import DISTILLATIONS, is_divergence
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.algorithms.types import LossInputs, StepTokens, StepTotals
from trl_ext.registry import Registry

P, G, T = 2, 4, 5  # prompts, completions of each, tokens
B = P * G


def rand(device: str, *shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float32).to(device)


def mask(device: str) -> Tensor:
    return torch.ones(B, T, dtype=torch.bool).to(device)


def objective(device: str, loss: str = "ppo_clip", aggregation: str = "sequence_mean", kl: str = "k3") -> None:
    """A member of the step's axes, with the others', forward and backward."""
    x = LossInputs(-rand(device, B, T).requires_grad_(), -rand(device, B, T), rand(device, B, 1), mask(device))
    leaf = x.logp.detach().requires_grad_()
    x = LossInputs(leaf, x.old_logp, x.advantage, x.mask)
    given = {name: -rand(device, B, T) for name in ("ref_logp", "sampled_logp", "sampler_weight", "divergence")}
    group, step = torch.arange(B).to(device), StepTokens.of(x)
    whole = Objective(POLICY_LOSSES[loss], AGGREGATIONS[aggregation], KL_ESTIMATORS[kl], 0.1, off_policy_threshold=0.5)
    totals = StepTotals(float(B), float(B * T), 10.0)
    whole(x, totals, entropy=rand(device, B, T), group=group, step=step, **given)[0].backward()
    assert leaf.grad is not None
    assert (leaf.grad.dtype, leaf.grad.device.type) == (torch.float32, device)


def of_rewards(device: str, table: Registry, name: str) -> None:
    """An advantage or a selection, with all that it may ask for."""
    reward, turns = rand(device, P, G), torch.ones(P, G, 2, dtype=torch.long).to(device)
    known = {
        "rewards": rand(device, P, G, 2), "weights": rand(device, 2), "lengths": 3 * torch.ones_like(reward),
        "truncated": torch.zeros_like(reward), "correct": rand(device, P, G).round(), "turn_lengths": turns,
        "turn_rewards": rand(device, P, G, 2),
    }  # fmt: skip
    found = table[name](reward, **{asked: known[asked] for asked in table.inputs_of(table[name])})
    assert found.device.type == device


def of_tokens(device: str, table: Registry, name: str) -> None:
    """A sampler's weight or rejection, or what is learned from a teacher."""
    if table is DISTILLATIONS and is_divergence(table[name]):
        found = table[name](rand(device, B, T, 3).log(), rand(device, B, T, 3).log())
    else:
        found = table[name](-rand(device, B, T), -rand(device, B, T), mask(device))
    assert found.device.type == device


CASES: dict[str, tuple[Registry, Callable[..., None]]] = {
    "policy_loss": (POLICY_LOSSES, lambda device, _, name: objective(device, loss=name)),
    "aggregation": (AGGREGATIONS, lambda device, _, name: objective(device, aggregation=name)),
    "kl_estimator": (KL_ESTIMATORS, lambda device, _, name: objective(device, kl=name)),
    "advantage": (ADVANTAGES, of_rewards),
    "rollout_selection": (SELECTIONS, of_rewards),
    "sampler_weight": (SAMPLER_WEIGHTS, of_tokens),
    "sampler_rejection": (SAMPLER_REJECTIONS, of_tokens),
    "distillation": (DISTILLATIONS, of_tokens),
}


@pytest.mark.moderate
@pytest.mark.parametrize(
    "axis", [pytest.param(axis, marks=[pytest.mark.slow] * (axis == "policy_loss")) for axis in CASES]
)
def test_no_member_needs_float64_or_the_host(axis: str) -> None:
    table, case = CASES[axis]
    for name in table:
        with on_a_device() as device:
            case(device, table, name)
        with WithoutFloat64():  # with values, which decide what is computed
            case("cpu", table, name)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: x.sum(dtype=torch.float64), "float64"),
        (lambda x: torch.tensor([1.0], dtype=torch.float64).to(x.device), "float64"),
        (lambda x: x + torch.ones(3), "expected device"),
        (lambda x: x.mode(), "not currently implemented for the MPS device"),
    ],
)
def test_the_device_refuses_what_apples_does(fault: Callable[[Tensor], Any], said: str) -> None:
    with on_a_device() as device, pytest.raises((TypeError, RuntimeError), match=said):
        fault(torch.ones(3, device=device))


def test_a_number_of_float64_may_stay_on_the_host() -> None:
    with on_a_device() as device:
        assert (torch.ones(3, device=device) * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32
    assert {"mode", "heaviside"} <= without_kernel()
    assert not {"exp", "cumsum", "add.Tensor", "multinomial"} & without_kernel()
