"""Whether a run can continue from a checkpoint as it was: what the checkpoint holds, and who continues it.

Read from the checkpoint's files before anything is loaded. What cannot be continued is refused; what would restart
has to be asked for with `resume_changed`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.io import read_json
from trl_ext.runs.checkpoints import MANIFEST, checkpoints, find_corruption, state_file, step_of

REFERENCE = "reference/model.safetensors"  # in a folder of its own: engines load every safetensors file next to a model
_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer*/*", "rank*-optimizer.pt", "pytorch_optimizer*")
_OF_DEEPSPEED = ("global_step*/*optim_states.pt",)


@dataclass(frozen=True)
class Resuming:
    """The processes that resume, as far as a checkpoint has to fit them."""

    processes: int | None  # None where that is not known
    sharded_by: str | None = None  # DeepSpeed or FSDP, which divide the optimizer's state among the processes
    syncs_reference: bool = False
    callbacks: Collection[str] = ()  # their classes
    rows_per_step: int | None = None  # of all processes, in fine-tuning


def state_of_rank(checkpoint: Path, rank: int, mapped: bool = False) -> dict[str, Any] | None:
    """A rank's own state in a checkpoint, read without running code; None where there is none, as of stock TRL.

    A rank that the run did not have continues with the first rank's, but for the rows that are its own.

    Args:
        mapped: leave tensors in the file, for a look at the rest.
    """
    import torch

    for path in (checkpoint / state_file(rank), checkpoint / state_file(0)):
        if path.is_file():
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
            is_own = path.name == state_file(rank)
            return state if is_own else {k: v for k, v in state.items() if k not in ("rollout", "last_rollout")}
    return None


def processes_of(checkpoint: Path) -> int | None:
    """How many processes have written a checkpoint; None where that is not known."""
    manifest = read_json(checkpoint / MANIFEST) if (checkpoint / MANIFEST).is_file() else {}
    if isinstance(manifest.get("processes"), int):
        return int(manifest["processes"])
    alone = (checkpoint / "rng_state.pth").is_file()
    return 1 if alone else len(list(checkpoint.glob("rng_state_*.pth"))) or None


def refuse_what_does_not_continue(checkpoint: Path, resuming: Resuming, changed: bool) -> list[str]:
    """What restarts although the run is resumed, in lines to print; `changed` is what asks for it.

    Raises:
        InputError: the checkpoint cannot be continued by these processes, or something would restart and nobody
            asked for it.
    """
    state = _shared_state(checkpoint)
    before, now = processes_of(checkpoint), resuming.processes
    are_others = None not in (before, now) and before != now
    if are_others:
        _refuse_division(checkpoint, state, int(before or 0), resuming)
    _refuse_missing_shards(checkpoint, resuming)
    anew = _restarts(checkpoint, state, resuming)
    if are_others:
        anew.append(f"the random states of the processes, which were {before} and are {now}: samples are others")
    if anew and not changed:
        complete = [other for other in _others(checkpoint) if not _restarts(other, _shared_state(other), resuming)]
        instead = f", resume from {complete[0]}, which has all of it" if complete and not are_others else ""
        raise InputError(
            f"{checkpoint} would not be continued as it was; this would restart: {'; '.join(anew)}. Ask for that "
            f"with --resume_changed{instead}, or start a new run without --resume"
        )
    return [f"{checkpoint} is resumed, and this restarts: {each}" for each in anew]


def _restarts(checkpoint: Path, state: Mapping[str, Any], resuming: Resuming) -> list[str]:
    """What the resumed run needs and the checkpoint does not hold."""
    missing = []
    if not resuming.sharded_by and not _has(checkpoint, *_OPTIMIZER):
        missing.append("the optimizer's moments (no optimizer.pt)")
    if resuming.sharded_by != "DeepSpeed" and not _has(checkpoint, "scheduler.pt"):
        missing.append("the learning rate's schedule, from its first step (no scheduler.pt)")
    if not _has(checkpoint, "rng_state*.pth"):
        missing.append("the random states (no rng_state.pth)")
    if len(missing) == 3 and _has(checkpoint, MANIFEST):
        missing[-1] += ", since it was saved with save_only_model"
    if resuming.syncs_reference and not _has(checkpoint, REFERENCE):
        missing.append(f"the reference of sync_ref_model, from the model that the run began with (no {REFERENCE})")
    if lacking := sorted({*state.get("without_state", ())} & {*resuming.callbacks}):
        missing.append(
            f"{', '.join(lacking)}, whose tensors are in no checkpoint: a callback is resumed if it has state_dict and "
            "load_state_dict, or is an ExportableState"
        )
    return missing


def _refuse_division(checkpoint: Path, state: Mapping[str, Any], before: int, resuming: Resuming) -> None:
    """Refuse another number of processes where something is divided among them."""
    were = f"{checkpoint} was written by {_counted(before)}, and there {_are(resuming.processes or 0)} now"
    if resuming.sharded_by or _has(checkpoint, *_OF_DEEPSPEED):
        raise InputError(
            f"{were}: {resuming.sharded_by or 'DeepSpeed'} has divided the optimizer's state among them. Resume with "
            f"{_counted(before)}, or start a new run from the checkpoint's model with --model_name_or_path {checkpoint}"
        )
    if "rollout" in state:
        every = state.get("steps_per_rollout")
        between = [str(other) for other in _others(checkpoint) if every and step_of(other) % every == 0]
        where = f"after every {every}th optimizer step" if every else "between two rollouts"
        raise InputError(
            f"{were}: it is within a rollout, whose rows are divided among them. Resume with {_counted(before)}, or "
            f"{where}, where a rollout is used up: {', '.join(between) or 'there is no such checkpoint'}"
        )
    rows = state.get("rows_per_step")
    if state.get("ei_left") and resuming.rows_per_step and rows and rows != resuming.rows_per_step:
        raise InputError(
            f"{were}: it is within a step of expert iteration, planned with {rows} rows for an optimizer step, and now "
            f"there are {resuming.rows_per_step}. Set --train_batch_size {rows}, or resume with {_counted(before)}"
        )


def _refuse_missing_shards(checkpoint: Path, resuming: Resuming) -> None:
    if resuming.sharded_by == "DeepSpeed" and not _has(checkpoint, *_OF_DEEPSPEED):
        raise InputError(
            f"{checkpoint} has no global_step folder with DeepSpeed's optimizer states: it was saved with "
            "save_only_model or without DeepSpeed. Resume without DeepSpeed, or start a new run from its model with "
            f"--model_name_or_path {checkpoint}"
        )


def _shared_state(checkpoint: Path) -> dict[str, Any]:
    return state_of_rank(checkpoint, 0, mapped=True) or {}


def _others(checkpoint: Path) -> list[Path]:
    """The run's other good checkpoints, the newest first."""
    named = re.fullmatch(r"checkpoint-\d+", checkpoint.name)
    siblings = checkpoints(checkpoint.parent) if named else []
    return [other for other in siblings if other != checkpoint and find_corruption(other) is None]


def _has(checkpoint: Path, *patterns: str) -> bool:
    return any(next(checkpoint.glob(pattern), None) is not None for pattern in patterns)


def _counted(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"


def _are(processes: int) -> str:
    return f"{'is' if processes == 1 else 'are'} {processes}"
