"""The rewards of a rollout: computed on all ranks, or an error on all of them; and what they mean for the log.

Letters: N completions of all ranks, K reward functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from trl_ext.ranks import is_of_gather, raise_everywhere
from trl_ext.rewards.guard import Guard, RewardError, merged_columns

log = logging.getLogger(__name__)


def guards_of(rewards: Sequence[object]) -> list[Guard]:
    """Of the reward functions that have one; reward models have none."""
    return [function.guard for function in rewards if hasattr(function, "guard")]


def score_on_all_ranks(
    score: Callable[[], Tensor], fault: Callable[[Tensor], Exception | None], unscored: Tensor
) -> Tensor:
    """The (N, K) rewards of `score`; an exception on one rank is raised on all ranks.

    Args:
        score: TRL's method, which gathers the ranks' rewards at its end.
        fault: returns an error if the gathered rewards are faulty as a whole.
        unscored: (this rank's rows, K), gathered after an exception, since the other ranks wait in `score`.
    """
    error: Exception | None = None
    try:
        rewards = score()
        error = fault(rewards)
    except Exception as raised:
        if is_of_gather(raised):
            raise
        error = raised
        rewards = gather(unscored)
    raise_everywhere(error, RewardError)
    return rewards


def fault_of_nan(rewards: Sequence[Guard], completions: int, in_a_row: int, tolerated: int) -> RewardError | None:
    """The error of a reward function that returned only NaN in a rollout that no other function scored.

    Args:
        in_a_row: rollouts without any reward, including this one.
        tolerated: the number of them at which the warning becomes an error.
    """
    at_fault = [reward for reward in rewards if reward.is_all_nan]
    if not (in_a_row and at_fault):
        return None
    fault = at_fault[0].fault(
        f"returned NaN for all {completions} completions, {in_a_row} rollouts in a row, and no "
        "other reward scored them; it has to return a number, or None for one that it cannot score"
    )
    if in_a_row >= tolerated:
        return fault
    log.warning("%s", fault)
    return None


def distinct_columns(rewards: Sequence[Guard], row: Collection[str], names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns that reward functions log, renamed where two or a reserved name collide.

    Args:
        row: the log's own columns.
        names: of all reward functions, which are columns of TRL's table.
    """
    taken = {*row, "rewards", "reward", "step", "completion", "advantage", *names}
    return merged_columns([(reward.name, reward.columns) for reward in rewards], taken)


def describe_nonfinite(advantages: Tensor, advantage: str | None, rewards: dict[str, Tensor]) -> str:
    """The cause of nonfinite advantages (N,) of a rollout; empty if all are finite.

    Args:
        advantage: the name of the advantage function.
        rewards: (N,) by the name of the reward function.
    """
    if advantages.isfinite().all():
        return ""
    named = {f"reward {name!r}": values.isinf() for name, values in rewards.items()}
    if not any(rows.any() for rows in named.values()):
        named = {f"advantage {advantage!r}": ~advantages.isfinite()}
    counts = [f"{name} is not finite for {int(rows.sum())}" for name, rows in named.items() if rows.any()]
    return f", because {' and '.join(counts)} of {len(advantages)} completions"


def correct_by_row(functions: Sequence[Guard], rewards: Tensor) -> Tensor:
    """(rows,) 1 for a correct response, 0 for an incorrect one, NaN for neither.

    By the first reward function that says so, with `Score`; if none does, rewards above 0 are correct.

    Args:
        rewards: (rows,) of this rank.
    """
    verdicts = next((function.correct for function in functions if function.correct is not None), None)
    if verdicts is None:
        return (rewards > 0).float()
    return rewards.new_tensor([torch.nan if verdict is None else float(verdict) for verdict in verdicts])
