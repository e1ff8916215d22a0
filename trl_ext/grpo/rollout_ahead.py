"""`SamplesAhead`: vLLM servers sample the next rollout while optimizer steps on this one are made.

At the start of rollout k its completions are waited for, the weights of now are pushed, and those of rollout k + 1 are
asked for. So rollout k is sampled with the weights that its predecessor began with: one rollout old, whatever the
timing. The first rollout of a run and of an epoch, whose predecessor does not know its problems, is of current weights.

What is asked for, with which weights and which seeds follows from the step alone. Validations and pushes wait until
what is on its way has been sampled, and so does a checkpoint, which has it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ServerError
from trl_ext.generation.in_flight import InFlight

if TYPE_CHECKING:
    import torch
    from trl import GRPOTrainer as _Trainer

    from trl_ext.grpo.config import ExtGRPOConfig
else:
    _Trainer = object


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


class SamplesAhead(_Trainer):
    """A part of `ExtGRPOTrainer`: with `rollout_ahead` 0 it does nothing."""

    args: ExtGRPOConfig
    _last_loaded_step: int
    _batches: Peeking | None = None  # of the epoch

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The batches of an optimizer step, of an iterator that the next rollout's problems can be looked up in."""
        if not self.args.rollout_ahead:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._batches is None or self._batches.items is not epoch_iterator:
            self._batches = Peeking(epoch_iterator)
        return super().get_batch_samples(self._batches, num_batches, device)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not (self.args.rollout_ahead and self.model.training):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        engine = self.vllm_generation
        version = self.state.global_step
        if engine.ahead is None:
            generated = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        else:
            _, ids, logps, _, version = engine.answers_ahead(prompt_ids)
            generated = ids, [[of_token[0] for of_token in row] for row in logps]
            if self.state.global_step != self._last_loaded_step:
                engine.sync_weights()
                self._last_loaded_step = self.state.global_step
        self._metrics["train"]["sampling/staleness"].append(float(self.state.global_step - version))
        if (rows := self._next_rollout()) is not None:
            asked = self._tokenize_prompts([row["prompt"] for row in rows])[0]
            place = "train", self.state.global_step + self._steps_per_rollout
            engine.ask_ahead(asked, self.state.global_step, place)
        return generated

    def _next_rollout(self) -> list[dict[str, Any]] | None:
        """This rank's rows of the rollout after the one that is due; None in the last one of an epoch or of the run."""
        calls = self.args.steps_per_generation * self.num_iterations
        if self.state.global_step + self._steps_per_rollout >= self.state.max_steps or self._batches is None:
            return None
        return self._batches.peek(calls - self.args.gradient_accumulation_steps)

    @property
    def _steps_per_rollout(self) -> int:
        return self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps

    def resume_state(self) -> dict[str, Any]:
        """With the completions that are on their way, which are waited for; without them if a server is lost."""
        state: dict[str, Any] = super().resume_state()
        ahead = self.vllm_generation.ahead if self.args.rollout_ahead else None
        if ahead is not None:
            with contextlib.suppress(ServerError):  # which the rollout itself ends with
                state["ahead"] = {"prompts": ahead.prompts, "version": ahead.version, "answers": ahead.answers.result()}
        return state

    def load_resume_state(self, state: dict[str, Any] | None) -> None:
        """With the completions that were on their way."""
        super().load_resume_state(state)
        if state is not None and "ahead" in state and self.args.rollout_ahead:
            self.vllm_generation.ahead = InFlight.arrived(**state["ahead"])
