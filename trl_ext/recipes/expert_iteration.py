"""The settings of `recipes/expert_iteration.py`, when it saves and ends, and what its steps were."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import ModelConfig

from trl_ext.compat.given import given
from trl_ext.errors import brief_in_notebooks
from trl_ext.imitation.expert_iteration import FOLDER, STEPS, ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.io import read_jsonl
from trl_ext.recipes.settings import TaskSettings
from trl_ext.runs.layout import METRICS
from trl_ext.runs.tables_and_plots import write_steps_plot


@brief_in_notebooks
@dataclass
class ExpertIterationTask(TaskSettings):
    """Questions to sample for, with the grader that validates; the policy is measured after each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if given(self, ["validate_every"]):
            raise ValueError("validate_every has no meaning in expert iteration: it validates after each of its steps")

    @property
    def graders(self) -> dict[str, str]:
        """Validation's grader, which grades the rollouts too."""
        return {"train": self.validation_grader, **super().graders}


class EndOfStep(TrainerCallback):
    """Saves a checkpoint at the end of every expert-iteration step, and ends the training with the last one."""

    def __init__(self, trainer: ExpertIterationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See whether a step is over; an epoch is an expert-iteration step."""
        state.epoch = self.trainer.ei_steps_done()
        if self.trainer.is_step_over():
            control.should_save = control.should_save or args.save_strategy != "no"
            control.should_training_stop |= self.trainer.ei_step >= args.n_ei_steps


def steps_so_far(folder: Path) -> list[dict[str, Any]]:
    """The expert-iteration steps of a run in figures, and their plot in its folder."""
    path = folder / FOLDER / STEPS
    steps = read_jsonl(path) if path.exists() else []
    of_kept = [(row["step"], row["entropy"]) for row in read_jsonl(folder / METRICS) if "entropy" in row]
    write_steps_plot(folder / "expert_iteration.png", steps, of_kept, folder.name)
    return steps


EXPERT_ITERATION_SETTINGS = (ExpertIterationTask, ModelConfig, ExpertIterationConfig)
