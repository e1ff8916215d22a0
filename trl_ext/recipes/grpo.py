"""The GRPO recipe: what it has beside what every recipe does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trl import ModelConfig

from trl_ext.compat.renamed import accepts_earlier_names
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.recipes.checks import Data
from trl_ext.recipes.model_settings import loaded_as
from trl_ext.recipes.run import Task
from trl_ext.rewards.hooks import REWARDS
from trl_ext.runs.folder import Run
from trl_ext.training.callbacks import GenerationsLog, NoSpread


@accepts_earlier_names
@dataclass
class GRPOTask(Task):
    """Problems, a reward for the rollouts, and how the policy is measured."""

    recipe: ClassVar[str] = "grpo"

    reward: str = field(
        default="strict", metadata={"help": f"Reward: {', '.join(sorted(REWARDS))}, or file.py:function."}
    )
    log_generations_every: int = field(default=20, metadata={"help": "Optimizer steps between logged generations."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_function()
        if self.log_generations_every < 1:
            raise ValueError(f"log_generations_every must be at least 1, got {self.log_generations_every}")

    def reward_function(self) -> Callable[..., Any]:
        """The reward, in TRL's signature."""
        return self.build(REWARDS, self.reward)

    def graders(self) -> dict[str, str]:
        """The reward, as far as it is a grader's, and validation's grader."""
        return {"train": self.reward, **super().graders()}

    def check(self, data: Data, config: ExtGRPOConfig, say: Callable[[str], None]) -> None:
        """Refuse fewer problems than a rollout has."""
        super().check(data, config, say)
        config.check_problem_count(len(data["train"]))

    def trainer(self, model: ModelConfig, config: ExtGRPOConfig, data: Data, run: Run) -> ExtGRPOTrainer:
        """`ExtGRPOTrainer`, its generations logged, and a warning where nothing is learnt."""
        trainer = ExtGRPOTrainer(
            reward_funcs=self.reward_function(),
            args=config,
            train_dataset=data["train"],
            **loaded_as(model),
        )
        trainer.add_callback(GenerationsLog(run.folder / "generations.jsonl", self.log_generations_every, trainer))
        trainer.add_callback(NoSpread())
        return trainer

    def log_responses_to(self, run: Run) -> Path | None:
        """Nowhere: rollouts are logged."""
        return None

    def finish(self, trainer: ExtGRPOTrainer, run: Run) -> dict[str, Any]:
        """The point on the axes."""
        return {name: getattr(trainer.args, name) for name in ("preset", "advantage", "policy_loss", "aggregation")}


GRPO_SETTINGS = (GRPOTask, ModelConfig, ExtGRPOConfig)
