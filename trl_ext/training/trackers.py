"""What wandb, trackio and TensorBoard get next to the metrics: tables of responses, an axis for validations, a summary.

transformers' callbacks send the metrics. They also begin the tracker's run, which a process may follow with others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from trl_ext.compat.tracker_names import SUMMARY, VALIDATIONS
from trl_ext.io import fence_of, markdown_table

TRACKERS = tuple(INTEGRATION_TO_CALLBACK.values())
_STEP = "train/global_step"  # transformers' axis of everything but validations
Callbacks = Iterable[TrainerCallback]
Row = Mapping[str, Any]


def send_table(callbacks: Callbacks, name: str, rows: Sequence[Row], step: int) -> None:
    """Show responses as a table, on the process whose trackers have begun."""
    flat = [_flat(row) for row in rows]
    columns = list(flat[0]) if flat else []
    values = [[row.get(column) for column in columns] for row in flat]
    for callback in callbacks if flat else ():
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text(
                name, "\n".join(markdown_table(columns, ([_code(v) for v in row] for row in values))), step
            )
            callback.tb_writer.flush()
        elif isinstance(callback, WandbCallback) and callback._wandb.run is not None:
            table = callback._wandb.Table(columns=columns, data=values, allow_mixed_types=True)
            callback._wandb.log({name: table, _STEP: step})
        elif isinstance(callback, TrackioCallback) and _trackio_runs(callback._trackio):
            callback._trackio.log({name: callback._trackio.Table(columns=columns, data=values), _STEP: step}, step=step)


def send_summary(trainer: Trainer, summary: Row) -> None:
    """Show the summary's figures in a section of their own, as the last that the run sends."""
    figures = {name: value for name, value in summary.items() if isinstance(value, (bool, int, float, str))}
    now = trainer.args, trainer.state, trainer.control
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TRACKERS):
            logs = {f"{SUMMARY}{name}": value for name, value in figures.items()}
            callback.on_log(*now, model=trainer.model, logs=logs)
        if isinstance(callback, TensorBoardCallback):
            callback.on_train_end(*now)  # closes what it has opened again


@contextlib.contextmanager
def trackers_last(callbacks: list[TrainerCallback]) -> Iterator[None]:
    """In the block, which ends a training, trackers come after the others: they end their run, and validations log."""
    before = list(callbacks)
    callbacks.sort(key=lambda callback: isinstance(callback, TRACKERS))
    try:
        yield
    finally:
        callbacks[:] = before


@contextlib.contextmanager
def tracker_runs_ended() -> Iterator[None]:
    """End the trackers' runs that the block begins: a process, such as a notebook's, may train another one."""
    wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
    before = wandb.run if wandb else None
    failed = True
    try:
        yield
        failed = False
    finally:
        wandb, trackio = sys.modules.get("wandb"), sys.modules.get("trackio")
        if wandb is not None and wandb.run is not None and wandb.run is not before:
            wandb.finish(exit_code=int(failed))
        if trackio is not None and _trackio_runs(trackio):
            trackio.finish()


def give_validations_an_axis() -> None:
    """Have wandb draw validations against `validation/step`; other trackers get the step with each value."""
    wandb = sys.modules.get("wandb")  # transformers has imported it and begun a run, if the run reports to it
    if wandb is not None and wandb.run is not None:
        wandb.define_metric(f"{VALIDATIONS}step")
        wandb.define_metric(f"{VALIDATIONS}*", step_metric=f"{VALIDATIONS}step")


def _trackio_runs(trackio: Any) -> bool:
    return trackio.context_vars.current_run.get() is not None


_NO_COLUMNS = ("step", "rewards", "per_token", "turns", "prompt")


def _flat(row: Row) -> dict[str, Any]:
    """A logged response without its values per token and its turns, with a column per reward, the long prompt last."""
    rewards = {f"rewards/{name}": value for name, value in row.get("rewards", {}).items()}
    others = {name: value for name, value in row.items() if name not in _NO_COLUMNS}
    return {**others, **rewards, "prompt": row.get("prompt")}


def _code(value: object) -> str:
    """A cell of a Markdown table; text as code, so that a response's tags and signs are shown and not interpreted."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return "" if value is None else str(value)
    ticks = fence_of(value, shortest=1)
    return f"{ticks} {value.replace(chr(10), ' ↵ ')} {ticks}"
