"""Decoding steps by hand: an engine's continuous batch, HF's shrinking one, and the lengths of a rollout."""

from __future__ import annotations

import pytest

from trl_ext.tools.estimate.costs.rollouts import continuous_batch, shrinking_batch, spread_lengths


@pytest.mark.parametrize(("n", "mean", "longest"), [(64, 95, 256), (64, 400, 1024), (8, 900, 1024), (1, 7, 20)])
def test_lengths_have_their_mean_and_their_longest(n: int, mean: float, longest: int) -> None:
    found = spread_lengths(n, mean, longest)
    assert found.shape == (n,)
    assert found.mean() == pytest.approx(mean, rel=0.01)
    assert 1 <= found.min() <= found.max() <= longest
    assert (found == spread_lengths(n, mean, longest)).all()


def test_prompts_of_one_length_are_all_that_long() -> None:
    assert spread_lengths(5, 64, 64).tolist() == [64] * 5


def test_a_mean_above_the_longest_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean length of 30 tokens does not lie between 1 and the longest, 20"):
        spread_lengths(4, 30, 20)


def test_a_row_that_ends_makes_room_for_the_next() -> None:
    # slots: 1 and 3 tokens; the third row, of 2, begins at step 1 in the place of the first
    found = continuous_batch([1, 3, 2], [10, 20, 30], slots=2)
    assert found.rows.tolist() == [2, 2, 2]
    assert found.keys.tolist() == [11 + 21, 22 + 31, 23 + 32]
    assert found.starts == 2


def test_rows_without_a_successor_leave_the_batch_thinner() -> None:
    found = continuous_batch([1, 3], [10, 20], slots=8)
    assert found.rows.tolist() == [2, 1, 1]
    assert found.keys.tolist() == [11 + 21, 22, 23]


def test_hf_computes_ended_rows_until_they_are_half() -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    found = shrinking_batch(lengths, [10] * 8, size=8)
    # after step 4 half of 8 have ended and 4 are left, which is too few to shrink again
    assert found.rows.tolist() == [8] * 4 + [4] * 4
    assert found.keys.tolist() == [8 * (10 + s) for s in range(1, 5)] + [4 * (10 + s) for s in range(5, 9)]
    assert found.starts == 1


def test_hf_pads_prompts_and_takes_a_batch_after_the_other() -> None:
    found = shrinking_batch([2, 2, 1], [3, 5, 4], size=2)
    assert found.rows.tolist() == [2, 2, 1]
    assert found.keys.tolist() == [2 * 6, 2 * 7, 5]
    assert found.starts == 2
