"""Contracts of every member of the table, with their exceptions; then values worked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from trl_ext.algorithms.advantages import ADVANTAGES, for_training, total_reward

TOKEN_LEVEL = {"discounted", "turn_returns"}  # (P, G, T), tested below
EVERY = sorted(set(ADVANTAGES) - TOKEN_LEVEL)
NEEDS_NO_GROUP = {"raw", "zero", "group_mean", "w_reinforce", "reinforce_plus_plus"}
NO_BASELINE = {"raw", "w_reinforce"}
NO_GROUP_BASELINE = {*NO_BASELINE, "reinforce_plus_plus"}
# scaled by the standard deviation of the whole batch
ACROSS_GROUPS = {"batch_std", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
# Three ask which rewards exceed a threshold; max_rl divides by the mean, so a constant dilutes it.
NOT_SHIFTABLE = {"raw", "max_rl", "pass_at_k", "w_reinforce", "length_reward"}
SCALE_FREE = {"group_std", "max_rl", *ACROSS_GROUPS}
BY_THRESHOLD = {"pass_at_k", "w_reinforce", "length_reward"}  # the last by what is correct, here above 0.5
# opo's baseline is not the mean; pkpo's advantages are never negative
CENTERED = set(EVERY) - {*NO_GROUP_BASELINE, "opo", "pkpo"}

NAN = math.nan
REWARDS = torch.tensor(
    [[0.0, 1.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0, 0.25], [0.75, 0.75, 0.0, 1.5, 0.0]], dtype=torch.float64
)


def member(name: str, **options: float) -> Callable[[Tensor], Tensor]:
    """An advantage by name, whose further inputs follow from the rewards: one reward function, lengths by reward."""
    function = ADVANTAGES.build(name, **options)

    def advantage(reward: Tensor) -> Tensor:
        # Of a group's rewards in order, so that moving completions moves their lengths, and a constant changes none.
        below = reward[:, :, None] > reward[:, None, :] if reward.ndim == 2 else reward[:, None] > reward
        inputs = {"rewards": reward[..., None], "weights": reward.new_ones(1), "lengths": 3.0 + below.sum(dim=-1)}
        inputs["correct"] = (reward > 0.5).to(reward.dtype)
        return function(reward, **{name: inputs[name] for name in ADVANTAGES.inputs_of(function)})

    return advantage


def float64(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Contracts.


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_advantage_keeps_shape_and_dtype_and_rewards_unchanged(name: str, dtype: torch.dtype) -> None:
    given = REWARDS.to(dtype)
    before = given.clone()
    advantage = member(name)(given)
    assert (advantage.shape, advantage.dtype) == (given.shape, dtype)
    assert_close(given, before, rtol=0, atol=0)
    advantage += 1  # nor do they share memory
    assert_close(given, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_moving_groups_or_completions_moves_their_advantages(name: str) -> None:
    advantage = member(name)
    groups, completions = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 4, 0, 2])
    for moved in (lambda x: x[groups], lambda x: x[:, completions]):
        # sums in another order round differently
        assert_close(advantage(moved(REWARDS)), moved(advantage(REWARDS)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(EVERY) - ACROSS_GROUPS))
def test_a_group_does_not_see_the_others(name: str) -> None:
    advantage = member(name)
    assert_close(advantage(REWARDS[1:2]), advantage(REWARDS)[1:2], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(CENTERED))
def test_a_group_sums_to_zero(name: str) -> None:
    assert_close(member(name)(REWARDS).sum(dim=1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(EVERY) - NO_BASELINE))
def test_equal_rewards_teach_nothing(name: str) -> None:
    """In float32, as the trainer has them: rounding of the mean divided by eps must not become an advantage."""
    for size, value in itertools.product((4, 7, 8), (0.0, 1.0, 0.1, 0.7, 10.1)):
        advantage = member(name)(torch.full((3, size), value))
        assert advantage.abs().max().item() <= 1e-6 * max(1.0, value), (size, value)


@pytest.mark.parametrize("name", sorted(set(EVERY) - NOT_SHIFTABLE))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    advantage = member(name)
    assert_close(advantage(REWARDS + 3), advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(NOT_SHIFTABLE)))
def test_where_a_constant_matters_it_does(name: str) -> None:
    advantage = member(name)
    assert (advantage(REWARDS + 3) - advantage(REWARDS)).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(set(EVERY) - BY_THRESHOLD))
def test_advantages_scale_with_rewards_unless_normalized(name: str) -> None:
    options = {"eps": 0.0} if name in SCALE_FREE else {}
    advantage = member(name, **options)
    factor = 1.0 if name in SCALE_FREE else 7.0
    assert_close(advantage(7 * REWARDS), factor * advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_better_completion_of_a_group_has_no_smaller_advantage(name: str) -> None:
    advantage = member(name)(REWARDS)
    for i, j in itertools.combinations(range(5), 2):
        assert ((REWARDS[:, i] - REWARDS[:, j]) * (advantage[:, i] - advantage[:, j]) >= 0).all()


@pytest.mark.parametrize("name", EVERY)
def test_an_unscored_completion_is_left_out_of_every_statistic(name: str) -> None:
    """Its advantage is NaN, which the trainer turns into 0; the others are as if it had not been sampled."""
    advantage = member(name)
    column = torch.full((3, 1), NAN, dtype=torch.float64)
    with_gap = advantage(torch.cat([REWARDS[:, :2], column, REWARDS[:, 2:]], dim=1))
    assert with_gap[:, 2].isnan().all()
    assert_close(with_gap[:, [0, 1, 3, 4, 5]], advantage(REWARDS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_a_group_that_nothing_scored_does_not_harm_the_others(name: str) -> None:
    advantage = member(name)
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
    found = for_training(member(name)(reward), reward)
    assert found[3].isnan().tolist() == [True, True, False, True, True]
    assert found[3, 2] == 0
    others = member(name)(REWARDS)
    wanted = torch.full_like(others, NAN) if name in ACROSS_GROUPS else others
    assert_close(found[:3], wanted, rtol=0, atol=1e-12, equal_nan=True)


def test_only_what_no_function_scored_counts_as_unscored() -> None:
    per_func = float64([[1, NAN], [NAN, NAN], [math.inf, 1], [math.inf, -math.inf], [NAN, -math.inf], [2, 3]])
    found = total_reward(per_func, float64([[2, 1]])[0])
    assert_close(found, float64([[2, NAN, math.inf, math.inf, -math.inf, 7]])[0], equal_nan=True, rtol=0, atol=0)
    ignored = total_reward(per_func, float64([[0, 1]])[0])  # a weight of 0: logged only
    assert_close(ignored[2:4], float64([[1, -math.inf]])[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(set(EVERY) - NO_GROUP_BASELINE))
def test_only_scored_completion_of_a_group_has_zero_advantage(name: str) -> None:
    reward = torch.cat([REWARDS, float64([[1.0, NAN, NAN, NAN, NAN]])])
    assert for_training(member(name)(reward), reward)[3].eq(0).all()


@pytest.mark.parametrize("name", sorted(set(EVERY) - NEEDS_NO_GROUP))
def test_group_of_one_and_flat_tensor_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs at least 2 completions per prompt, got 1"):
        member(name)(torch.ones(3, 1))
    with pytest.raises(ValueError, match=rf"{name} needs rewards of shape \(P, G\), got \(6,\)"):
        member(name)(torch.ones(6))


# Values.

BOTH = 1 + math.sqrt(4 / 3)
OF_ALL = math.sqrt(20 / 3)
HALF = math.sqrt(2 / 3)  # std of 0 1 1 2 with Bessel's correction: sqrt((1 + 0 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("name", "options", "reward", "wanted"),
    [
        ("raw", {}, [[0, 1, -2, 0.5]], [[0, 1, -2, 0.5]]),
        ("zero", {}, [[0, 1, NAN, 0.5]], [[0, 0, NAN, 0]]),
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
        # all of -1 1 -1 1 around the groups' means: squares 1 1 1 1, Bessel 4 / 3
        ("reinforce_plus_plus_baseline", {"eps": 0.0}, [[0, 2], [4, 6]], [[-(0.75**0.5), 0.75**0.5]] * 2),
        ("reinforce_plus_plus_baseline", {"eps": 1.0}, [[0, 2], [4, 6]], [[-1 / BOTH, 1 / BOTH]] * 2),
        # all of 0 2 4 6: mean 3, std sqrt(20 / 3)
        ("reinforce_plus_plus", {"eps": 0.0}, [[0, 2], [4, 6]], [[-3 / OF_ALL, -1 / OF_ALL], [1 / OF_ALL, 3 / OF_ALL]]),
        ("w_reinforce", {}, [[0, 1, 0.6, 0.5, NAN]], [[-1, 0.1, 0.1, -1, NAN]]),
        ("w_reinforce", {"positive_weight": 1.0, "threshold": 0.9}, [[0, 1, 0.6, NAN]], [[-1, 1, -1, NAN]]),
        # lengths 3, 4, 5 in the order of the rewards: (0 * 3 + 1 * 4 + 3 * 5) / 12
        ("opo", {}, [[0, 1, 3]], [[-19 / 12, 1 - 19 / 12, 3 - 19 / 12]]),
        # lengths 3, 4, 5: 1/2, 0, -1/2, the first of which is incorrect: rewards 0, 1, 5/2
        ("length_reward", {}, [[0, 1, 3]], [[-7 / 6, 1 - 7 / 6, 2.5 - 7 / 6]]),
        ("length_reward", {"weight": 0.5}, [[1, NAN, 3]], [[-0.75, NAN, 0.75]]),  # 1 + 1/4 and 3 - 1/4
        # pairs of 0, 1, 3: only the better one of each counts, by how much it is better: 1 - 0; 3 - 0 and 3 - 1
        ("pkpo", {"k": 2}, [[1, 0, 3]], [[1 / 3, 0, 5 / 3]]),
        ("pkpo", {"k": 3}, [[1, 0, 3, NAN]], [[0, 0, 2, NAN]]),
        ("pkpo", {"k": 3}, [[1, 0, NAN, NAN]], [[0, 0, NAN, NAN]]),  # no set of three
        ("max_rl", {"eps": 0.0}, [[0, 1, 0, 1], [0, 0, 0, 1]], [[-1, 1, -1, 1], [-1, -1, -1, 3]]),
        ("max_rl", {"eps": 0.5}, [[0, 1, 0, 1], [0, 0, 0, 0]], [[-0.5, 0.5, -0.5, 0.5], [0, 0, 0, 0]]),
    ],
)
def test_values_by_hand(
    name: str, options: dict[str, float], reward: list[list[float]], wanted: list[list[float]]
) -> None:
    advantage = member(name, **options)(float64(reward))
    assert_close(advantage, float64(wanted), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in EVERY if "eps" in ADVANTAGES.options(n)])
def test_the_default_eps_is_the_handouts(name: str) -> None:
    assert ADVANTAGES.options(name)["eps"] == 1e-6


def test_max_rl_refuses_a_negative_reward_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"max_rl needs rewards >= 0, got -0\.5"):
        member("max_rl")(float64([[1.0, -0.5], [0.0, -0.25]]))


def pass_at_k_by_enumeration(right: list[bool], k: int, eps: float = 0.0) -> list[float]:
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
    return [(sum(mine) / len(mine) - mean) / (std + eps) for mine in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_sets_of_k_completions(k: int) -> None:
    cases = [[i < right for i in range(5)] for right in range(6)]
    reward = torch.tensor(cases, dtype=torch.float64)
    wanted = float64([pass_at_k_by_enumeration(case, k) for case in cases])
    assert_close(member("pass_at_k", k=k, eps=0.0)(reward).nan_to_num(nan=0.0), wanted, rtol=0, atol=1e-12)


def test_pass_at_k_by_hand() -> None:
    # 1 of 4 correct, k = 2: fail = (3 choose 2) / (4 choose 2) = 1/2, s = 1/2; next to an incorrect one, 1 of 3 draws is
    # correct, so it fails with 2/3: (1/2 - 2/3) / (1/2 + eps)
    advantage = member("pass_at_k", k=2, eps=0.5)(float64([[1, 0, 0, 0]]))
    assert_close(advantage, float64([[0.5, -1 / 6, -1 / 6, -1 / 6]]), rtol=0, atol=1e-12)


def test_pass_at_k_counts_as_correct_what_exceeds_the_threshold() -> None:
    reward = float64([[0.5, 0.6, 0.2, 0.0]])
    default, lenient = member("pass_at_k", k=1), member("pass_at_k", k=1, threshold=0.1)
    assert (default(reward) > 0).tolist() == [[False, True, False, False]]
    assert (lenient(reward) > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_refuses_a_k_that_cannot_be_drawn(k: int) -> None:
    with pytest.raises(ValueError, match=f"needs 1 <= k <= 4 completions per prompt, got k={k}"):
        member("pass_at_k", k=k)(torch.ones(2, 4))


def pkpo_by_enumeration(rewards: list[float], k: int) -> list[float]:
    """All sets of k completions, counted where a completion is in the set: by how much it raises the set's best."""
    n = len(rewards)
    sets = list(itertools.combinations(range(n), k))
    gains = [
        [max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in sets if i in s] for i in range(n)
    ]
    return [sum(mine) / len(sets) for mine in gains]


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pkpo_is_the_mean_over_all_sets_of_k_completions(k: int) -> None:
    reward = torch.cat([REWARDS, float64([[-1.5, 0.25, 2.0, -0.5, 0.75]])])
    wanted = float64([pkpo_by_enumeration(row, k) for row in reward.tolist()])
    assert_close(member("pkpo", k=k)(reward), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 5])
def test_pkpo_refuses_a_k_without_another_draw(k: int) -> None:
    with pytest.raises(ValueError, match=f"pkpo needs 2 <= k <= 4 completions per prompt, got k={k}"):
        member("pkpo", k=k)(torch.ones(2, 4))


def test_gdpo_normalizes_each_reward_and_then_the_batch() -> None:
    """(1, 2) and (1, 3): rewards 0 1 | 0 0 of the first function, 0 10 | 10 0 of the second with weight 1/2.

    Each function's pair is -1, 1 over sqrt 2 by group; the sums are -1.5, 1.5 | 0.5, -0.5 over sqrt 2, whose Bessel
    variance is (2.25 + 2.25 + 0.25 + 0.25) / 2 / 3 = 5 / 6.
    """
    rewards = torch.stack([float64([[0, 1], [0, 0]]), float64([[0, 10], [10, 0]])], dim=2)
    weights = float64([[1, 0.5]])[0]
    total = (rewards * weights).sum(dim=2)
    found = ADVANTAGES.build("gdpo", eps=1e-12)(total, rewards=rewards, weights=weights)
    scale = math.sqrt(2) * math.sqrt(5 / 6)
    assert_close(found, float64([[-1.5, 1.5], [0.5, -0.5]]) / scale, rtol=0, atol=1e-9)


def test_gdpo_counts_what_the_functions_scored() -> None:
    rewards = float64([[[0, NAN], [1, NAN], [NAN, NAN]], [[1, 0], [0, 1], [0, 0]]])
    total = total_reward(rewards.flatten(0, 1), float64([[1, 1]])[0]).view(2, 3)
    found = ADVANTAGES.build("gdpo")(total, rewards=rewards, weights=float64([[1, 1]])[0])
    assert found.isnan().tolist() == [[False, False, True], [False] * 3]
    assert found[0, 1] == -found[0, 0] > 0


def test_opo_weighs_the_baseline_by_length() -> None:
    reward, lengths = float64([[1, 0, 0], [1, NAN, 0]]), float64([[10, 20, 30], [5, 100, 15]])
    found = ADVANTAGES.build("opo")(reward, lengths=lengths)
    assert_close(found, float64([[5 / 6, -1 / 6, -1 / 6], [3 / 4, NAN, -1 / 4]]), rtol=0, atol=1e-12, equal_nan=True)


def test_length_reward_is_for_correct_completions_only() -> None:
    """Lengths 10, 20, 30: 1/2, 0, -1/2; at most 0 where incorrect or unknown. All of one length: none."""
    lengths = float64([[10, 20, 30], [10, 20, 30], [10, 20, 30], [7, 7, 7], [10, 20, 90], [10, 20, 2]])
    correct = float64([[1, 1, 1], [0, 0, 1], [NAN, 1, 0], [1, 0, 0], *[[1, 0, NAN]] * 2])
    reward = float64([[1, 1, 1], [0, 0, 1], [0, 1, 0], [1, 0, 0], *[[1, 0, NAN]] * 2])
    found = ADVANTAGES.build("length_reward")(reward, lengths=lengths, correct=correct)
    shaped = float64([[1.5, 1, 0.5], [0, 0, 0.5], [0, 1, -0.5], [1, 0, 0], *[[1.5, -0.5, NAN]] * 2])
    assert_close(found, shaped - shaped.nanmean(dim=1, keepdim=True), rtol=0, atol=1e-12, equal_nan=True)


def test_discounted_gives_the_last_token_the_most() -> None:
    # means 1/2; lengths 3 and 1: gamma^2, gamma, 1 and 1, 0, 0
    found = ADVANTAGES.build("discounted", gamma=0.5)(float64([[1, 0]]), lengths=float64([[3, 1]]))
    assert found.tolist() == [[[0.125, 0.25, 0.5], [-0.5, 0.0, 0.0]]]
    plain = ADVANTAGES.build("discounted", gamma=1.0)(REWARDS, lengths=torch.full_like(REWARDS, 4.0))
    assert_close(plain, member("group_mean")(REWARDS)[:, :, None].expand(3, 5, 4), rtol=0, atol=0)


def test_returns_of_turns_are_of_a_turn_and_those_after_it() -> None:
    lengths, rewards = torch.tensor([[[2, 1], [3, 0]]]), float64([[[0.5, 0.0], [0.0, 0.0]]])
    found = ADVANTAGES.build("turn_returns", eps=0.0)(float64([[1, 0]]), turn_lengths=lengths, turn_rewards=rewards)
    # 1/2 and 1 for the turns of the first, 0 for the second's only one: mean 1/2, standard deviation 1/2
    assert found.tolist() == [[[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]]]
    later = ADVANTAGES.build("turn_returns", eps=0.0)(float64([[0, 1]]), turn_lengths=lengths, turn_rewards=-rewards)
    # -1/2, 0 and 1: mean 1/6, centered -2/3, -1/6, 5/6; the last token has what the last turn has
    std = (7 / 12) ** 0.5
    assert_close(later[0, 0], float64([-5 / 6 / std, -5 / 6 / std, -1 / 6 / std]), rtol=0, atol=1e-12)
    assert_close(later[0, 1], float64([5 / 6 / std] * 3), rtol=0, atol=1e-12)


def test_with_one_turn_each_they_are_those_of_the_group() -> None:
    lengths = 2 + torch.arange(15).view(3, 5) % 7
    turns = {"turn_lengths": lengths[..., None], "turn_rewards": torch.zeros(3, 5, 1)}
    found = ADVANTAGES["turn_returns"](REWARDS, **turns)
    is_token = torch.arange(found.shape[2]) < lengths[..., None]
    whole = member("group_std")(REWARDS).nan_to_num(0.0)[..., None]
    assert_close(found, torch.where(is_token, whole, 0.0), rtol=0, atol=1e-12)


def test_discounted_moves_with_its_groups_and_completions() -> None:
    lengths, discounted = 2.0 + torch.arange(15, dtype=torch.float64).view(3, 5) % 7, ADVANTAGES["discounted"]
    places = (torch.tensor([2, 0, 1])[:, None], torch.tensor([3, 1, 4, 0, 2]))
    moved = discounted(REWARDS[places], lengths=lengths[places])
    assert_close(moved, discounted(REWARDS, lengths=lengths)[places], rtol=0, atol=1e-12)
    alone = discounted(REWARDS[1:2], lengths=lengths[1:2])
    assert_close(alone, discounted(REWARDS, lengths=lengths)[1:2, :, : alone.shape[2]], rtol=0, atol=0)


def test_an_advantage_per_token_is_masked_by_completion() -> None:
    reward = float64([[1, NAN, 0], [1, math.inf, 0]])
    found = for_training(ADVANTAGES.build("discounted")(reward, lengths=torch.full_like(reward, 2.0)), reward)
    assert found.shape == (2, 3, 2)
    assert found[0].isnan().sum() == 0
    assert found[0, 1].eq(0).all()
    assert found[1].isnan().all()
