"""`RolloutsAhead`: vLLM servers sample the next rollout while optimizer steps on this one are made.

At the start of rollout k its completions are waited for, the weights of now are pushed, and those of rollout k + 1 are
asked for. So rollout k is sampled with the weights that its predecessor began with: one rollout old, whatever the
timing. The first rollout of a run and of an epoch, whose predecessor does not know its problems, is of current weights,
and so is every further try of dynamic sampling.

Where problems depend on earlier rewards, rollout k + 1 is asked for once rollout k has been scored, tries and all.

What is asked for, with which weights and which seeds follows from the step alone. Validations and pushes wait until
what is on its way has been sampled, and so does a checkpoint, which has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trl_ext.errors import ServerError
from trl_ext.generation.in_flight import InFlight
from trl_ext.generation.interruption import to_the_end
from trl_ext.generation.progress import reporting

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn
    from transformers import TrainerState

    from trl_ext.grpo.config import ExtGRPOConfig
    from trl_ext.grpo.problem_sampler import ProblemSampler

Sampled = tuple[list[list[int]], list[list[float]] | None]  # token ids, and their log-probabilities


class Peeking:
    """An iterator whose next items can be looked at."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items
        self._read: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._read.popleft() if self._read else next(self.items)

    def peek(self, number: int) -> Any | None:
        """The item after `number` others, None after the end."""
        while len(self._read) <= number:
            try:
                self._read.append(next(self.items))
            except StopIteration:
                return None
        return self._read[number]


class _Trainer(Protocol):
    """The part of `ExtGRPOTrainer` that is asked."""

    accelerator: Accelerator
    model: nn.Module
    state: TrainerState
    vllm_generation: Any  # a `ServerEngine`
    _step: int  # `training_step` calls

    def sync_engine(self) -> None:
        """Push the policy's weights, unless a step has not been made since."""

    def _log_training(self, name: str, value: float) -> None:
        """A metric of the step."""

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Their token ids first."""


class RolloutsAhead:
    """What a trainer does of it; with `rollout_ahead` 0 nothing.

    Args:
        trainer: an `ExtGRPOTrainer`.
        problems: selects those of a rollout.
    """

    def __init__(self, trainer: _Trainer, config: ExtGRPOConfig, problems: ProblemSampler) -> None:
        self.trainer, self.config, self.problems = trainer, config, problems
        self._batches: Peeking | None = None  # of the epoch
        self._version = 0  # optimizer steps that the weights have had which have sampled last
        self._calls = config.steps_per_generation * config.num_iterations  # of `training_step`, on a rollout
        self._steps = self._calls // config.gradient_accumulation_steps

    @property
    def is_on(self) -> bool:
        """Whether rollouts are sampled ahead."""
        return bool(self.config.rollout_ahead)

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An epoch's batches, in which the next rollout's problems can be looked up."""
        if not self.is_on:
            return batches
        if self._batches is None or self._batches.items is not batches:
            self._batches = Peeking(batches)
        return self._batches

    def roll_out(self, prompts: list[list[int]], now: Callable[[], Sampled]) -> Sampled:
        """The completions of a rollout, or of a try at it, and their log-probabilities.

        Args:
            now: samples them with the weights of now.

        Raises:
            RuntimeError: they were sampled by weights that are older than a rollout.
        """
        trainer = self.trainer
        if not (self.is_on and trainer.model.training):
            return now()
        engine, self._version = trainer.vllm_generation, trainer.state.global_step
        if engine.ahead is None:
            return now()
        _, ids, logps, _, self._version = engine.answers_ahead(prompts)
        if (age := trainer.state.global_step - self._version) > self._steps:
            raise RuntimeError(f"a rollout is {age} optimizer steps old, where at most {self._steps} are allowed")
        trainer.sync_engine()
        if self.problems.curriculum is None:
            self.ask_for_next()
        return ids, [[of_token[0] for of_token in row] for row in logps]

    def note_versions(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add to rows of the log how many optimizer steps the weights had had that sampled them."""
        if self.is_on and self.trainer.model.training:
            for row in rows:
                row["policy_version"] = self._version

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Have the next rollout sampled, if it is not yet; `rows` of the log are those of this one, scored."""
        if not self.is_on:
            return
        trainer = self.trainer
        ages = torch.tensor([float(trainer.state.global_step - row["policy_version"]) for row in rows])
        mean = trainer.accelerator.gather(ages.to(trainer.accelerator.device)).mean()
        trainer._log_training("sampling/staleness", mean.item())
        if trainer.vllm_generation.ahead is None:
            self.ask_for_next()

    def ask_for_next(self) -> None:
        """Ask for the next rollout; for none after the last of an epoch or of the run."""
        trainer, due = self.trainer, self.trainer.state.global_step + self._steps
        if due >= trainer.state.max_steps or self._batches is None:
            return
        read = self.config.gradient_accumulation_steps  # batches, for the first step on this rollout
        if (rows := self._batches.peek(self._calls - read)) is not None:
            rows, _ = self.problems.selected(rows, trainer._step + self._calls)
            asked = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
            trainer.vllm_generation.ask_ahead(asked, trainer.state.global_step, ("train", due))

    def state_dict(self) -> dict[str, Any]:
        """What gives the completions that are on their way, waited for; nothing if a server is lost."""
        ahead: InFlight | None = self.trainer.vllm_generation.ahead if self.is_on else None
        if ahead is None:
            return {}
        most_tokens = int(self.config.max_completion_length)

        def answered() -> dict[str, Any] | None:
            try:
                with to_the_end(), reporting("rollout ahead, for the checkpoint", len(ahead.prompts), most_tokens):
                    return {"prompts": ahead.prompts, "version": ahead.version, "answers": ahead.of(ahead.prompts)}
            except ServerError:  # which the rollout itself ends with
                return None

        return {"ahead": answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With the completions that were on their way."""
        if self.is_on and state.get("ahead"):
            self.trainer.vllm_generation.ahead = InFlight.complete(**state["ahead"])
