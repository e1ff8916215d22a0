"""`StopOnSigterm`: end a training with a checkpoint when a cluster's scheduler sends SIGTERM."""

from __future__ import annotations

import logging
import math
import signal
import time
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_ext.generation.interruption import StopRequest
from trl_ext.hosts.shutdown_timeout import TIMEOUT, seconds_allowed

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)


class Stoppable(Protocol):
    """The trainer, as far as stopping it goes."""

    accelerator: Accelerator
    stop_signal: int | None  # that it has been ended by
    seconds_to_save: float  # a checkpoint


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, finishes the optimizer step, saves a checkpoint and ends the training, on all ranks alike.

    In the middle of sampling, `request` may end it earlier, see `ReliableTrainer.stopping_on_sigterm`.
    """

    def __init__(self, trainer: Stoppable) -> None:
        self.trainer = trainer
        self.request = StopRequest()
        self._checked: float | None = None  # when the signal was last checked for
        self._longest = 0.0  # seconds between two checks: a step with its validation and saving
        self._has_warned = False

    def has_come(self) -> bool:
        """Whether any rank received SIGTERM. A collective operation."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._checked or now))
        self._checked = now
        self._warn_if_too_slow()
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([self.request.received], device=accelerator.device)).any())

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop if any rank received SIGTERM, unless this is the last step and its validation was not ended by it."""
        has_come, has_ended_early = self.has_come(), self.trainer.stop_signal is not None
        if has_ended_early or (has_come and not control.should_training_stop):
            self.trainer.stop_signal = signal.SIGTERM
            control.should_save = control.should_training_stop = True

    def _warn_if_too_slow(self) -> None:
        """Warn once, after the first checkpoint, if the launcher would not wait for another one."""
        allowed, saving = seconds_allowed(), self.trainer.seconds_to_save
        needed = self._longest + saving
        if self._has_warned or allowed is None or not saving or needed <= allowed:
            return
        self._has_warned = True
        if self.trainer.accelerator.is_main_process:
            log.warning(
                "SIGTERM would lose what was trained since the last checkpoint: a step and another checkpoint take up "
                "to %.0f s, and torch's launcher kills its processes after %.0f s. Set %s=%d where the launcher is "
                "started, and give the scheduler a grace period as long.",
                needed, allowed, TIMEOUT, 60 * math.ceil(2 * needed / 60),
            )  # fmt: skip
