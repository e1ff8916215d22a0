"""`ProblemChoice`: what makes TRL's trainer roll out the problems that a `Curriculum` chooses."""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from trl_ext.config import ExtGRPOConfig
from trl_ext.curriculum import Curriculum, kinds_of


class ProblemChoice:
    """To be inherited beside `GRPOTrainer`."""

    args: ExtGRPOConfig
    accelerator: Any
    model: Any
    train_dataset: Any
    num_generations: int
    _step: int
    _metrics: Any
    _curriculum: Curriculum | None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """As `Trainer` does.

        Raises:
            ValueError: there are fewer training problems than a rollout has.
        """
        if isinstance(self.train_dataset, Sized):
            self.args.check_problem_count(len(self.train_dataset))
        parent: Any = super()
        return parent.train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _make_curriculum(self) -> Curriculum | None:
        if self.args.settled_share == 1:
            return None
        if not isinstance(self.train_dataset, Dataset):
            raise TypeError("settled_share needs a train_dataset whose rows can be looked up, a datasets.Dataset")
        self._number_of = {_key(prompt): i for i, prompt in enumerate(self.train_dataset["prompt"])}
        return Curriculum(kinds_of(self.train_dataset), self.args.settled_share, self.args.seed)

    def _chosen(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of this rank's groups after the curriculum's choice, which every rank makes alike."""
        if self._curriculum is None or not self.model.training:
            return inputs
        start, group = self.accelerator.process_index * len(inputs), self.num_generations
        groups = [(start + i) // group for i in range(len(inputs))]
        numbers_of = {
            group: self._curriculum.choose(self._number_of[_key(row["prompt"])], (self._step, group))
            for group, row in dict(zip(groups, inputs, strict=True)).items()
        }
        numbers = [numbers_of[group] for group in groups]
        self._numbers = torch.tensor(numbers, device=self.accelerator.device)
        return [self.train_dataset[number] for number in numbers]

    def _learn_what_taught(self, rewards: Tensor) -> None:
        """Tell the curriculum which groups had a spread.

        Args:
            rewards: (N,) of all ranks, NaN where nothing scored a completion.
        """
        if self._curriculum is None or not self.model.training:
            return
        rewards = rewards.view(-1, self.num_generations)
        numbers = self.accelerator.gather(self._numbers)[:: self.num_generations].tolist()
        unscored = rewards.isnan()
        taught = rewards.masked_fill(unscored, -torch.inf).amax(1) > rewards.masked_fill(unscored, torch.inf).amin(1)
        self._curriculum.update(numbers, taught.tolist())
        self._metrics["train"]["curriculum/settled_problems"].append(float(len(self._curriculum.settled)))


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
