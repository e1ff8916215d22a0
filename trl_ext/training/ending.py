"""What ends a run before its last step: its time budget, and rules for a run that has no hope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_ext.io import print_line

if TYPE_CHECKING:
    from trl_ext.runs.folder import Clock, Run

_IN_A_ROW = 2  # validations, for one may be unlucky


class HasAccelerator(Protocol):
    """A trainer whose ranks can be asked."""

    accelerator: Accelerator


class TimeBudget(TrainerCallback):
    """Ends the training while there is time for what comes after it; on every rank at one step.

    Args:
        seconds: all that the run may take, start-up included.
        reserve: seconds that what comes after the training will take, as measured so far.
    """

    def __init__(
        self, trainer: HasAccelerator, clock: Clock, seconds: float, reserve: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.trainer, self.clock, self.seconds, self.reserve = trainer, clock, seconds, reserve
        self._begun = 0  # steps, in this process
        self._last = 0.0  # when the last of them began, by the clock
        self._longest = 0.0  # seconds, with the validation and the saving of its end; the first one starts things up

    def left(self) -> float:
        """Seconds for training, by this process's clock."""
        return self.seconds - self.clock.seconds() - self.reserve()

    def is_spent(self, ahead: float = 0.0) -> bool:
        """Whether on any rank's clock there is no time for `ahead` more seconds of training; a collective operation."""
        accelerator = self.trainer.accelerator
        is_spent = self.left() <= ahead
        return bool(accelerator.gather(torch.tensor([is_spent], device=accelerator.device)).any())

    def leave_out(self, seconds: float) -> None:
        """What has just been done belongs to no step; who does it looks ahead by itself."""
        self._last += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do no step where there is no time for any."""
        self._stop(args, state, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What has gone by since the step before began is what a step takes."""
        self._measure()
        self._begun += 1
        self._last = self.clock.seconds()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop when another step would be one too many."""
        self._measure()
        self._stop(args, state, control)

    def _measure(self) -> None:
        """The first step counts until there is another."""
        if self._begun:
            took = self.clock.seconds() - self._last
            self._longest = took if self._begun <= 2 else max(self._longest, took)

    def _stop(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self.is_spent(self._longest) and not control.should_training_stop:
            control.should_training_stop = True
            if state.is_world_process_zero and not args.disable_tqdm:
                print_line(f"the time budget of {self.seconds:.0f} s is spent after step {state.global_step}")


class Decay(TrainerCallback):
    """Lets the learning rate fall to zero on the clock: linearly, over the last share of a time budget.

    How many steps fit into a budget is known only at its end, so a schedule over steps ends too early or never. What
    the trainer's own schedule says is multiplied.

    Args:
        budget: what ends the training; the rate reaches zero where it does.
        share: of the budget's seconds, above 0 and at most 1.
    """

    def __init__(self, budget: TimeBudget, share: float) -> None:
        self.budget, self.share = budget, share
        self.factor = 1.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the schedule multiplied where it is computed: what is logged is then what is used.

        Raises:
            TypeError: it is no function of the step.
        """
        scheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # in Accelerate's wrapper
        if not hasattr(scheduler, "lr_lambdas"):
            raise TypeError(
                f"lr_decay_fraction multiplies a schedule that is a function of the step, which a "
                f"{type(scheduler).__name__} is not; take another --lr_scheduler_type, such as constant_with_warmup"
            )
        scheduler.lr_lambdas = [partial(self._rate, rate) for rate in scheduler.lr_lambdas]

    def _rate(self, rate: Callable[[int], float], step: int) -> float:
        return rate(step) * self.factor

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the clocks of all ranks; the schedule is computed after the step, for the next one."""
        accelerator = self.budget.trainer.accelerator
        left = torch.tensor([self.budget.left() / (self.share * self.budget.seconds)], device=accelerator.device)
        self.factor = float(accelerator.gather(left).min().clamp(0, 1))


class EarlyStop(TrainerCallback):
    """Ends a run that has collapsed or from which nothing is learnt any more, and says so in `run.ended_early`.

    Args:
        below_best: as `collapsed` has it; None for never.
        without_spread: logged steps in a row in which no group had different rewards; None for never.
    """

    def __init__(self, run: Run, below_best: float | None, without_spread: int | None) -> None:
        self.run, self.below_best, self.without_spread = run, below_best, without_spread

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Count logged steps without a spread."""
        if logs and "frac_reward_zero_std" in logs:
            self.run.without_spread = self.run.without_spread + 1 if logs["frac_reward_zero_std"] == 1 else 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See whether a rule holds; what it goes by is the same on every rank."""
        reason = None
        if self.below_best is not None:
            reason = collapsed([entry["accuracy"] for entry in self.run.validations], self.below_best)
        if self.without_spread is not None and self.run.without_spread >= self.without_spread:
            reason = f"dead: {self.run.without_spread} logged steps in a row without a group of different rewards"
        if reason is not None:
            self.run.ended_early = f"{reason}, at step {state.global_step}"
            control.should_training_stop = True


def collapsed(accuracies: Sequence[float], below_best: float) -> str | None:
    """Why a run is lost: its last two validations are under this share of its best one; None where they are not."""
    best, last = max(accuracies, default=0.0), accuracies[-_IN_A_ROW:]
    if len(last) < _IN_A_ROW or not all(accuracy < below_best * best for accuracy in last):
        return None
    return f"collapsed: accuracy {', '.join(f'{accuracy:.3f}' for accuracy in last)} after {best:.3f}"
