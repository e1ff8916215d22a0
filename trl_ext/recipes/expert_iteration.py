"""The expert-iteration recipe: questions, and a trainer that samples, grades, keeps and finetunes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import TrainerCallback
from trl import ModelConfig

from trl_ext.compat.renamed import accepts_earlier_names
from trl_ext.expert_iteration.trainer import FOLDER, STEPS, ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.io import read_jsonl
from trl_ext.recipes.checks import Data
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.run import Task
from trl_ext.runs.folder import Run
from trl_ext.runs.report import write_steps_plot


@accepts_earlier_names
@dataclass
class ExpertIterationTask(Task):
    """Questions to sample for, with the grader that validates; the policy is measured after each step."""

    recipe: ClassVar[str] = "expert_iteration"

    def __post_init__(self) -> None:
        super().__post_init__()
        default = type(self).__dataclass_fields__["validate_every"].default
        if self.validate_every != default:
            raise ValueError("validate_every has no meaning in expert iteration: it validates after each of its steps")

    def graders(self) -> dict[str, str]:
        """Validation's grader, which grades the rollouts too."""
        return {"train": self.validation_grader, **super().graders()}

    def check(self, data: Data, config: ExpertIterationConfig, say: Callable[[str], None]) -> None:
        """Say so where there are fewer questions than a step samples for."""
        super().check(data, config, say)
        questions, wanted = len(data["train"]), config.questions_per_step
        if questions < wanted:
            say(f"there are {questions} questions, fewer than questions_per_step ({wanted}): every step takes all")

    def trainer(self, model: ModelConfig, config: ExpertIterationConfig, data: Data, run: Run) -> Any:
        """`ExpertIterationTrainer`, which saves and ends where its steps do."""
        trainer = ExpertIterationTrainer(
            args=config,
            questions=list(data["train"]),
            grader=self.grader(),
            folder=run.folder / FOLDER,
            **loaded_as(model),
        )
        trainer.add_callback(EndOfStep(trainer))
        return trainer

    def is_due(self, trainer: ExpertIterationTrainer) -> Callable[[Any], bool]:
        """At the end of an expert-iteration step."""
        return lambda state: trainer.is_step_over()

    def finish(self, trainer: ExpertIterationTrainer, run: Run) -> dict[str, Any]:
        """The steps in figures, and their plot."""
        path = run.folder / FOLDER / STEPS
        steps = read_jsonl(path) if path.exists() else []
        entropy = [(r["step"], r["entropy"]) for r in read_jsonl(run.folder / "metrics.jsonl") if "entropy" in r]
        write_steps_plot(run.folder / "expert_iteration.png", steps, entropy, run.folder.name)
        names = ("n_ei_steps", "questions_per_step", "group_size", "epochs_per_step", "selection")
        return {name: getattr(trainer.args, name) for name in names} | {"steps": steps}


class EndOfStep(TrainerCallback):
    """Saves a checkpoint at the end of every expert-iteration step, and ends the training with the last one."""

    def __init__(self, trainer: ExpertIterationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See whether a step is over; an epoch is an expert-iteration step."""
        state.epoch = self.trainer.ei_steps_done()
        if self.trainer.is_step_over():
            control.should_save = control.should_save or args.save_strategy != "no"
            control.should_training_stop |= self.trainer.ei_step >= args.n_ei_steps


EXPERT_ITERATION_SETTINGS = (ExpertIterationTask, ModelConfig, ExpertIterationConfig)
