"""`StepPlanner`: the micro-batches of each optimizer step on the current rollout, as `batching` cuts them.

TRL cuts a rollout into equal slices, as its rows come and as wide as the widest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device

from trl_ext.grpo.batching import Batch, Batching, joined


class StepPlanner:
    """A rollout's slices in, one micro-batch per turn out. An optimizer step's idle turns come first.

    The last turn always computes a micro-batch, since the backends reduce gradients there.

    Args:
        accumulation: turns of an optimizer step.
        slices: of a rollout, as TRL cuts it; a multiple of `accumulation`.
        agree: this rank's number of micro-batches to the largest over all ranks.
    """

    def __init__(self, batching: Batching, accumulation: int, slices: int, agree: Callable[[int], int]) -> None:
        self.batching, self.accumulation, self.slices, self.agree = batching, accumulation, slices, agree
        self.plans: list[list[Batch]] = []  # per optimizer step on the current rollout: its micro-batches

    def plan(self, rollout: Sequence[Batch]) -> None:
        """Cut a new rollout of this rank; a collective operation."""
        windows = [rollout[start : start + self.accumulation] for start in range(0, self.slices, self.accumulation)]
        self.plans = [self.batching.plan(joined(window), self.agree) for window in windows]

    def micro_batch(self, step: int) -> Batch | None:
        """What the turn number `step` of the run computes; None where it has nothing to do."""
        plan = self.plans[step % self.slices // self.accumulation]
        idle_turns = self.accumulation - len(plan)
        turn = step % self.accumulation
        return None if turn < idle_turns else plan[turn - idle_turns]

    def rows_trained(self, step: int) -> int:
        """Rows of this rank that the optimizer step of the turn number `step` trains on."""
        plan = self.plans[step % self.slices // self.accumulation]
        return sum(len(batch["row"]) for batch in plan if "row" in batch)

    def after_a_step(self, again: bool) -> Iterator[Batch]:
        """The micro-batches that are trained on when the policy has changed since the rollout.

        Args:
            again: the rollout is trained on several times, and so the first step's are among them.
        """
        return itertools.chain(*self.plans[0 if again else 1 :])

    def state_dict(self) -> dict[str, Any]:
        """What the rollout does not have: old log-probabilities that were computed on these micro-batches."""
        return {"old_log_probs": [[batch.get("old_per_token_logps") for batch in plan] for plan in self.plans]}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take `state_dict` back, after `plan` on the same rollout."""
        for plan, olds in zip(self.plans, send_to_device(state["old_log_probs"], device), strict=True):
            for batch, old in zip(plan, olds, strict=True):
                if old is not None:
                    batch["old_per_token_logps"] = old
