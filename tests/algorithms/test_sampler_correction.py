"""The two axes of the sampler's mismatch apart, together as TRL's modes, and against the length of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.cases import loss_inputs
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS, SamplerCorrection, trl_mode
from trl_ext.registry import UnknownName

Member = Callable[[Tensor, Tensor, Tensor], Tensor]
EVERY = [(SAMPLER_WEIGHTS, name) for name in sorted(SAMPLER_WEIGHTS)] + [
    (SAMPLER_REJECTIONS, name) for name in sorted(SAMPLER_REJECTIONS)
]
IDS = [f"{table.kind.split()[1]}_{name}" for table, name in EVERY]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def case(off_policy: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    x = loss_inputs(off_policy)
    return x.logp.detach(), x.old_logp, x.mask


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def of_trl(mode: str, low: float | None, high: float | None) -> SamplerCorrection:
    weight, rejection = trl_mode(mode, low, high)
    return SamplerCorrection(
        SAMPLER_WEIGHTS.build(weight[0], **weight[1]), SAMPLER_REJECTIONS.build(rejection[0], **rejection[1])
    )


@pytest.mark.parametrize(("table", "name"), EVERY, ids=IDS)
def test_a_sampler_that_agrees_is_neither_weighted_nor_rejected(table: dict[str, Member], name: str) -> None:
    logp, _, mask = case()
    assert (table[name](logp, logp, mask) == 1).all()


@pytest.mark.parametrize(("table", "name"), EVERY, ids=IDS)
def test_shape_and_type_are_as_the_name_says(table: dict[str, Member], name: str) -> None:
    logp, sampler, mask = case()
    found = table[name](logp, sampler, mask)
    assert found.shape == (logp.shape if name.startswith("token") else (len(logp), 1))
    assert found.dtype == (torch.bool if table is SAMPLER_REJECTIONS else torch.float64)


@pytest.mark.parametrize(("table", "name"), EVERY, ids=IDS)
def test_token_masked_or_without_sampler_logp_counts_as_agreeing(table: dict[str, Member], name: str) -> None:
    logp, sampler, mask = case()
    unknown, poisoned = sampler.clone(), sampler.masked_fill(~mask, math.inf)
    unknown[0, 1] = math.nan
    agreeing = sampler.clone()
    agreeing[0, 1] = logp[0, 1]
    assert_close(table[name](logp, unknown, mask), table[name](logp, agreeing, mask), rtol=0, atol=0)
    assert_close(table[name](logp, poisoned, mask), table[name](logp, sampler, mask), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_without_limits_the_weight_is_the_plain_ratio(name: str) -> None:
    logp, sampler, mask = case()
    log_ratio = (logp - sampler) * mask
    wanted = log_ratio.exp() if name == "token" else log_ratio.sum(dim=1, keepdim=True).exp()
    assert_close(SAMPLER_WEIGHTS.build(name, clip_max=None)(logp, sampler, mask), wanted, rtol=0, atol=1e-12)


# Trainer / sampler per token: 4, 1/2, and a masked 100; of the sequence: 2, in the mean sqrt 2. Second row 1/2, 1/2:
# 1/4, in the mean 1/2. r - 1 - log r: 3 - log 4 = 1.61 and log 2 - 1/2 = 0.193.
TRAINER = logs([[0.8, 0.1, 1.0], [0.1, 0.1, 1.0]])
SAMPLER = logs([[0.2, 0.2, 0.01], [0.2, 0.2, 0.01]])
MASK = torch.tensor([[True, True, False]] * 2)


@pytest.mark.parametrize(
    ("mode", "low", "high", "wanted"),
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
def test_trls_modes_by_hand(mode: str, low: float | None, high: float | None, wanted: list[list[float]]) -> None:
    weight = of_trl(mode, low, high)(TRAINER, SAMPLER, MASK)
    assert_close(weight, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("unweighted", {}, [[1], [1]]),
        ("token", {}, [[2, 0.5, 1], [0.5, 0.5, 1]]),  # 4 and a masked 100 cut to 2
        ("token", {"clip_min": 0.75, "clip_max": 5.0}, [[4, 0.75, 1], [0.75, 0.75, 1]]),
        ("sequence", {"clip_max": 1.5}, [[1.5], [0.25]]),  # 4 / 2 and 1 / 2 / 2
        ("sequence", {"clip_min": 0.5}, [[2], [0.5]]),
    ],
)
def test_weights_by_hand(name: str, options: dict[str, float], wanted: list[list[float]]) -> None:
    weight = SAMPLER_WEIGHTS.build(name, **options)(TRAINER, SAMPLER, MASK)
    assert_close(weight, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("keep_all", {}, [[1], [1]]),
        ("token_ratio", {}, [[1, 1, 1], [1, 1, 1]]),
        ("token_ratio", {"low": 0.6, "high": 3.0}, [[0, 0, 1], [0, 0, 1]]),
        ("sequence_ratio", {"high": 1.9}, [[0], [1]]),
        ("sequence_ratio", {"low": 0.3}, [[1], [0]]),
        ("sequence_mean_ratio", {"low": None, "high": 1.5}, [[1], [1]]),
        ("sequence_mean_ratio", {"low": 0.6, "high": 1.4}, [[0], [0]]),
        ("token_k3", {"threshold": 0.2}, [[0, 1, 1], [1, 1, 1]]),
        ("token_k3", {"threshold": 0.19}, [[0, 0, 1], [0, 0, 1]]),
        ("sequence_mean_k3", {"threshold": 0.9}, [[0], [1]]),  # (1.614 + 0.193) / 2 = 0.903
        ("sequence_mean_k3", {"threshold": 0.91}, [[1], [1]]),
    ],
)
def test_rejections_by_hand(name: str, options: dict[str, float], wanted: list[list[int]]) -> None:
    kept = SAMPLER_REJECTIONS.build(name, **options)(TRAINER, SAMPLER, MASK)
    assert kept.int().tolist() == wanted


@pytest.mark.parametrize("mode", MODES)
def test_a_ratio_on_the_limit_is_inside(mode: str) -> None:
    logp = torch.tensor([[math.log(2)]], dtype=torch.float64)
    ratio = logp.exp().item()
    assert of_trl(mode, ratio, ratio)(logp, torch.zeros_like(logp), torch.ones(1, 1, dtype=torch.bool)).item() == ratio


def test_a_mode_that_trl_does_not_have_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown value of vllm_importance_sampling_mode 'token_cut'"):
        trl_mode("token_cut", None, 3.0)


def test_a_rejection_goes_without_a_weight() -> None:
    rejection = SAMPLER_REJECTIONS.build("token_k3", threshold=0.2)
    alone = SamplerCorrection(SAMPLER_WEIGHTS["unweighted"], rejection)
    assert alone(TRAINER, SAMPLER, MASK).tolist() == [[0, 1, 1], [1, 1, 1]]
    correction = SamplerCorrection(SAMPLER_WEIGHTS["sequence"], rejection)
    wanted = torch.tensor([[0, 2, 2], [0.25] * 3], dtype=torch.float64)
    assert_close(correction(TRAINER, SAMPLER, MASK), wanted, rtol=0, atol=1e-12)


def test_a_bound_on_the_product_rejects_long_sequences() -> None:
    """The same mismatch at every token, +-0.05: a product of 600 of them drifts, their mean does not."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4] * 500 + [600] * 500)
    mask = torch.arange(600) < lengths[:, None]
    difference = 0.1 * torch.randn(1000, 600, generator=generator, dtype=torch.float64)
    kept = {
        name: SAMPLER_REJECTIONS.build(name, **options)(difference, torch.zeros_like(difference), mask).float().view(2, -1)
        for name, options in {
            "sequence_ratio": {}, "sequence_mean_ratio": {"low": 0.8, "high": 1.25}, "sequence_mean_k3": {"threshold": 0.02}
        }.items()
    }  # fmt: skip
    short, long = zip(*(fractions.mean(dim=1).tolist() for fractions in kept.values()), strict=True)
    assert short[0] == 1.0
    assert long[0] < 0.7  # P(N(0, 0.1 sqrt 600) < log 3) = 0.67
    assert min(*short[1:], *long[1:]) > 0.95
