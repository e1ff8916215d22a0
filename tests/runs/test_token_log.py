"""What the log tells about single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from trl_ext.algorithms.types import LossInputs
from trl_ext.runs.token_log import TokenLog

ADVANTAGE = torch.tensor([[1.5], [-1.5]])
PER_TOKEN = torch.tensor([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])


def decode(ids: Sequence[int]) -> str:
    return "".join("abcdef"[n] for n in ids)


def kept(
    log: TokenLog, step: int, rows: list[int], advantage: Tensor = ADVANTAGE, sampled: Tensor | None = None
) -> None:
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    logp = torch.tensor([[-0.123456, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log.keep(step, torch.tensor(rows), ids, LossInputs(logp, logp.detach() - 1, advantage, mask), sampled, -logp)


def test_a_row_tells_its_trained_tokens_with_rounded_values() -> None:
    log = TokenLog(decode)
    kept(log, 0, [7, 2])
    assert log.of_row(7) == {
        "per_token": {
            "text": ["a", "b"], "advantage": 1.5, "logp": [-0.1235, -2.0], "sampled_logp": [-1.1235, -3.0],
            "entropy": [0.1235, 2.0],
        }
    }  # fmt: skip
    assert log.of_row(2)["per_token"]["text"] == ["d"]
    assert log.of_row(2)["per_token"]["advantage"] == -1.5
    assert log.of_row(0) == {}


def test_the_engines_log_probabilities_are_the_samplers() -> None:
    log = TokenLog(decode)
    kept(log, 0, [0, 1], sampled=torch.full((2, 3), -0.5))
    assert log.of_row(0)["per_token"]["sampled_logp"] == [-0.5, -0.5]


def test_advantages_per_token_are_a_list_where_they_differ() -> None:
    log = TokenLog(decode)
    kept(log, 0, [0, 1], PER_TOKEN)
    assert log.of_row(0)["per_token"]["advantage"] == [1.0, 2.0]
    assert log.of_row(1)["per_token"]["advantage"] == 3.0


def test_micro_batches_of_a_step_add_up_and_the_next_replaces() -> None:
    log = TokenLog(decode)
    kept(log, 4, [0, 1])
    kept(log, 4, [2, 3])
    assert all(log.of_row(row) for row in range(4))
    kept(log, 5, [1, 4])
    assert [bool(log.of_row(row)) for row in range(5)] == [False, True, False, False, True]


@pytest.mark.parametrize("step", [0, 1])
def test_nothing_that_is_kept_holds_the_graph(step: int) -> None:
    log = TokenLog(decode)
    kept(log, step, [0, 1])
    (batch, _), *_ = log._places.values()
    assert not any(value.requires_grad for value in batch.values.values())
