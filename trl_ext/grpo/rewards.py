"""The rewards of a rollout: scored on all ranks or an error on all of them, and named where they are not finite.

Letters: N completions of all ranks, R reward functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from trl_ext.ranks import is_of_gather, raise_everywhere
from trl_ext.rewards.guard import Guard, RewardError, merged_columns

log = logging.getLogger(__name__)


def scored_on_all_ranks(
    score: Callable[[], Tensor], fault: Callable[[Tensor], Exception | None], unscored: Tensor
) -> Tensor:
    """The (N, R) rewards of `score`; what a reward function or model raises on one rank is raised on all.

    Args:
        score: TRL's, which gathers the ranks' rewards at its end.
        fault: what is wrong with them all together, if anything.
        unscored: (this rank's rows, R), gathered in place of rewards where there are none: the others wait in `score`.

    Raises:
        RewardError: on another rank than this one.
    """
    error: Exception | None = None
    try:
        per_func = score()
        error = fault(per_func)
    except Exception as raised:
        if is_of_gather(raised):
            raise
        error = raised
        per_func = gather(unscored)
    raise_everywhere(error, RewardError)
    return per_func


def fault_of_nan(rewards: Sequence[Guard], completions: int, in_a_row: int, borne: int) -> RewardError | None:
    """The fault of a reward function that scored nothing by NaN in a rollout that no other one scored either.

    Args:
        in_a_row: rollouts without any reward, this one included.
        borne: with fewer of them it is a warning.
    """
    at_fault = [reward for reward in rewards if reward.is_all_nan]
    if not (in_a_row and at_fault):
        return None
    fault = at_fault[0].fault(
        f"returned NaN for all {completions} completions, {in_a_row} rollouts in a row, and no "
        "other reward scored them; it has to return a number, or None for one that it cannot score"
    )
    if in_a_row >= borne:
        return fault
    log.warning("%s", fault)
    return None


def columns_apart(rewards: Sequence[Guard], row: dict[str, Any], names: Sequence[str]) -> dict[str, list[Any]]:
    """What the reward functions log, no column under the name of another's, of a row's own or of TRL's table.

    Args:
        row: of the log of rollouts.
        names: of all reward functions.
    """
    taken = {*row, "rewards", "reward", "step", "completion", "advantage", *names}
    return merged_columns([(reward.name, reward.columns) for reward in rewards], taken)


def why_not_finite(advantages: Tensor, advantage: str | None, rewards: dict[str, Tensor]) -> str:
    """Where the advantages (N,) of a rollout that are not finite come from; nothing where all of them are.

    Args:
        advantage: its name.
        rewards: (N,) by the reward function's name.
    """
    if advantages.isfinite().all():
        return ""
    named = {f"reward {name!r}": values.isinf() for name, values in rewards.items()}
    if not any(rows.any() for rows in named.values()):
        named = {f"advantage {advantage!r}": ~advantages.isfinite()}
    counts = [f"{name} is not finite for {int(rows.sum())}" for name, rows in named.items() if rows.any()]
    return f", because {' and '.join(counts)} of {len(advantages)} completions"


def correct_by_row(logged: Sequence[Any] | None, rewards: Tensor) -> Tensor:
    """(rows,) 1 for a correct response, 0 for an incorrect one, NaN for neither.

    Args:
        logged: what a reward function logs as `correct`, None for neither; or nothing, and a reward above 0 is correct.
        rewards: (rows,) of this rank.
    """
    if not logged:
        return (rewards > 0).float().cpu()
    return torch.tensor([torch.nan if value is None else float(bool(value)) for value in logged])
