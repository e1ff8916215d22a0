"""`Rollout`: the scored completions of one call of TRL's scoring, their rows for the log, and metrics next to TRL's.

Letters: N completions of all ranks, M of this rank, R reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext.rewards.hooks import completion_text
from trl_ext.training.state import to_plain


@dataclass(frozen=True)
class Rollout:
    """Scored completions, of training or of an evaluation.

    Attributes:
        rewards: (N, R), NaN where a function did not score the completion.
        reward: (N,) weighted sums of `rewards`.
        finished: (M,) bool, whether the model ended the completion.
        offset: position of this rank's first completion among the N.
    """

    rewards: Tensor
    reward: Tensor
    finished: Tensor
    offset: int

    def own(self, values: Tensor) -> Tensor:
        """(N, ...) values of all ranks -> (M, ...) of this rank."""
        return values[self.offset : self.offset + len(self.finished)]

    def complete(
        self, rows: Sequence[dict[str, Any]], columns: Mapping[str, Sequence[object]], reward_names: Sequence[str]
    ) -> None:
        """Add the rewards and the columns that reward functions have logged to this rank's M rows of the log."""
        for column, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                row[column] = to_plain(value)
        for row, rewards, reward in zip(rows, self.own(self.rewards), self.own(self.reward), strict=True):
            row["rewards"] = dict(zip(reward_names, rewards.tolist(), strict=True))
            row["reward"] = reward.item()


def log_rows(
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[object],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Completions as they are logged, without their rewards; the arguments are TRL's, one value per completion."""
    return [
        {
            "prompt": prompt,
            "response": completion_text(completion),
            "ground_truth": row.get("answer"),
            "tokens": len(ids),
            "token_entropy": None,  # set for rows that are trained on
        }
        for prompt, completion, row, ids in zip(prompts, completions, inputs, completion_ids, strict=True)
    ]


def truncation(finished: Tensor, lengths: Tensor, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """TRL's truncation metrics, with completions that ended at a stop string counted as finished.

    Args:
        finished: (M,) bool.
        lengths: (M,) in tokens.
        gather: concatenates the ranks' values.
    """
    finished = gather(finished)
    ended = gather(lengths)[finished]
    found = {"completions/clipped_ratio": 1 - finished.float().mean().item()}
    for name in ("mean", "min", "max"):
        found[f"completions/{name}_terminated_length"] = getattr(ended, name)().item() if len(ended) else 0.0
    return found


def lengths_by_outcome(lengths: Tensor, correct: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Mean lengths of correct and of incorrect responses; without any, the metric is left out.

    Args:
        lengths: (M,) in tokens.
        correct: (M,) 1, 0, or NaN for neither.
        reduce: sums over the ranks.
    """
    outcomes = {"correct": correct == 1, "incorrect": correct == 0}
    sums = torch.stack([torch.stack([(lengths * rows).sum(), rows.sum()]) for rows in outcomes.values()])  # (2, 2)
    means = zip(outcomes, reduce(sums).tolist(), strict=True)
    return {f"completions/mean_length_{name}": total / count for name, (total, count) in means if count}
