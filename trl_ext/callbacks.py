"""What happens beside training: validation, the files of a run, and a progress bar that a person can read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from trl_ext.evaluate import Report, evaluate
from trl_ext.files import append_jsonl
from trl_ext.rewards.grade import Verdict

if TYPE_CHECKING:
    from trl_ext.trainer import ExtGRPOTrainer


class ProgressBar(ProgressCallback):
    """The bar of transformers with reward and entropy beside the time left, instead of a dict per step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Refresh the figures behind the bar."""
        if self.training_bar is not None and logs and "reward" in logs:
            shown = {name: f"{logs[name]:.2f}" for name in ("reward", "entropy") if logs.get(name) is not None}
            self.training_bar.set_postfix(shown)


class JsonlLog(TrainerCallback):
    """Appends every log entry to `metrics.jsonl`, with the step and the seconds since the process started."""

    def __init__(self, path: Path, start: float) -> None:
        self.path, self.start = path, start

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            entry = {"step": state.global_step, "wall_clock_s": round(time.time() - self.start, 2), **logs}
            append_jsonl(self.path, [entry])


class GenerationsLog(TrainerCallback):
    """Appends a few rows of a recent rollout to `generations.jsonl` every `every` steps."""

    def __init__(self, path: Path, every: int, rows: int = 4) -> None:
        self.path, self.every, self.rows = path, every, rows
        self.trainer: ExtGRPOTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write rows of the rollout that the step trained on."""
        due = state.global_step == 1 or state.global_step % self.every == 0
        if self.trainer is not None and state.is_world_process_zero and due:
            rollout = self.trainer.last_rollout
            chosen = rollout[:: max(1, len(rollout) // self.rows)][: self.rows]
            append_jsonl(self.path, [{"step": state.global_step, **row} for row in chosen])


class Validation(TrainerCallback):
    """Measures the policy on held-out problems at step 0, every `every` steps, and at the end."""

    def __init__(
        self,
        problems: Sequence[dict[str, Any]],
        grader: Callable[[Sequence[str], Sequence[Any]], Sequence[Verdict]],
        every: int,
        sampling: Mapping[str, Any],
        start: float,
    ) -> None:
        self.problems, self.grader = problems, grader
        self.every, self.sampling, self.start = every, dict(sampling), start
        self.trainer: ExtGRPOTrainer | None = None
        self.history: list[dict[str, Any]] = []  # one entry per validation: step, wall_clock_s, summary
        self.first: Report | None = None
        self.last: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure before the first step."""
        self._measure(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is due."""
        if state.global_step % self.every == 0:
            self._measure(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained policy, unless the last step just did."""
        if self.history[-1]["step"] != state.global_step:
            self._measure(state)

    def _measure(self, state: Any) -> None:
        assert self.trainer is not None  # set when the trainer exists
        began = time.time()
        trainer = self.trainer
        report = evaluate(
            self.problems,
            lambda prompts: trainer.sample(prompts, **self.sampling),
            self.grader,
        )
        now = time.time()
        self.first, self.last = self.first or report, report
        summary = report.summary()
        entry = {"step": state.global_step, "wall_clock_s": round(now - self.start, 2), **summary}
        self.history.append(entry)
        trainer.log_now({"validation/accuracy": report.accuracy, "validation/seconds": round(now - began, 2)})
        if state.is_world_process_zero and not trainer.args.disable_tqdm:
            print_line(
                validation_line(entry, trainer.args.max_steps if trainer.args.max_steps > 0 else state.max_steps)
            )


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
