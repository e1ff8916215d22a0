"""Callbacks: validation, the log files of a run, and warnings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_ext.compat.tracker_names import VALIDATIONS
from trl_ext.evaluation.evaluator import Report, grade_rows
from trl_ext.evaluation.statistics import latest_within_one_standard_error
from trl_ext.generation.completion import derive_seed
from trl_ext.io import append_jsonl, print_line
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.rewards.graders import Grade
from trl_ext.runs.clock import reserve_seconds
from trl_ext.runs.layout import checkpoint_name
from trl_ext.runs.summary import Selection, ValidationEntry
from trl_ext.training.trackers import give_validations_an_axis

_LOGGED = 4  # responses of a validation
_FIGURES = ("accuracy", "mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect", "entropy_estimate")

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from trl_ext.runs.clock import Clock
    from trl_ext.runs.folder import Run
    from trl_ext.training.trainer import ReliableTrainer

Log = dict[str, Any] | None


class JsonlLog(TrainerCallback):
    """Appends every log entry to `metrics.jsonl`, with the step and the run's wall-clock."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self.clock = path, clock

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            entry = {"step": state.global_step, "wall_clock_s": round(self.clock.seconds(), 2), **logs}
            append_jsonl(self.path, [entry])


class ZeroVarianceWarning(TrainerCallback):
    """Warns when every group has had zero reward variance for many steps, so that nothing is learned."""

    def __init__(self, patience: int = 10) -> None:
        self.patience = patience
        self._in_a_row = 0

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Count logged steps in a row without reward variance, and warn at every `patience` of them."""
        if not logs or "frac_reward_zero_std" not in logs:
            return
        self._in_a_row = self._in_a_row + 1 if logs["frac_reward_zero_std"] == 1 else 0
        if self._in_a_row and self._in_a_row % self.patience == 0 and state.is_world_process_zero:
            log.warning(
                "all rewards of a group have been equal for %d logged steps (mean reward %.3g), so nothing is learned. "
                "Look at generations.jsonl: is rewards/format_reward 0 (the prompt, `stop`, --sampling_max_tokens)? "
                "Are the problems all too hard or all solved? Is --sampling_temperature 0 or --group_size too small?",
                self._in_a_row, logs.get("reward", float("nan")),
            )  # fmt: skip


class GenerationsLog(TrainerCallback):
    """Appends rows of the latest rollout to `generations.jsonl` every `every` steps.

    Args:
        rows: so many from all over the rollout.
        group: and so many from its beginning: one problem's completions, to be seen side by side.
        per_token: adds fields to a row that is logged, by its number in the rollout: `TokenLog.of_row`.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        trainer: ReliableTrainer,
        rows: int = 4,
        group: int = 1,
        per_token: Callable[[int], Mapping[str, Any]] = lambda row: {},
    ) -> None:
        self.path, self.every, self.trainer = path, every, trainer
        self.rows, self.group, self.per_token = rows, group, per_token

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write rows of the rollout that the step trained on."""
        due = state.global_step == 1 or state.global_step % self.every == 0
        if state.is_world_process_zero and due:
            rollout = self.trainer.last_rollout
            every_row = range(len(rollout))
            spread = every_row[:: max(1, len(rollout) // self.rows)][: self.rows]
            chosen = sorted({*every_row[: self.group], *spread})
            append_jsonl(self.path, [{"step": state.global_step, **rollout[n], **self.per_token(n)} for n in chosen])
            self.trainer.log_table("rollouts", [rollout[n] for n in chosen])


class Validation(TrainerCallback):
    """Validates the policy at step 0, after the steps where it is due, and at the end, into `run.validations`.

    Args:
        log_to: a JSONL file for a few responses of each validation.
        final: the problems of the final validation; None for the same.
        samples: of each problem; of several, `Report.pass_at` is measured too.
        restore_best: before the final validation, restore the weights of the best step: the latest one within a
            standard error of the highest accuracy. The maximum of several accuracies is biased upwards, so the final
            validation draws fresh samples, and its `selection` says how many of its problems made the choice.
    """

    def __init__(
        self,
        problems: Sequence[dict[str, Any]],
        grader: Callable[[Sequence[str], Sequence[Any]], Sequence[Grade]],
        is_due: Callable[[TrainerState], bool],
        sampling: Mapping[str, Any],
        run: Run,
        trainer: ReliableTrainer,
        log_to: Path | None = None,
        final: Sequence[dict[str, Any]] | None = None,
        restore_best: bool = False,
        samples: int = 1,
    ) -> None:
        self.problems, self.grader, self.is_due = problems, grader, is_due
        self.sampling, self.run, self.trainer, self.log_to = dict(sampling), run, trainer, log_to
        self.final, self.restore_best = problems if final is None else final, restore_best
        self.samples = samples

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Validate before the first step, unless the run did so before it was interrupted."""
        give_validations_an_axis()
        is_first = not self.run.validations
        if is_first or self.run.owes_validation:
            self._measure(state, self.problems)
            if is_first and self.run.validations and self.restore_best:
                self.trainer.save_checkpoint_now()
        if self.run.validations:
            self._find_best()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Validate when it is due, and have the best step so far saved."""
        if self.is_due(state):
            self._measure(state, self.problems)
            if self.run.validations and self._find_best() == state.global_step and args.save_strategy != "no":
                control.should_save = True

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Validate the policy that the run ends with, unless that was just done or the run was stopped."""
        if self.trainer.stop_signal is not None:
            return
        last = self.run.validations[-1]
        step = self._find_best() if self.restore_best else state.global_step
        best = self.run.folder / checkpoint_name(step)
        if step != state.global_step and not best.exists():
            log.warning("%s could not be saved when it was the best; the run ends with its last weights", best)
            step = state.global_step
        if step != state.global_step:
            self.trainer.restore_weights(best)
            self.trainer.restored_step = step
        if self.restore_best or last["step"] != state.global_step or last["problems"] != len(self.final):
            self._measure(state, self.final, restored=step)

    def seconds_to_end(self) -> float:
        """Estimate the seconds that the end of the run takes: the final validation, saving, and the report."""
        per_problem = [entry["seconds"] / max(entry["problems"], 1) for entry in self.run.validations]
        saving = self.trainer.seconds_to_save * (2 if self.restore_best else 1)
        return reserve_seconds(max(per_problem, default=0.0) * len(self.final), saving)

    def _find_best(self) -> int:
        """Return the step of the best validation, and have the trainer keep its checkpoint."""
        past = self.run.validations
        accuracies, problems = [entry["accuracy"] for entry in past], [entry["problems"] for entry in past]
        highest = accuracies.index(max(accuracies))
        chosen = latest_within_one_standard_error(accuracies, problems) if self.restore_best else highest
        best = past[chosen]["step"]
        self.trainer.best_step = best
        return best

    def _selection(self, report: Report) -> Selection:
        """What the final validation has in common with those that chose its weights, and its accuracy on the rest."""
        temperature = self.sampling.get("temperature")
        greedy = (self.trainer.args.temperature if temperature is None else temperature) == 0
        others = [row["answer_reward"] for row in report.rows[len(self.problems) * self.samples :]]
        accuracy = round(sum(others) / len(others), 4) if others else None
        shared = min(len(self.problems), len(report.rows) // self.samples)
        return {"fresh_samples": not greedy, "problems_that_chose": shared, "accuracy_on_others": accuracy}

    def _measure(self, state: TrainerState, problems: Sequence[dict[str, Any]], restored: int | None = None) -> None:
        """Sample, grade and record, unless SIGTERM ends that; a resumed run then does it first.

        Args:
            restored: the step whose weights the final validation uses.
        """
        self.run.owes_validation = True
        with self.trainer.stopping_early():
            self._sample_and_record(state, problems, restored)
            self.run.owes_validation = False

    def _sample_and_record(self, state: TrainerState, problems: Sequence[dict[str, Any]], restored: int | None) -> None:
        began = time.time()
        trainer = self.trainer
        is_chosen = self.restore_best and restored is not None
        sampling = self.sampling | ({"seed": derive_seed(1, self.sampling["seed"])} if is_chosen else {})
        asked = [problem for problem in problems for _ in range(self.samples)]
        completions = trainer.sample([problem["prompt"] for problem in asked], rows=asked, **sampling)
        rows: list[dict[str, Any]] = []  # of the main process, which logs them

        def grade() -> dict[str, Any]:
            rows.extend(grade_rows(asked, completions, self.grader))
            report = Report(rows, self.samples)
            return {**report.summary(), **({"selection": self._selection(report)} if is_chosen else {})}

        # a grader may time out on one rank only, and all ranks act on the accuracy together
        figures = run_on_main_and_broadcast(grade)
        seconds = time.time() - began
        entry: dict[str, Any] = {
            "step": state.global_step,
            "wall_clock_s": round(self.run.clock.seconds(), 2),
            "seconds": round(seconds, 2),
            **({} if restored in (None, state.global_step) else {"weights_of_step": restored}),
            **figures,
        }
        self.run.validations.append(cast(ValidationEntry, entry))
        trainer.log_now(logged_figures(state.global_step, figures) | {"validation/seconds": round(seconds, 2)})
        logged = [_logged(state.global_step, row) for row in rows[:_LOGGED]]
        if state.is_world_process_zero and self.log_to is not None:
            append_jsonl(self.log_to, logged)
        if state.is_world_process_zero:
            trainer.log_table(f"{VALIDATIONS}responses", logged)
        if state.is_world_process_zero and not trainer.args.disable_tqdm:
            print_line(validation_line(self.run.validations[-1], state.max_steps))


def logged_figures(step: int, figures: Mapping[str, Any]) -> dict[str, float]:
    """A validation's figures under their names in `metrics.jsonl` and in trackers; what was not measured is left out.

    Args:
        figures: `Report.summary()`.
    """
    logged = {
        "step": step,
        "format_rate": 1 - figures["outcomes"]["neither"],
        **{name: value for name, value in figures.items() if name in _FIGURES or name.startswith("pass@")},
        **figures.get("tools", {}),
    }
    return {f"{VALIDATIONS}{name}": value for name, value in logged.items() if value is not None}


def _logged(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """One response of a validation with the field names of `generations.jsonl`."""
    same = {name: row[name] for name in ("prompt", "response", "tokens", "entropy_estimate", "outcome")}
    rewards = {name: row[name] for name in ("format_reward", "answer_reward")}
    return {"step": step, **same, "ground_truth": row["answer"], "rewards": rewards, "reward": row["answer_reward"]}


def validation_line(entry: ValidationEntry, max_steps: int) -> str:
    """One validation as a line of text."""
    outcomes = entry["outcomes"]
    return (
        f"validation at step {entry['step']:>4}/{max_steps}: accuracy {entry['accuracy']:.3f}  "
        f"(format only {outcomes['format_only']:.3f}, neither {outcomes['neither']:.3f}; "
        f"{entry['mean_tokens']:.0f} tokens; {entry['wall_clock_s']:.0f} s)"
    )
