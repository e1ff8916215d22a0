"""The settings of `recipes/grpo_math.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trl import ModelConfig

from trl_ext.data.references import COMPARING
from trl_ext.errors import brief_in_notebooks
from trl_ext.evaluation.evaluator import SAMPLES, is_correct
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.io import read_jsonl
from trl_ext.recipes.settings import Data, TaskSettings
from trl_ext.rewards.hooks import REWARDS, with_own_metrics
from trl_ext.setting import Group, OnResume, setting


@brief_in_notebooks
@dataclass
class GRPOTask(TaskSettings):
    """Problems, a reward for the rollouts, and how the policy is measured."""

    reward: str = setting(
        "strict",
        (
            f"Rewards: {', '.join(sorted(REWARDS))}, file.py:function. Several are separated by commas, such as "
            "strict,judge; --reward_weights 1,0.2 weighs them."
        ),
        Group.REWARD,
        also_called="reward_fn",
    )
    pass_rates_from: str | None = setting(
        None,
        (
            "Train only on problems that an evaluation, in this folder, solves sometimes. Its samples have to be of "
            "the training split, several for each problem; those solved never or always have no gradient."
        ),
        Group.MODEL,
    )
    log_generations_every: int = setting(
        20,
        "Log a few generations every N optimizer steps.",
        Group.OUTPUT,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
    )

    def data(self, seed: int) -> Data:
        """Rows with `prompt` and `answer`; those to train on may be chosen by `pass_rates_from`."""
        data = super().data(seed)
        if self.pass_rates_from is None:
            return data
        rates = pass_rates(Path(self.pass_rates_from))
        known = [rates.get(problem) for problem in data.train["problem"]]
        chosen = [number for number, rate in enumerate(known) if rate is not None and 0 < rate < 1]
        source = data.sources["train"]
        source.rows, source.selected = (
            len(chosen),
            (
                f"those that {self.pass_rates_from} has solved sometimes, of {len(known) - known.count(None)} there: "
                f"{known.count(0)} never, {known.count(1)} always"
            ),
        )
        if not chosen:
            raise ValueError(f"pass_rates_from: nothing to train on: {source.selected}")
        return replace(data, train=data.train.select(chosen))

    @property
    def rewards(self) -> list[str]:
        """The names of the rewards, in the order of their weights."""
        return [name.strip() for name in self.reward.split(",")]

    def reward_functions(self) -> list[Callable[..., Any]]:
        """The rewards, in TRL's signature."""
        first, *others = self.rewards
        if not all(self.rewards) or first in others or len(set(others)) < len(others):
            raise ValueError(f"reward must be different names, separated by commas, got {self.reward!r}")
        built = [self.build(REWARDS, name) for name in self.rewards]
        return [
            with_own_metrics(function) if name in others and name in REWARDS else function
            for name, function in zip(self.rewards, built, strict=True)
        ]

    def check_weights(self, weights: Sequence[object] | None) -> None:
        """Raise a ValueError for TRL's `reward_weights` unless they are a number for each reward."""
        if weights is None:
            return
        if any(isinstance(weight, bool) or not isinstance(weight, (int, float)) for weight in weights):
            raise ValueError(f"reward_weights must be numbers, such as 1,0.2; got {list(weights)}")
        if len(weights) != len(self.rewards):
            raise ValueError(
                f"reward_weights has {len(weights)} for {len(self.rewards)} rewards ({', '.join(self.rewards)}): give "
                "one for each, such as --reward strict,judge --reward_weights 1,0.2"
            )

    @property
    def graders(self) -> dict[str, str]:
        """The first reward that is a grader's which compares, and validation's grader."""
        comparing = [name for name in self.rewards if name in COMPARING]
        return {"train": (comparing or self.rewards)[0], **super().graders}


def pass_rates(folder: Path) -> dict[str, float]:
    """By the text of each problem of an evaluation, the fraction of its samples that are correct."""
    path = folder / SAMPLES
    if not path.is_file():
        raise ValueError(f"pass_rates_from: {str(folder)!r} has no {SAMPLES}: no evaluation has ended there")
    verdicts: dict[str, list[bool]] = {}
    for row in read_jsonl(path):
        verdicts.setdefault(str(row["problem"]), []).append(is_correct(row))
    if max(map(len, verdicts.values()), default=0) < 2:
        raise ValueError(f"pass_rates_from: {str(folder)!r} has one sample per problem: evaluate with --samples 4")
    return {problem: sum(correct) / len(correct) for problem, correct in verdicts.items()}


GRPO_SETTINGS = (GRPOTask, ModelConfig, ExtGRPOConfig)
