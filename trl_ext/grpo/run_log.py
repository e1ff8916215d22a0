"""`RunLog`: what a recipe writes of its rollouts, for a trainer that is used as a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from trl_ext.io import read_jsonl, write_jsonl
from trl_ext.plots import figure
from trl_ext.runs.clock import Clock
from trl_ext.runs.layout import GENERATIONS, METRICS
from trl_ext.training.callbacks import GenerationsLog, JsonlLog, Log

if TYPE_CHECKING:
    from trl_ext.grpo.trainer import ExtGRPOTrainer

PLOT = "training.png"
_PANELS = ("reward", "entropy", "completions/mean_length", "grad_norm")


class RunLog(TrainerCallback):
    """Writes rollouts, metrics and a plot of them into the trainer's `output_dir`.

    `trainer.add_callback(RunLog(trainer))` is all that it takes. `generations.jsonl` has one group and a few more rows
    of a rollout with their values per token, for `python -m trl_ext.browse OUTPUT_DIR`; `metrics.jsonl` has what
    Trainer logs, and `training.png` shows it when the training ends. A new training replaces earlier logs
    there, a resumed one continues them from its checkpoint.

    Args:
        every: log a rollout at the first optimizer step and every N steps.
        folder: another folder than `output_dir`.

    Raises:
        ValueError: `every` is below 1.
    """

    def __init__(self, trainer: ExtGRPOTrainer, every: int = 20, folder: str | Path | None = None) -> None:
        self.every = every
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")
        self.folder = Path(folder or trainer.args.output_dir)
        whole: dict[str, Any] = {"group": trainer.args.num_generations, "per_token": trainer.log_tokens()}
        self._generations = GenerationsLog(self.folder / GENERATIONS, every, trainer, **whole)
        self._metrics = JsonlLog(self.folder / METRICS, Clock())

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Leave out what the training that begins, or is resumed at a checkpoint, will log again."""
        if not state.is_world_process_zero:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / GENERATIONS, self.folder / METRICS):
            rows = read_jsonl(path) if path.exists() else []
            write_jsonl(path, [row for row in rows if row["step"] <= state.global_step and state.global_step])

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Write rows of the step's rollout where it is due."""
        self._generations.on_step_end(args, state, control)

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: Log = None, **_: object) -> None:
        """Write a line of metrics."""
        self._metrics.on_log(args, state, control, logs)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Draw what was logged."""
        if state.is_world_process_zero:
            write_metrics_plot(self.folder / PLOT, read_jsonl(self.folder / METRICS), self.folder.name)


def write_metrics_plot(path: Path, metrics: Sequence[Mapping[str, Any]], title: str) -> None:
    """Reward, entropy, length and gradient norm against optimizer steps, as a PNG.

    Args:
        metrics: the rows of `metrics.jsonl`.
    """
    with figure(path, (9, 6), (2, 2), title) as panels:
        for panel, name in zip(panels, _PANELS, strict=True):
            points = [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
            panel.plot([step for step, _ in points], [value for _, value in points], linewidth=1.4)
            panel.set(xlabel="optimizer steps", ylabel=name)
