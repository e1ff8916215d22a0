"""`RolloutsAhead`: vLLM servers sample the next rollout while optimizer steps on this one are made.

At the start of rollout k its completions are waited for, the weights of now are pushed, and those of rollout k + 1 are
asked for. So rollout k is sampled with the weights that its predecessor began with: one rollout old, whatever the
timing. The first rollout of a run and of an epoch, whose predecessor does not know its problems, is of current weights.

What is asked for, with which weights and which seeds follows from the step alone. Validations and pushes wait until
what is on its way has been sampled, and so does a checkpoint, which has it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from trl_ext.errors import ServerError
from trl_ext.generation.in_flight import InFlight

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerState

    from trl_ext.grpo.config import ExtGRPOConfig

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

    model: nn.Module
    state: TrainerState
    vllm_generation: Any  # a `ServerEngine`

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
    """

    def __init__(self, trainer: _Trainer, config: ExtGRPOConfig) -> None:
        self.trainer, self.config = trainer, config
        self._batches: Peeking | None = None  # of the epoch
        calls = config.steps_per_generation * config.num_iterations
        self._steps = calls // config.gradient_accumulation_steps  # of a rollout
        self._calls_left = calls - config.gradient_accumulation_steps  # after its first step

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
        """The completions of a rollout and their log-probabilities; the next one's are asked for.

        Args:
            now: samples them with the weights of now.
        """
        trainer = self.trainer
        if not (self.is_on and trainer.model.training):
            return now()
        engine, version = trainer.vllm_generation, trainer.state.global_step
        if engine.ahead is None:
            sampled = now()
        else:
            _, ids, logps, _, version = engine.answers_ahead(prompts)
            sampled = ids, [[of_token[0] for of_token in row] for row in logps]
            trainer.sync_engine()
        trainer._log_training("sampling/staleness", float(trainer.state.global_step - version))
        if (rows := self._next_rollout()) is not None:
            asked = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
            engine.ask_ahead(asked, trainer.state.global_step, ("train", trainer.state.global_step + self._steps))
        return sampled

    def _next_rollout(self) -> list[dict[str, Any]] | None:
        """This rank's rows of the rollout after the one that is due; None in the last one of an epoch or of the run."""
        state = self.trainer.state
        if state.global_step + self._steps >= state.max_steps or self._batches is None:
            return None
        return self._batches.peek(self._calls_left)

    def state_dict(self) -> dict[str, Any]:
        """The completions that are on their way, which are waited for; nothing if a server is lost."""
        ahead: InFlight | None = self.trainer.vllm_generation.ahead if self.is_on else None
        if ahead is not None:
            with contextlib.suppress(ServerError):  # which the rollout itself ends with
                answers = ahead.answers.result()
                return {"ahead": {"prompts": ahead.prompts, "version": ahead.version, "answers": answers}}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With the completions that were on their way."""
        if self.is_on and "ahead" in state:
            self.trainer.vllm_generation.ahead = InFlight.complete(**state["ahead"])
