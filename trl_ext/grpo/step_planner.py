"""`StepPlanner`: the micro-batches of each optimizer step on the current rollout, as `batching` makes them.

TRL cuts a rollout into equal slices, in the order of its rows and padded to the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device

from trl_ext.grpo.batching import Batch, Batching, concatenate


class StepPlanner:
    """Maps each `training_step` call to a micro-batch. If a step has fewer than calls, its first calls are no-ops.

    The last call always computes a micro-batch, since the backends reduce gradients there.

    Args:
        accumulation: calls per optimizer step.
        slices: TRL's slices per rollout; a multiple of `accumulation`.
        max_over_ranks: maps this rank's number of micro-batches to the maximum over all ranks.
    """

    def __init__(
        self, batching: Batching, accumulation: int, slices: int, max_over_ranks: Callable[[int], int]
    ) -> None:
        self.batching, self.accumulation, self.slices = batching, accumulation, slices
        self.max_over_ranks = max_over_ranks
        self.plans: list[list[Batch]] = []  # micro-batches of each optimizer step on the current rollout

    def plan(self, rollout: Sequence[Batch]) -> None:
        """Plan the steps on a new rollout of this rank; a collective operation."""
        windows = [rollout[start : start + self.accumulation] for start in range(0, self.slices, self.accumulation)]
        self.plans = [self.batching.plan(concatenate(window), self.max_over_ranks) for window in windows]

    def micro_batch(self, step: int) -> Batch | None:
        """The micro-batch of the `step`-th `training_step` call of the run; None if the call is a no-op."""
        plan = self.plans[step % self.slices // self.accumulation]
        place = step % self.accumulation - (self.accumulation - len(plan))
        return None if place < 0 else plan[place]

    def rows_trained(self, step: int) -> int:
        """Number of this rank's rows that the optimizer step of the `step`-th call trains on."""
        plan = self.plans[step % self.slices // self.accumulation]
        return sum(len(batch["row"]) for batch in plan if "row" in batch)

    def off_policy_batches(self, several_epochs: bool) -> Iterator[Batch]:
        """The micro-batches that are trained on after the policy has changed since the rollout.

        Args:
            several_epochs: over the rollout, which make the first step's micro-batches off-policy as well.
        """
        return itertools.chain(*self.plans[0 if several_epochs else 1 :])

    def state_dict(self) -> dict[str, Any]:
        """Old log-probabilities computed on these micro-batches; the rest follows from the rollout."""
        return {"old_log_probs": [[batch.get("old_per_token_logps") for batch in plan] for plan in self.plans]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict`, after `plan` on the same rollout."""
        for plan, olds in zip(self.plans, send_to_device(state["old_log_probs"], device), strict=True):
            for batch, old in zip(plan, olds, strict=True):
                if old is not None:
                    batch["old_per_token_logps"] = old
