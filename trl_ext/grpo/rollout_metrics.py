"""Metrics of a rollout next to TRL's, from this rank's rows.

Letters: N completions of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def truncation(finished: Tensor, lengths: Tensor, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """TRL's truncation metrics, with completions that ended at a stop string as finished.

    Args:
        finished: (N,) bool.
        lengths: (N,) in tokens.
        gather: over the ranks.
    """
    finished = gather(finished)
    ended = gather(lengths)[finished]
    found = {"completions/clipped_ratio": 1 - finished.float().mean().item()}
    for name in ("mean", "min", "max"):
        found[f"completions/{name}_terminated_length"] = getattr(ended, name)().item() if len(ended) else 0.0
    return found


def lengths_by_outcome(lengths: Tensor, correct: Tensor, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Mean response length of correct and of incorrect responses; without any there is no metric.

    Args:
        lengths: (N,) in tokens.
        correct: (N,) 1, 0, or NaN for neither.
        reduce: the sum over the ranks.
    """
    outcomes = {"correct": correct == 1, "incorrect": correct == 0}
    sums = torch.stack([torch.stack([(lengths * rows).sum(), rows.sum()]) for rows in outcomes.values()])  # (2, 2)
    means = zip(outcomes, reduce(sums).tolist(), strict=True)
    return {f"completions/mean_length_{name}": total / count for name, (total, count) in means if count}


def replace_last(logged: Any, values: list[float]) -> None:
    """Put `values` where as many have just been appended to a bounded queue."""
    for _ in range(min(len(values), len(logged))):
        logged.pop()
    logged.extend(values)
