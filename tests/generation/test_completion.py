from __future__ import annotations

import pytest

from trl_ext.generation.completion import entropy_estimates, mean_over_tokens


def test_estimate_is_the_mean_over_a_completions_tokens() -> None:
    assert entropy_estimates([[5, 6], [7]], [[-1.0, -2.0], [-0.5]]) == [1.5, 0.5]


@pytest.mark.parametrize(
    "logps", [None, [[-1.0, -2.0]], [[-1.0], [-1.0]], [[-1.0, None], [None]], [[-1.0, -1.0, -1.0], []]]
)
def test_without_a_log_probability_of_every_token_there_is_none(logps: list[list[float | None]] | None) -> None:
    assert entropy_estimates([[5, 6], [7]], logps)[0] is None


def test_an_empty_completion_has_none() -> None:
    assert entropy_estimates([[]], [[]]) == [None]


def test_mean_is_over_tokens_and_not_over_rows() -> None:
    rows = [
        {"tokens": 1, "entropy_estimate": 1.0}, {"tokens": 3, "entropy_estimate": 0.2},
        {"tokens": 99, "entropy_estimate": None}, {"tokens": 99},
    ]  # fmt: skip
    assert mean_over_tokens(rows) == pytest.approx(1.6 / 4)
    assert mean_over_tokens(rows[2:]) is None
