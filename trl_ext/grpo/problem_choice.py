"""`ProblemChoice`: what makes TRL's trainer roll out the problems that a `Curriculum` chooses."""

from __future__ import annotations

import json
from collections.abc import Sized
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from trl_ext.algorithms.objective import Objective
from trl_ext.grpo.batching import Batch, moves_weights
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.curriculum import Curriculum, kinds_of


class ProblemChoice:
    """To be inherited beside `GRPOTrainer`."""

    args: ExtGRPOConfig
    accelerator: Any
    model: Any
    train_dataset: Any
    num_generations: int
    num_iterations: int
    beta: float
    _objective: Objective
    _rewards: Tensor
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
        if self.args.uninformative_keep_prob == 1:
            return None
        if not isinstance(self.train_dataset, Dataset):
            raise TypeError(
                "uninformative_keep_prob needs a train_dataset whose rows can be looked up, a datasets.Dataset"
            )
        objective = self._objective if self.args.uses_axes else None
        self._idle_rows_train = self.beta != 0 if objective is None else not objective.leaves_idle_rows_alone()
        self._number_of = {_key(prompt): i for i, prompt in enumerate(self.train_dataset["prompt"])}
        return Curriculum(kinds_of(self.train_dataset), self.args.uninformative_keep_prob, self.args.seed)

    def _chosen(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows of this rank's groups after the curriculum's choice, which every rank makes alike."""
        if self._curriculum is None or not self.model.training:
            return inputs
        start, group = self.accelerator.process_index * len(inputs), self.num_generations
        groups = [(start + i) // group for i in range(len(inputs))]
        rollout = self._step // (self.args.steps_per_generation * self.num_iterations)  # micro-steps depend on ranks
        numbers_of = {
            group: self._curriculum.choose(self._number_of[_key(row["prompt"])], (rollout, group))
            for group, row in dict(zip(groups, inputs, strict=True)).items()
        }
        numbers = [numbers_of[group] for group in groups]
        self._numbers = torch.tensor(numbers, device=self.accelerator.device)
        return [self.train_dataset[number] for number in numbers]

    def _learn_what_taught(self, batch: Batch) -> None:
        """Tell the curriculum which groups of the rollout have a gradient.

        Args:
            batch: this rank's rows, with the advantages that they are trained with.
        """
        if self._curriculum is None or not self.model.training:
            return
        numbers = self.accelerator.gather(self._numbers)[:: self.num_generations].tolist()
        rewards = self._rewards.view(-1, self.num_generations)  # (P, G) of all ranks
        if self._idle_rows_train:
            taught = torch.ones(len(rewards), dtype=torch.bool)
        elif self.args.uses_axes:
            moves = torch.tensor(moves_weights(batch), device=self.accelerator.device)
            taught = self.accelerator.gather(moves).view(rewards.shape).any(dim=1)
        else:  # TRL's advantages of equal rewards may be rounding
            scored = [rewards.masked_fill(rewards.isnan(), nothing) for nothing in (-torch.inf, torch.inf)]
            taught = scored[0].amax(1) > scored[1].amin(1)
        self._curriculum.update(numbers, taught.tolist())
        self._metrics["train"]["curriculum/settled_problems"].append(float(len(self._curriculum.settled)))


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
