"""The settings of `recipes/grpo_math.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from transformers.hf_argparser import HfArg
from trl import ModelConfig

from trl_ext.compat.on_resume import OnResume
from trl_ext.compat.renamed import accepts_earlier_names
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.recipes.settings import Task
from trl_ext.rewards.hooks import REWARDS
from trl_ext.training.options import check_at_least_1


@accepts_earlier_names
@dataclass
class GRPOTask(Task):
    """Problems, a reward for the rollouts, and how the policy is measured."""

    reward: str = HfArg(default="strict", help=f"The reward: {', '.join(sorted(REWARDS))}, or file.py:function.")
    log_generations_every: Annotated[int, OnResume.MAY_CHANGE] = HfArg(
        default=20, help="Log a few generations every N optimizer steps."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_function()
        check_at_least_1(self, "log_generations_every")

    def reward_function(self) -> Callable[..., Any]:
        """The reward, in TRL's signature."""
        return self.build(REWARDS, self.reward)

    @property
    def graders(self) -> dict[str, str]:
        """The reward, as far as it is a grader's, and validation's grader."""
        return {"train": self.reward, **super().graders}


GRPO_SETTINGS = (GRPOTask, ModelConfig, ExtGRPOConfig)
