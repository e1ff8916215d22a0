"""What ends a run before its last step: its time budget, and early-stopping rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_ext.io import print_line

if TYPE_CHECKING:
    from trl_ext.runs.clock import Clock
    from trl_ext.runs.folder import Run
    from trl_ext.training.trainer import ReliableTrainer

Log = dict[str, Any] | None

_IN_A_ROW = 2  # validations; a single one may be unlucky


class TimeBudget(TrainerCallback):
    """Ends the training early enough for the final validation and saving, on every rank at the same step.

    Args:
        seconds: the budget of the whole run, start-up included.
        reserve: returns the seconds that the end of the run is expected to take.
    """

    def __init__(
        self, trainer: ReliableTrainer, clock: Clock, seconds: float, reserve: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.trainer, self.clock, self.seconds, self.reserve = trainer, clock, seconds, reserve
        self._steps = 0  # started in this process
        self._started = 0.0  # clock time at which the latest step started
        self._longest = 0.0  # seconds of a step with its validation and saving; the first one includes warm-up

    def left(self) -> float:
        """Seconds left for training, by this process's clock."""
        return self.seconds - self.clock.seconds() - self.reserve()

    def is_spent(self, ahead: float = 0.0) -> bool:
        """Whether any rank's clock leaves less than `ahead` seconds for training. A collective operation."""
        accelerator = self.trainer.accelerator
        is_spent = self.left() <= ahead
        return bool(accelerator.gather(torch.tensor([is_spent], device=accelerator.device)).any())

    def leave_out(self, seconds: float) -> None:
        """Exclude `seconds` from the step estimate; the caller checks the budget itself."""
        self._started += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stop at once if there is no time for a step."""
        self._stop(args, state, control)

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure the step before and note when this one starts."""
        self._measure()
        self._steps += 1
        self._started = self.clock.seconds()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Stop if there is no time for another step."""
        self._measure()
        self._stop(args, state, control)

    def _measure(self) -> None:
        """Update the longest step; the first one counts only until there is another."""
        if self._steps:
            took = self.clock.seconds() - self._started
            self._longest = took if self._steps <= 2 else max(self._longest, took)

    def _stop(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self.is_spent(self._longest) and not control.should_training_stop:
            control.should_training_stop = True
            if state.is_world_process_zero and not args.disable_tqdm:
                print_line(f"the time budget of {self.seconds:.0f} s is spent after step {state.global_step}")


class TimeBasedLRDecay(TrainerCallback):
    """Decays the learning rate linearly to zero over the last fraction of a time budget, by the clock.

    How many steps fit into a budget is known only at its end, so a schedule over steps would end too early or never.
    The decay multiplies the trainer's own schedule.

    Args:
        budget: the rate reaches zero where it ends the training.
        fraction: of the budget's seconds, above 0 and at most 1.
    """

    def __init__(self, budget: TimeBudget, fraction: float) -> None:
        self.budget, self.fraction = budget, fraction
        self.factor = 1.0

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Wrap the schedule's own functions, so that the logged rate is the one used; other schedules are refused."""
        scheduler = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # in Accelerate's wrapper
        if not hasattr(scheduler, "lr_lambdas"):
            raise TypeError(
                f"lr_decay_fraction multiplies a schedule that is a function of the step, which a "
                f"{type(scheduler).__name__} is not; take another --lr_scheduler_type, such as constant_with_warmup"
            )
        scheduler.lr_lambdas = [partial(self._rate, rate) for rate in scheduler.lr_lambdas]

    def _rate(self, rate: Callable[[int], float], step: int) -> float:
        return rate(step) * self.factor

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Take the rank with the least time left; the scheduler computes the next step's rate after this step."""
        accelerator = self.budget.trainer.accelerator
        left = torch.tensor([self.budget.left() / (self.fraction * self.budget.seconds)], device=accelerator.device)
        self.factor = float(accelerator.gather(left).min().clamp(0, 1))


class EarlyStop(TrainerCallback):
    """Ends a run that has collapsed, no longer learns or is good enough; the reason is in `run.ended_early`.

    Args:
        below_best: the threshold of `collapsed`; None disables the rule.
        zero_variance_steps: stop after this many logged steps in a row in which every group has zero reward variance;
            None disables the rule.
        target: stop when a validation has this accuracy; None disables the rule.
        patience: stop after this many validations in a row without a new best accuracy; None disables the rule.
    """

    def __init__(
        self,
        run: Run,
        below_best: float | None,
        zero_variance_steps: int | None,
        target: float | None = None,
        patience: int | None = None,
    ) -> None:
        self.run, self.below_best, self.zero_variance_steps = run, below_best, zero_variance_steps
        self.target, self.patience = target, patience

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Count logged steps in a row without reward variance."""
        if logs and "frac_reward_zero_std" in logs:
            self.run.zero_variance_steps = self.run.zero_variance_steps + 1 if logs["frac_reward_zero_std"] == 1 else 0

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Apply the rules, whose inputs are equal on every rank."""
        reason, accuracies = None, [entry["accuracy"] for entry in self.run.validations]
        if self.below_best is not None:
            reason = collapsed(accuracies, self.below_best)
        if self.zero_variance_steps is not None and self.run.zero_variance_steps >= self.zero_variance_steps:
            reason = f"dead: {self.run.zero_variance_steps} logged steps in a row without a group of different rewards"
        if self.patience is not None and validations_since_best(accuracies) >= self.patience:
            reason = f"no longer improves: the best accuracy, {max(accuracies):.3f}, is {self.patience} validations old"
        if self.target is not None and accuracies and accuracies[-1] >= self.target:
            reason = f"reached an accuracy of {self.target:g}: {accuracies[-1]:.3f}"
        if reason is not None:
            self.run.ended_early = f"{reason}, at step {state.global_step}"
            control.should_training_stop = True


def validations_since_best(accuracies: Sequence[float]) -> int:
    """How many validations came after the first one of the best accuracy; 0 without any."""
    return len(accuracies) - 1 - accuracies.index(max(accuracies)) if accuracies else 0


def collapsed(accuracies: Sequence[float], below_best: float) -> str | None:
    """Describe a collapse: the last two validations below this fraction of the best one; None if there is none."""
    best, last = max(accuracies, default=0.0), accuracies[-_IN_A_ROW:]
    if len(last) < _IN_A_ROW or not all(accuracy < below_best * best for accuracy in last):
        return None
    return f"collapsed: accuracy {', '.join(f'{accuracy:.3f}' for accuracy in last)} after {best:.3f}"
