"""What happens beside training: validation, the files of a run, and a progress bar that a person can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from trl_ext.evaluate import evaluate
from trl_ext.files import append_jsonl
from trl_ext.rewards.grade import Verdict

_LOGGED = 4  # responses of a validation

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from trl_ext.run_folder import Clock, Run
    from trl_ext.trainer import ExtGRPOTrainer


class ProgressBar(ProgressCallback):
    """The bar of transformers with reward (or loss) and entropy beside the time left, not a dict per step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin at the step that the run is resumed at, or the time left would be wrong."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.initial = self.training_bar.n = self.current_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Refresh the figures behind the bar."""
        if self.training_bar is not None and logs and "loss" in logs:
            names = ("reward" if "reward" in logs else "loss", "entropy")
            self.training_bar.set_postfix({name: f"{logs[name]:.2f}" for name in names if logs.get(name) is not None})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on by one; expert iteration learns on the way how many there will be."""
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps
        super().on_step_end(args, state, control, **kwargs)


class JsonlLog(TrainerCallback):
    """Appends every log entry to `metrics.jsonl`, with the step and the run's wall-clock."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self.clock = path, clock

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            entry = {"step": state.global_step, "wall_clock_s": round(self.clock.seconds(), 2), **logs}
            append_jsonl(self.path, [entry])


class NoSpread(TrainerCallback):
    """Warns when for many steps no group has had different rewards, so that nothing is learnt."""

    def __init__(self, patience: int = 10) -> None:
        self.patience = patience
        self._in_a_row = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Count logged steps without spread, and warn at every `patience` of them."""
        if not logs or "frac_reward_zero_std" not in logs:
            return
        self._in_a_row = self._in_a_row + 1 if logs["frac_reward_zero_std"] == 1 else 0
        if self._in_a_row and self._in_a_row % self.patience == 0 and state.is_world_process_zero:
            log.warning(
                "all rewards of a group have been equal for %d logged steps (mean reward %.3g), so nothing is learnt. "
                "Look at generations.jsonl: is rewards/format_reward 0 (the prompt, `stop`, --sampling_max_tokens)? "
                "Are the problems all too hard or all solved? Is --sampling_temperature 0 or --group_size too small?",
                self._in_a_row, logs.get("reward", float("nan")),
            )  # fmt: skip


class TimeBudget(TrainerCallback):
    """Ends the training with the step that passes the budget, on every rank at one step."""

    def __init__(self, trainer: Any, clock: Clock, seconds: float) -> None:
        self.trainer, self.clock, self.seconds = trainer, clock, seconds

    def is_spent(self) -> bool:
        """Whether any rank's clock has passed it; a collective operation."""
        accelerator = self.trainer.accelerator
        spent = torch.tensor([self.clock.seconds() >= self.seconds], device=accelerator.device)
        return bool(accelerator.gather(spent).any())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop when it is spent."""
        if self.is_spent() and not control.should_training_stop:
            control.should_training_stop = True
            if state.is_world_process_zero and not args.disable_tqdm:
                print_line(f"the time budget of {self.seconds:.0f} s is spent after step {state.global_step}")


class GenerationsLog(TrainerCallback):
    """Appends a few rows of a recent rollout to `generations.jsonl` every `every` steps."""

    def __init__(self, path: Path, every: int, trainer: ExtGRPOTrainer, rows: int = 4) -> None:
        self.path, self.every, self.trainer, self.rows = path, every, trainer, rows

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write rows of the rollout that the step trained on."""
        due = state.global_step == 1 or state.global_step % self.every == 0
        if state.is_world_process_zero and due:
            rollout = self.trainer.last_rollout
            chosen = rollout[:: max(1, len(rollout) // self.rows)][: self.rows]
            append_jsonl(self.path, [{"step": state.global_step, **row} for row in chosen])


class Validation(TrainerCallback):
    """Measures the policy on held-out problems at step 0, after the steps where it is due, and at the end.

    Each puts an entry with `step`, `wall_clock_s` and the report's summary into `run.validations`.

    Args:
        log_to: a JSONL file for a few responses of each validation.
    """

    def __init__(
        self,
        problems: Sequence[dict[str, Any]],
        grader: Callable[[Sequence[str], Sequence[Any]], Sequence[Verdict]],
        is_due: Callable[[Any], bool],
        sampling: Mapping[str, Any],
        run: Run,
        trainer: Any,
        log_to: Path | None = None,
    ) -> None:
        self.problems, self.grader, self.is_due = problems, grader, is_due
        self.sampling, self.run, self.trainer, self.log_to = dict(sampling), run, trainer, log_to

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure before the first step, unless the run had done so before it was interrupted."""
        if not self.run.validations:
            self._measure(state)
        self._find_best()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is due; the best so far is worth a checkpoint."""
        if self.is_due(state):
            self._measure(state)
            if self._find_best() == state.global_step and args.save_strategy != "no":
                control.should_save = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained policy, unless the last step just did, or the run is to stop before its end."""
        if self.trainer.stop_signal is None and self.run.validations[-1]["step"] != state.global_step:
            self._measure(state)

    def _find_best(self) -> int:
        """Step of the best validation; the trainer keeps its checkpoint."""
        best: int = max(self.run.validations, key=lambda entry: entry["accuracy"])["step"]
        self.trainer.best_step = best
        return best

    def _measure(self, state: Any) -> None:
        began = time.time()
        trainer = self.trainer
        report = evaluate(
            self.problems,
            lambda prompts: trainer.sample(prompts, **self.sampling),
            self.grader,
        )
        seconds = time.time() - began
        entry = {"step": state.global_step, "wall_clock_s": round(self.run.clock.seconds(), 2), **report.summary()}
        self.run.validations.append(entry)
        trainer.log_now({"validation/accuracy": report.accuracy, "validation/seconds": round(seconds, 2)})
        if state.is_world_process_zero and self.log_to is not None:
            append_jsonl(self.log_to, [_logged(state.global_step, row) for row in report.rows[:_LOGGED]])
        if state.is_world_process_zero and not trainer.args.disable_tqdm:
            print_line(validation_line(entry, state.max_steps))


def _logged(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A response of a validation, in the words of the log of rollouts."""
    same = {name: row[name] for name in ("prompt", "response", "tokens", "outcome")}
    rewards = {name: row[name] for name in ("format_reward", "answer_reward")}
    return {"step": step, **same, "ground_truth": row["answer"], "rewards": rewards, "reward": row["answer_reward"]}


def validation_line(entry: dict[str, Any], max_steps: int) -> str:
    """One validation as a person reads it."""
    outcomes = entry["outcomes"]
    return (
        f"validation at step {entry['step']:>4}/{max_steps}: accuracy {entry['accuracy']:.3f}  "
        f"(format only {outcomes['format_only']:.3f}, neither {outcomes['neither']:.3f}; "
        f"{entry['mean_tokens']:.0f} tokens; {entry['wall_clock_s']:.0f} s)"
    )


def print_line(text: str) -> None:
    """Print above the progress bar."""
    from tqdm import tqdm

    tqdm.write(text)
