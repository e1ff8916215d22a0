from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs
from trl_ext.algorithms.sampler_correction import SAMPLER_CORRECTIONS

EVERY = sorted(SAMPLER_CORRECTIONS)
NO_LIMIT = {"clip_min": None, "clip_max": None}


def case(off_policy: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    x = loss_inputs(off_policy)
    return x.logp.detach(), x.old_logp, x.mask


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


@pytest.mark.parametrize("name", EVERY)
def test_a_sampler_that_agrees_has_weight_one_everywhere(name: str) -> None:
    logp, _, mask = case()
    weight = SAMPLER_CORRECTIONS.build(name)(logp, logp, mask)
    assert (weight == 1).all()


@pytest.mark.parametrize("name", EVERY)
def test_sampler_weight_shape_is_per_token_or_sequence_as_named(name: str) -> None:
    logp, sampler, mask = case()
    wanted = logp.shape if name.startswith("token_") else (len(logp), 1)
    assert SAMPLER_CORRECTIONS.build(name)(logp, sampler, mask).shape == wanted


@pytest.mark.parametrize("name", EVERY)
def test_token_masked_or_without_sampler_logp_counts_as_agreeing(name: str) -> None:
    logp, sampler, mask = case()
    correct = SAMPLER_CORRECTIONS.build(name, **NO_LIMIT)
    unknown, poisoned = sampler.clone(), sampler.masked_fill(~mask, math.inf)
    unknown[0, 1] = math.nan
    agreeing = sampler.clone()
    agreeing[0, 1] = logp[0, 1]
    assert_close(correct(logp, unknown, mask), correct(logp, agreeing, mask), rtol=0, atol=0)
    assert_close(correct(logp, poisoned, mask), correct(logp, sampler, mask), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_without_limits_the_weight_is_the_plain_ratio(name: str) -> None:
    logp, sampler, mask = case()
    log_ratio = (logp - sampler) * mask
    wanted = log_ratio.exp() if name.startswith("token_") else log_ratio.sum(dim=1, keepdim=True).exp()
    assert_close(SAMPLER_CORRECTIONS.build(name, **NO_LIMIT)(logp, sampler, mask), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_by_default_a_weight_is_at_most_three_and_never_raised(name: str) -> None:
    assert SAMPLER_CORRECTIONS.options(name) == {"clip_min": None, "clip_max": 3.0}


# Trainer / sampler per token: 4, 1/2, and a masked 100; of the sequence: 2. Second row 1/2, 1/2: 1/4.
TRAINER = logs([[0.8, 0.1, 1.0], [0.1, 0.1, 1.0]])
SAMPLER = logs([[0.2, 0.2, 0.01], [0.2, 0.2, 0.01]])
MASK = torch.tensor([[True, True, False]] * 2)


@pytest.mark.parametrize(
    ("name", "low", "high", "wanted"),
    [
        ("token_truncate", None, 3.0, [[3, 0.5, 1], [0.5, 0.5, 1]]),
        ("token_truncate", 0.75, 3.0, [[3, 0.75, 1], [0.75, 0.75, 1]]),
        ("token_truncate", 0.75, None, [[4, 0.75, 1], [0.75, 0.75, 1]]),
        ("token_mask", None, 3.0, [[0, 0.5, 1], [0.5, 0.5, 1]]),
        ("token_mask", 0.75, 3.0, [[0, 0, 1], [0, 0, 1]]),
        ("token_mask", 0.75, None, [[4, 0, 1], [0, 0, 1]]),
        ("sequence_truncate", None, 1.5, [[1.5], [0.25]]),
        ("sequence_truncate", 0.5, 3.0, [[2], [0.5]]),
        ("sequence_mask", None, 1.5, [[0], [0.25]]),
        ("sequence_mask", 0.5, 3.0, [[2], [0]]),
    ],
)
def test_values_by_hand(name: str, low: float | None, high: float | None, wanted: list[list[float]]) -> None:
    weight = SAMPLER_CORRECTIONS.build(name, clip_min=low, clip_max=high)(TRAINER, SAMPLER, MASK)
    assert_close(weight, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_weight_on_the_limit_is_inside(name: str) -> None:
    logp = torch.tensor([[math.log(2)]], dtype=torch.float64)
    ratio = logp.exp().item()
    correct = SAMPLER_CORRECTIONS.build(name, clip_min=ratio, clip_max=ratio)
    assert correct(logp, torch.zeros_like(logp), torch.ones(1, 1, dtype=torch.bool)).item() == ratio
