"""The progress of a training for people: a bar in a terminal, a table in a notebook, ten lines in a log file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import is_in_notebook

from trl_ext.io import print_line

Log = dict[str, Any] | None


def figures_of(logs: Mapping[str, Any]) -> dict[str, str]:
    """What a person wants to see of a step: reward (or loss) and entropy."""
    names = ("reward" if "reward" in logs else "loss", "entropy")
    return {name: f"{logs[name]:.2f}" for name in names if logs.get(name) is not None}


def show_rewards_in_notebook(trainer: Trainer) -> None:
    """In a notebook, put reward and entropy into the table in which transformers shows the loss."""
    if is_in_notebook():
        from transformers.utils.notebook import NotebookProgressCallback  # needs IPython

        from trl_ext.training.notebook import NotebookProgress

        if trainer.pop_callback(NotebookProgressCallback) is not None:
            trainer.add_callback(NotebookProgress)


def show_progress(trainer: Trainer) -> None:
    """Replace transformers' display by ours, as the last callback: it changes what it prints."""
    shown, ours = (PrinterCallback,) * 2 if trainer.args.disable_tqdm else (ProgressCallback, ProgressBar)
    if trainer.pop_callback(shown) is not None:  # else there is a notebook's
        trainer.add_callback(ours)


class ProgressBar(ProgressCallback):
    """transformers' progress bar with reward (or loss) and entropy, instead of a dict per step.

    Without a terminal it prints one line per tenth of the steps.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start at the step that the run resumes from, which the estimated time left depends on."""
        self._tenth = 10 * state.global_step // max(state.max_steps, 1)
        if not sys.stderr.isatty():
            return
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.initial = self.training_bar.n = self.current_step = state.global_step

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Refresh the figures next to the bar."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        figures = figures_of(logs)
        if self.training_bar is not None:
            self.training_bar.set_postfix(figures)
        elif (tenth := 10 * state.global_step // max(state.max_steps, 1)) > self._tenth:
            self._tenth = tenth
            values = ", ".join(f"{name} {value}" for name, value in figures.items())
            print_line(f"step {state.global_step}/{state.max_steps}: {values}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Advance by one. Expert iteration learns the total number of steps only while it runs."""
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps
            super().on_step_end(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Close the bar, if there is one."""
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
