"""`StopOnSigterm`: what makes a training end well when it is told to stop, as schedulers of clusters do."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TORCHS = 30.0  # seconds, where it is not set: torch/distributed/launcher/api.py:LaunchConfig
_OURS = "600"  # of what we launch

log = logging.getLogger(__name__)


def patient_environment() -> dict[str, str]:
    """The environment for a launcher whose ranks have time to save a checkpoint when they are told to stop."""
    return {TIMEOUT: _OURS, **os.environ}


def seconds_allowed() -> float | None:
    """How long after SIGTERM torch's launcher kills its ranks; None where it has not started this process.

    Its agent sends SIGTERM on and waits for so long (torch/distributed/elastic/multiprocessing/api.py: _close). It has
    read the time from its command line or from its environment, which its ranks have inherited.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").replace("=", "\0").split("\0")
    except OSError:  # no Linux
        words = []
    given = {name.replace("-", "_"): value for name, value in itertools.pairwise(words)}
    return float(given.get("__shutdown_timeout", os.environ.get(TIMEOUT, _TORCHS)))


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, finishes the optimizer step, saves a checkpoint and ends the training; on every rank at one step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._received = False
        self._looked: float | None = None  # when it was last seen whether the signal has come
        self._longest = 0.0  # seconds between two looks: a step, with the validation and the saving of its end
        self._is_said = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the block runs, SIGTERM is noted here; only a main thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, number: int, frame: Any) -> None:
        self._received = True

    def has_come(self) -> bool:
        """Whether any rank was told to stop; a collective operation."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._looked or now))
        self._looked = now
        self._say_what_does_not_fit()
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([self._received], device=accelerator.device)).any())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if any rank was told to."""
        if self.has_come() and not control.should_training_stop:
            self.trainer.stop_signal = signal.SIGTERM
            control.should_save = control.should_training_stop = True

    def _say_what_does_not_fit(self) -> None:
        """Once, as soon as a checkpoint was saved: that the launcher would not wait for another one."""
        allowed, saving = seconds_allowed(), self.trainer.seconds_to_save
        needed = self._longest + saving
        if self._is_said or allowed is None or not saving or needed <= allowed:
            return
        self._is_said = True
        if self.trainer.accelerator.is_main_process:
            log.warning(
                "SIGTERM would lose what was trained since the last checkpoint: what runs and another checkpoint take "
                "up to %.0f s, and torch's launcher kills its processes after %.0f s. Set %s=%d where the launcher is "
                "started, and as long a grace period of the scheduler.",
                needed, allowed, TIMEOUT, 60 * math.ceil(2 * needed / 60),
            )  # fmt: skip
