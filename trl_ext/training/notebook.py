"""The progress of a training in a notebook."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils.notebook import NotebookProgressCallback, NotebookTrainingTracker

from trl_ext.compat.tracker_names import VALIDATIONS
from trl_ext.training.progress import Log, figures_of


class NotebookProgress(NotebookProgressCallback):
    """transformers' bar of a notebook over a table of reward (or loss), entropy and validation accuracy.

    The table has a row per tenth of the steps and one per validation; no widget is needed.
    """

    training_tracker: Any

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin with an empty table, whose columns are those of its rows."""
        super().on_train_begin(args, state, control, **kwargs)
        self._tenth = 10 * state.global_step // max(state.max_steps, 1)
        self.training_tracker = NotebookTrainingTracker(state.max_steps, ["Step"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Advance by one. Expert iteration learns the total number of steps only while it runs."""
        self.training_tracker.total = state.max_steps
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Add a row where a tenth is done or a validation was."""
        if not logs or self.training_tracker is None:  # after the end of the training
            return
        figures, tenth = {}, 10 * state.global_step // max(state.max_steps, 1)
        if "loss" in logs and tenth > self._tenth:
            self._tenth, figures = tenth, figures_of(logs)
        if (accuracy := logs.get(f"{VALIDATIONS}accuracy")) is not None:
            figures = {"validation accuracy": f"{accuracy:.3f}"}
        if figures:
            self.training_tracker.write_line({"Step": state.global_step, **figures})
