"""Contracts of every member of the table, with their exceptions; then values worked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trl_ext.algorithms.advantages import ADVANTAGES, for_training, total_reward

EVERY = sorted(ADVANTAGES)
NEEDS_NO_GROUP = {"raw", "group_mean"}
NO_BASELINE = {"raw"}  # the reward itself
ACROSS_GROUPS = {"batch_std"}  # scaled by the standard deviation of the whole batch
# pass_at_k asks only which rewards exceed a threshold; max_rl divides by the mean, so a constant dilutes it.
NOT_SHIFTABLE = {"raw", "max_rl", "pass_at_k"}
SCALE_FREE = {"group_std", "batch_std", "max_rl"}
CENTERED = set(EVERY) - {"raw"}

NAN = math.nan
REWARDS = torch.tensor(
    [[0.0, 1.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0, 0.25], [0.75, 0.75, 0.0, 1.5, 0.0]], dtype=torch.float64
)


def float64(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Contracts.


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantage_keeps_shape_and_dtype_and_rewards_unchanged(name: str, dtype: torch.dtype) -> None:
    given = REWARDS.to(dtype)
    before = given.clone()
    advantage = ADVANTAGES.build(name)(given)
    assert (advantage.shape, advantage.dtype) == (given.shape, dtype)
    assert_close(given, before, rtol=0, atol=0)
    advantage += 1  # nor do they share memory
    assert_close(given, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_moving_groups_or_completions_moves_their_advantages(name: str) -> None:
    advantage = ADVANTAGES.build(name)
    groups, completions = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 4, 0, 2])
    for moved in (lambda x: x[groups], lambda x: x[:, completions]):
        # sums in another order round differently
        assert_close(advantage(moved(REWARDS)), moved(advantage(REWARDS)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(EVERY) - ACROSS_GROUPS))
def test_a_group_does_not_see_the_others(name: str) -> None:
    advantage = ADVANTAGES.build(name)
    assert_close(advantage(REWARDS[1:2]), advantage(REWARDS)[1:2], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(CENTERED))
def test_a_group_sums_to_zero(name: str) -> None:
    assert_close(ADVANTAGES.build(name)(REWARDS).sum(dim=1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [4, 7, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, 10.1])
@pytest.mark.parametrize("name", sorted(set(EVERY) - NO_BASELINE))
def test_equal_rewards_teach_nothing(name: str, value: float, size: int) -> None:
    """In float32, as the trainer has them: rounding of the mean divided by eps must not become an advantage."""
    advantage = ADVANTAGES.build(name)(torch.full((3, size), value))
    assert advantage.abs().max().item() <= 1e-6 * max(1.0, value)


@pytest.mark.parametrize("name", sorted(set(EVERY) - NOT_SHIFTABLE))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    advantage = ADVANTAGES.build(name)
    assert_close(advantage(REWARDS + 3), advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(NOT_SHIFTABLE)))
def test_where_a_constant_matters_it_does(name: str) -> None:
    advantage = ADVANTAGES.build(name)
    assert (advantage(REWARDS + 3) - advantage(REWARDS)).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"pass_at_k"}))
def test_advantages_scale_with_rewards_unless_normalized(name: str) -> None:
    options = {"eps": 0.0} if name in SCALE_FREE else {}
    advantage = ADVANTAGES.build(name, **options)
    factor = 1.0 if name in SCALE_FREE else 7.0
    assert_close(advantage(7 * REWARDS), factor * advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_better_completion_of_a_group_has_no_smaller_advantage(name: str) -> None:
    advantage = ADVANTAGES.build(name)(REWARDS)
    for i, j in itertools.combinations(range(5), 2):
        assert ((REWARDS[:, i] - REWARDS[:, j]) * (advantage[:, i] - advantage[:, j]) >= 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_an_unscored_completion_is_left_out_of_every_statistic(name: str) -> None:
    """Its advantage is NaN, which the trainer turns into 0; the others are as if it had not been sampled."""
    advantage = ADVANTAGES.build(name)
    column = torch.full((3, 1), NAN, dtype=torch.float64)
    with_gap = advantage(torch.cat([REWARDS[:, :2], column, REWARDS[:, 2:]], dim=1))
    assert with_gap[:, 2].isnan().all()
    assert_close(with_gap[:, [0, 1, 3, 4, 5]], advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_group_that_nothing_scored_does_not_harm_the_others(name: str) -> None:
    advantage = ADVANTAGES.build(name)
    empty = torch.full((1, 5), NAN, dtype=torch.float64)
    result = advantage(torch.cat([REWARDS, empty]))
    assert result[3].isnan().all()
    assert_close(result[:3], advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
@pytest.mark.parametrize("name", EVERY)
def test_group_with_infinite_reward_has_no_advantage(name: str, infinity: float) -> None:
    if name == "max_rl" and infinity < 0:
        pytest.skip("it refuses negative rewards")
    reward = torch.cat([REWARDS, float64([[0.0, infinity, NAN, 1.0, 1.0]])])
    found = for_training(ADVANTAGES.build(name)(reward), reward)
    assert found[3].isnan().tolist() == [True, True, False, True, True]
    assert found[3, 2] == 0
    others = ADVANTAGES.build(name)(REWARDS)
    wanted = torch.full_like(others, NAN) if name in ACROSS_GROUPS else others
    assert_close(found[:3], wanted, rtol=0, atol=1e-12, equal_nan=True)


def test_only_what_no_function_scored_counts_as_unscored() -> None:
    per_func = float64([[1, NAN], [NAN, NAN], [math.inf, 1], [math.inf, -math.inf], [NAN, -math.inf], [2, 3]])
    found = total_reward(per_func, float64([[2, 1]])[0])
    assert_close(found, float64([[2, NAN, math.inf, math.inf, -math.inf, 7]])[0], equal_nan=True, rtol=0, atol=0)
    ignored = total_reward(per_func, float64([[0, 1]])[0])  # a weight of 0: logged only
    assert_close(ignored[2:4], float64([[1, -math.inf]])[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(EVERY) - NO_BASELINE))
def test_only_scored_completion_of_a_group_has_zero_advantage(name: str) -> None:
    reward = torch.cat([REWARDS, float64([[1.0, NAN, NAN, NAN, NAN]])])
    assert for_training(ADVANTAGES.build(name)(reward), reward)[3].eq(0).all()


@pytest.mark.parametrize("name", sorted(set(EVERY) - NEEDS_NO_GROUP))
def test_group_of_one_and_flat_tensor_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs at least 2 completions per prompt, got 1"):
        ADVANTAGES.build(name)(torch.ones(3, 1))
    with pytest.raises(ValueError, match=rf"{name} needs rewards of shape \(P, G\), got \(6,\)"):
        ADVANTAGES.build(name)(torch.ones(6))


# Values.

HALF = math.sqrt(2 / 3)  # std of 0 1 1 2 with Bessel's correction: sqrt((1 + 0 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("name", "options", "reward", "wanted"),
    [
        ("raw", {}, [[0, 1, -2, 0.5]], [[0, 1, -2, 0.5]]),
        ("group_mean", {}, [[0, 1, 1, 2], [4, 0, 0, 0]], [[-1, 0, 0, 1], [3, -1, -1, -1]]),
        ("group_mean", {}, [[5]], [[0]]),
        ("group_std", {"eps": 0.0}, [[0, 1, 1, 2]], [[-1 / HALF, 0, 0, 1 / HALF]]),
        # std of 0 2 with Bessel is sqrt 2, without it is 1; eps is added to it, outside the root
        ("group_std", {"eps": 0.5}, [[0, 2]], [[-1 / (math.sqrt(2) + 0.5), 1 / (math.sqrt(2) + 0.5)]]),
        # all of 0 2 4 6: mean 3, squares 9 1 1 9, sum 20, Bessel 20 / 3
        ("batch_std", {"eps": 0.0}, [[0, 2], [4, 6]], [[-((3 / 20) ** 0.5), (3 / 20) ** 0.5]] * 2),
        ("batch_std", {"eps": 1.0}, [[0, 2], [4, 6]], [[-1 / (1 + (20 / 3) ** 0.5), 1 / (1 + (20 / 3) ** 0.5)]] * 2),
        # each minus the mean of the other three
        ("leave_one_out", {}, [[1, 0, 0, 3]], [[0, -4 / 3, -4 / 3, 3 - 1 / 3]]),
        ("leave_one_out", {}, [[1, NAN, 0, 3]], [[-0.5, NAN, -2, 2.5]]),
        ("max_rl", {"eps": 0.0}, [[0, 1, 0, 1], [0, 0, 0, 1]], [[-1, 1, -1, 1], [-1, -1, -1, 3]]),
        ("max_rl", {"eps": 0.5}, [[0, 1, 0, 1], [0, 0, 0, 0]], [[-0.5, 0.5, -0.5, 0.5], [0, 0, 0, 0]]),
    ],
)
def test_values_by_hand(
    name: str, options: dict[str, float], reward: list[list[float]], wanted: list[list[float]]
) -> None:
    advantage = ADVANTAGES.build(name, **options)(float64(reward))
    assert_close(advantage, float64(wanted), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in EVERY if "eps" in ADVANTAGES.options(n)])
def test_the_default_eps_is_the_handouts(name: str) -> None:
    assert ADVANTAGES.options(name)["eps"] == 1e-6


def test_max_rl_refuses_a_negative_reward_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"max_rl needs rewards >= 0, got -0\.5"):
        ADVANTAGES.build("max_rl")(float64([[1.0, -0.5], [0.0, -0.25]]))


def pass_at_k_by_enumeration(right: list[bool], k: int) -> list[float]:
    """All sets of k completions: the set is rewarded if any of it is right, and a completion gets the mean
    standardized reward of the sets that it is in.
    """
    n = len(right)
    sets = list(itertools.combinations(range(n), k))
    reward = [float(any(right[i] for i in s)) for s in sets]
    mean = sum(reward) / len(sets)
    std = math.sqrt(sum((r - mean) ** 2 for r in reward) / len(sets))
    if std == 0:
        return [0.0] * n
    own = [[r for s, r in zip(sets, reward, strict=True) if i in s] for i in range(n)]
    return [(sum(mine) / len(mine) - mean) / std for mine in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k_completions(k: int) -> None:
    cases = [[i < right for i in range(5)] for right in range(6)]
    reward = torch.tensor(cases, dtype=torch.float64)
    wanted = float64([pass_at_k_by_enumeration(case, k) for case in cases])
    assert_close(ADVANTAGES.build("pass_at_k", k=k, eps=0.0)(reward).nan_to_num(nan=0.0), wanted, rtol=0, atol=1e-12)


def test_pass_at_k_by_hand() -> None:
    # 1 of 4 correct, k = 2: fail = (3 choose 2) / (4 choose 2) = 1/2, s = 1/2; next to an incorrect one, 1 of 3 draws is
    # correct, so it fails with 2/3: (1/2 - 2/3) / (1/2 + eps)
    advantage = ADVANTAGES.build("pass_at_k", k=2, eps=0.5)(float64([[1, 0, 0, 0]]))
    assert_close(advantage, float64([[0.5, -1 / 6, -1 / 6, -1 / 6]]), rtol=0, atol=1e-12)


def test_pass_at_k_counts_as_correct_what_exceeds_the_threshold() -> None:
    reward = float64([[0.5, 0.6, 0.2, 0.0]])
    default, lenient = ADVANTAGES.build("pass_at_k", k=1), ADVANTAGES.build("pass_at_k", k=1, threshold=0.1)
    assert (default(reward) > 0).tolist() == [[False, True, False, False]]
    assert (lenient(reward) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_a_k_that_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"needs 1 <= k <= 4 completions per prompt, got k={k}"):
        ADVANTAGES.build("pass_at_k", k=k)(torch.ones(2, 4))
