"""Contracts of every selection, then values by hand, and the optimum that `max_variance` claims to be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trl_ext.algorithms.selection import SELECTIONS, rewards_differ

EVERY = sorted(SELECTIONS)
BY_PLACE = {"max_variance", "shortest", "token_efficiency"}  # these have `keep`
NAN = math.nan
REWARDS = torch.tensor([[0.0, 1.0, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0], [0.25, 0.0, 1.0, 0.6]])
LENGTHS = torch.tensor([[3.0, 9.0, 4.0, 7.0], [5.0, 2.0, 8.0, 6.0], [1.0, 6.0, 4.0, 2.0]])


def selection(name: str, **options: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A member by name, of rewards and lengths; what is correct follows from the reward."""
    function = SELECTIONS.build(name, **options)

    def select(reward: Tensor, lengths: Tensor = LENGTHS) -> Tensor:
        inputs = {"lengths": lengths, "truncated": lengths > 6, "correct": (reward >= 1).to(reward.dtype)}
        inputs["correct"] = inputs["correct"].masked_fill(reward.isnan(), NAN)
        return function(reward, **{asked: inputs[asked] for asked in SELECTIONS.inputs_of(function)})

    return select


@pytest.mark.parametrize("name", EVERY)
def test_it_says_of_every_completion_whether_it_is_kept(name: str) -> None:
    before = REWARDS.clone()
    kept = selection(name)(REWARDS)
    assert (kept.dtype, kept.shape) == (torch.bool, REWARDS.shape)
    assert kept[0].any()
    assert torch.equal(REWARDS, before)


@pytest.mark.parametrize("name", EVERY)
def test_moving_groups_or_completions_moves_what_is_kept(name: str) -> None:
    select = selection(name, **({"keep": 3} if name in BY_PLACE else {}))
    for places in itertools.permutations(range(4)):
        assert torch.equal(select(REWARDS[:, places], LENGTHS[:, places]), select(REWARDS)[:, places])
    assert torch.equal(select(REWARDS.flip(0), LENGTHS.flip(0)), select(REWARDS).flip(0))
    assert torch.equal(select(REWARDS[:1], LENGTHS[:1]), select(REWARDS)[:1])  # a group does not see the others


@pytest.mark.parametrize("name", EVERY)
def test_an_unscored_completion_is_never_kept(name: str) -> None:
    reward = torch.tensor([[NAN, 1.0, 0.0, 0.5], [NAN, NAN, NAN, NAN]])
    kept = selection(name)(reward, LENGTHS[:2])
    assert kept[0].tolist() == [False, True, True, True]
    assert not kept[1].any()
    if name in BY_PLACE:
        assert selection(name, keep=2)(reward, LENGTHS[:2]).sum(dim=1).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("mixed_groups", {}, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]),
        # standard deviations 0.740, 0 and 0.376
        ("reward_variance", {}, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]),
        ("reward_variance", {"min_std": 0.4}, [[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ("reward_variance", {"min_std": 0.37}, [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]),
        # 0 and 2; then 0, 0.5 and 2 (variance 0.722) rather than 0, 1 and 2 (0.667)
        ("max_variance", {"keep": 2}, [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]),
        ("max_variance", {"keep": 3}, [[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]),
        ("shortest", {"keep": 1}, [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]),
        ("shortest", {"keep": 3}, [[1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 1, 1]]),
        # rewards per token 0, 1/9, 1/2, 1/14; 1/5, 1/2, 1/8, 1/6; 1/4, 0, 1/4, 3/10
        ("token_efficiency", {"keep": 1}, [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]),
        ("token_efficiency", {"keep": 2}, [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]),  # of equals, the first
    ],
)
def test_values_by_hand(name: str, options: dict[str, float], wanted: list[list[int]]) -> None:
    assert selection(name, **options)(REWARDS).int().tolist() == wanted


@pytest.mark.parametrize("keep", [2, 3, 4, 5, 6])
def test_no_other_set_of_a_group_varies_more(keep: int) -> None:
    """Of all sets of that size, some of the highest with the rest of the lowest vary most."""
    reward = torch.rand(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reward[20:] = (reward[20:] * 3).floor()  # with ties
    reward = reward[rewards_differ(reward)]
    kept = SELECTIONS.build("max_variance", keep=keep)(reward)
    assert kept.sum(dim=1).tolist() == [keep] * len(reward)
    sets = [list(places) for places in itertools.combinations(range(6), keep)]
    best = torch.stack([reward[:, places].var(dim=1, correction=0) for places in sets]).amax(dim=0)
    found = torch.stack([row[chosen].var(correction=0) for row, chosen in zip(reward, kept, strict=True)])
    torch.testing.assert_close(found, best, rtol=0, atol=1e-12)


def test_the_most_varying_are_of_those_that_are_scored() -> None:
    reward = torch.tensor([[NAN, 1.0, 0.0, 0.5]])
    assert SELECTIONS.build("max_variance", keep=2)(reward).tolist() == [[False, True, True, False]]


def test_a_penalty_does_not_make_a_solved_group_mixed() -> None:
    reward, correct = torch.tensor([[1.0, 0.7], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    mixed = SELECTIONS["mixed_groups"]
    assert mixed(reward, correct=correct).any(dim=1).tolist() == [False, True]
    unknown = torch.full_like(correct, NAN)
    assert mixed(reward, correct=unknown).any(dim=1).tolist() == [True, True]


def test_rewards_differ_where_any_two_scored_ones_do() -> None:
    reward = torch.tensor([[1.0, 1.0], [1.0, 2.0], [NAN, 1.0], [NAN, NAN]])
    assert rewards_differ(reward).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("name", "keep"), [*itertools.product(sorted(BY_PLACE), [0, 5]), ("max_variance", 1)])
def test_more_than_a_group_has_cannot_be_kept(name: str, keep: int) -> None:
    least = 2 if name == "max_variance" else 1  # one reward does not vary: nothing would be trained on
    with pytest.raises(ValueError, match=f"{name} needs {least} <= keep <= 4 completions per prompt, got keep={keep}"):
        selection(name, keep=keep)(REWARDS)
