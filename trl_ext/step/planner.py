"""`StepPlanner`: the micro-batches of each optimizer step on the current rollout, as `batching` makes them.

TRL cuts a rollout into equal slices, in the order of its rows and padded to the longest. `savings` decides which of
them are computed otherwise, `MicroBatch.log_probs` computes those.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, send_to_device
from torch import Tensor, nn

from trl_ext.step.batching import Batching
from trl_ext.step.micro_batch import MicroBatch
from trl_ext.step.rows import Rows, TRLBatch

log = logging.getLogger(__name__)


class StepPlanner:
    """Maps each `training_step` call to its micro-batches.

    The last call always computes one, since the backends reduce gradients there. If a step has fewer micro-batches than
    calls, its first calls are no-ops; if it has more, its first call computes several.

    Args:
        accumulation: calls per optimizer step.
        slices: TRL's per rollout, a multiple of `accumulation`.
        accelerator: of the ranks, which agree on the number of micro-batches.
    """

    def __init__(self, batching: Batching, accumulation: int, slices: int, accelerator: Accelerator) -> None:
        self.batching, self.accumulation, self.slices, self.accelerator = batching, accumulation, slices, accelerator
        self.plans: list[list[MicroBatch]] = []  # of each optimizer step on the current rollout
        self._has_said_longer = False

    def plan(self, rollout: Sequence[TRLBatch]) -> None:
        """Plan the steps on a new rollout of this rank, which TRL has shuffled and cut; a collective operation."""
        rows = [Rows.of_trl(batch) for batch in rollout]
        windows = [rows[start : start + self.accumulation] for start in range(0, self.slices, self.accumulation)]
        self.plans = [self.batching.plan(Rows.joined(window), self._max_over_ranks) for window in windows]
        if self.batching.tokens and not self._has_said_longer:
            self._say_longer(self.batching.tokens)

    def _max_over_ranks(self, counts: list[int]) -> list[int]:
        """Elementwise, in one collective: as many as any rank has, at most one per row and one more."""
        most, device = self.accumulation * self.batching.rows + 1, self.accelerator.device
        own = torch.tensor([counts + [0] * (most - len(counts))], dtype=torch.int32, device=device)
        maxima = self.accelerator.gather(own).amax(dim=0).tolist()
        return list(maxima[: max(len(counts), *(place + 1 for place, n in enumerate(maxima) if n), 1)])

    def _say_longer(self, limit: int) -> None:
        """Say once that a row alone is longer than a micro-batch may be."""
        rows = [one.rows for plan in self.plans for one in plan]
        longest = int(max((one.prompt_mask.sum(dim=1) + one.completion_mask.sum(dim=1)).max() for one in rows))
        if longest > limit:
            self._has_said_longer = True
            log.warning(
                "micro_batch_tokens=%d: a row has %d tokens, and is a micro-batch of its own, like other long ones "
                "from now on; lower max_completion_length if memory runs out", limit, longest,
            )  # fmt: skip

    def micro_batches(self, call: int) -> list[MicroBatch]:
        """Those of the `call`-th `training_step` call of the run; none if the call is a no-op."""
        plan = self.plans[call % self.slices // self.accumulation]
        place = call % self.accumulation  # in its optimizer step
        end = len(plan) - self.accumulation + place + 1
        return plan[0 if place == 0 else max(0, end - 1) : max(0, end)]

    def rows_trained(self, call: int) -> int:
        """Number of this rank's rows that the optimizer step of the `call`-th call trains on."""
        return sum(len(one.rows) for one in self.of_step(call) if one.trains)

    def of_step(self, call: int) -> list[MicroBatch]:
        """All of the optimizer step that the `call`-th call belongs to."""
        return self.plans[call % self.slices // self.accumulation]

    def store_old(self, log_probs: Callable[[MicroBatch], Tensor], several_epochs: bool) -> None:
        """Give the micro-batches that are trained on after the policy has changed their log-probabilities before that.

        Args:
            log_probs: (B, T) of a micro-batch, by the policy before the rollout's first step.
            several_epochs: over the rollout, which make the first step's micro-batches off-policy as well.
        """
        for plan in self.plans[0 if several_epochs else 1 :]:
            plan[:] = [one.with_old(log_probs(one)) for one in plan]

    def ask_teachers(self, ask: Callable[[Sequence[MicroBatch]], list[MicroBatch]]) -> float:
        """Give every micro-batch what teachers say of its tokens, if it has not got it; returns the seconds that took.

        A collective operation.

        Args:
            ask: micro-batches -> the same with the teachers' values.
        """
        began = time.perf_counter()
        self.plans = [ask(plan) for plan in self.plans]
        return time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Old log-probabilities computed on these micro-batches, and their rows; the rest follows from the rollout."""
        olds = [[one.rows.old_logp for one in plan] for plan in self.plans]
        return {"old_log_probs": olds, "planned_rows": self._rows()}

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether a checkpoint's old log-probabilities, if it has any, are of the micro-batches planned now."""
        return not _has_any(state["old_log_probs"]) or state.get("planned_rows") == self._rows()

    def _rows(self) -> list[list[list[int]]]:
        """Which rows of the rollout each micro-batch of each step has; none of one that is there for other ranks."""
        return [[[] if one.rows.row is None else one.rows.row.tolist() for one in plan] for plan in self.plans]

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore `state_dict`, after `plan` on the same rollout, if it `fits`."""
        if not _has_any(state["old_log_probs"]):
            return
        for plan, olds in zip(self.plans, send_to_device(state["old_log_probs"], device), strict=True):
            plan[:] = [one if old is None else one.with_old(old) for one, old in zip(plan, olds, strict=True)]


def _has_any(old_log_probs: Sequence[Sequence[Tensor | None]]) -> bool:
    return any(old is not None for olds in old_log_probs for old in olds)


@contextlib.contextmanager
def not_the_last(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """In the block, backward passes add to gradients that no rank reduces yet, as in all calls of a step but the last.

    Args:
        model: wrapped by the distributed backend, which reduces them in the last call.
    """
    if not accelerator.sync_gradients:
        yield
        return
    by_engine = accelerator.distributed_type == DistributedType.DEEPSPEED  # it is told with every backward pass
    accelerator.sync_gradients = False
    try:
        with contextlib.nullcontext() if by_engine else accelerator.no_sync(model):
            yield
    finally:
        accelerator.sync_gradients = True


def resumed_rollout(
    state: dict[str, Any], rows: int, slices: int, planner: StepPlanner | None, device: torch.device
) -> list[TRLBatch]:
    """The rollout on which a checkpoint has steps left, planned; none, with a warning, if it cannot be continued.

    A collective operation with a planner.

    Args:
        state: the checkpoint's, of this rank.
        rows, slices: of a rollout now: `slices` of `rows` rows.
    """
    stored = state.get("rollout", ())
    sizes = [len(batch["prompt_ids"]) for batch in stored]
    if sizes and sizes != [rows] * slices:
        log.warning(
            "the checkpoint was saved within a rollout of %d micro-batches of %d rows, now there are %d of "
            "%d (--per_device_train_batch_size): the remaining steps on it use a new rollout",
            len(sizes), sizes[0], slices, rows,
        )  # fmt: skip
        return []
    rollout = [send_to_device(batch, device) for batch in stored]
    if rollout and planner is not None:
        planner.plan(rollout)
        if not all(gather_object([planner.fits(state)])):
            if planner.accelerator.is_main_process:
                log.warning("the checkpoint's steps were planned otherwise: the remaining ones use a new rollout")
            return []
        planner.load_state_dict(state, device)
    return rollout
