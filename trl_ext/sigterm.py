"""`StopOnSigterm`: what makes a training end well when it is told to stop, as schedulers of clusters do."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback


class StopOnSigterm(TrainerCallback):
    """On SIGTERM, finishes the optimizer step, saves a checkpoint and ends the training; on every rank at one step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._received = False

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
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([self._received], device=accelerator.device)).any())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if any rank was told to."""
        if self.has_come() and not control.should_training_stop:
            self.trainer.stop_signal = signal.SIGTERM
            control.should_save = control.should_training_stop = True
