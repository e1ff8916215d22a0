"""A run's folder: taken by one run at a time, and what a resumed run finds there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from trl_ext.errors import InputError
from trl_ext.io import print_line
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.runs.checkpoints import archive_newer, checkpoints
from trl_ext.runs.clock import Clock
from trl_ext.runs.continuation import Resuming, refuse_what_does_not_continue
from trl_ext.runs.layout import SUMMARY, record_in
from trl_ext.runs.resume import LOGS, SettingsKnowledge, cut_logs, differences, find_checkpoint, log_sizes
from trl_ext.runs.summary import ValidationEntry

_LOCK = "_in_use"  # `push_to_hub` leaves it out


@dataclass
class Run:
    """One run and its folder."""

    folder: Path
    settings: dict[str, Any]  # what makes it this experiment and no other
    checkpoint: Path | None = None  # what this process resumes from
    clock: Clock = field(default_factory=Clock)
    validations: list[ValidationEntry] = field(default_factory=list)
    seconds_to_make_policy: float = 0.0  # that its start took; 0 where the base policy was there
    zero_variance_steps: int = 0  # the last logged steps in a row in which no group had reward variance
    ended_early: str | None = None  # the rule that ended it before its last step
    owes_validation: bool = False  # of the last step, which SIGTERM ended

    def record(self) -> dict[str, Any]:
        """What a checkpoint has to hold of it."""
        return {
            "settings": self.settings,
            "wall_clock_s": self.clock.seconds(),
            "validations": self.validations,
            "seconds_to_make_policy": self.seconds_to_make_policy,
            "without_spread": self.zero_variance_steps,
            "owes_validation": self.owes_validation,
            "logs": log_sizes(self.folder),
        }


@contextlib.contextmanager
def open_run(
    output_dir: Path, settings: dict[str, Any], known: SettingsKnowledge, resume: str | None, changed: bool
) -> Iterator[Run]:
    """Take a run's folder while the block runs: a new one, or that of the checkpoint that the run resumes from.

    Every rank calls it; the first one decides for all.

    Args:
        output_dir: of a new run; where it holds a run already, `-2`, `-3`, ... is appended.
        resume: as `find_checkpoint` has it; None for a new run.
        changed: resume with other settings than the run has had.

    Raises:
        InputError: the folder is in use or cannot be written, there is no such checkpoint, or the settings differ.
    """
    with contextlib.ExitStack() as held:  # the lock, of the first rank

        def choose() -> tuple[Path, Path | None, dict[str, Any]]:
            checkpoint, record = _resumable(output_dir, settings, known, resume, changed)
            if checkpoint is None or record is None:
                folder, taken = next_free_folder(output_dir)
                held.callback(taken.release)
                return folder, checkpoint, {}
            held.callback(lock(checkpoint.parent).release)
            archive_newer(checkpoint)
            cut_logs(checkpoint.parent, record["logs"])
            print_line(f"resumed from {checkpoint}")
            return checkpoint.parent, checkpoint, record

        folder, checkpoint, record = run_on_main_and_broadcast(choose, InputError)
        clock, validations = Clock(record.get("wall_clock_s", 0.0)), record.get("validations", [])
        made = record.get("seconds_to_make_policy", 0.0)
        run = Run(folder, settings, checkpoint, clock, validations, made, record.get("without_spread", 0))
        run.owes_validation = record.get("owes_validation", False)  # earlier versions had none
        yield run


def _resumable(
    output_dir: Path, settings: dict[str, Any], known: SettingsKnowledge, resume: str | None, changed: bool
) -> tuple[Path | None, dict[str, Any] | None]:
    """The checkpoint to resume from, if any, and its record, if its settings allow it; TRL's own has none."""
    checkpoint, lines = find_checkpoint(resume, output_dir) if resume else (None, [])
    record = record_in(checkpoint) if checkpoint else None
    if checkpoint:
        refuse_what_does_not_continue(checkpoint, _resuming(settings), changed)
    if resume and checkpoint is None:
        lines.append(f"nothing to resume in {output_dir}: a fresh run")
    elif checkpoint and record is None:
        stock = "is of stock TRL: the model, optimizer and schedule resume, everything else starts fresh"
        lines.append(f"{checkpoint} {stock}")
    for line in lines:
        print_line(line)
    differing = differences(record["settings"], settings, known) if record else []
    if differing and not changed:
        raise InputError(
            f"{checkpoint} was made with different settings:\n  "
            + "\n  ".join(map(str, differing))
            + "\nSet them back, start a new run without --resume, or ask for it with --resume_changed"
        )
    if record and (changes := "; ".join(str(difference) for difference in differing if difference.is_of_validation)):
        left_out = "those so far are left out, and the policy is measured again"
        print_line(f"validations are not as they were ({changes}): {left_out}")
        record["validations"] = []
    return checkpoint, record


def _resuming(settings: Mapping[str, Any]) -> Resuming:
    """Who would resume, as far as settings say; the trainer, when it is made, looks again and knows its callbacks."""
    launched = {"DeepSpeed": "ACCELERATE_USE_DEEPSPEED", "FSDP": "ACCELERATE_USE_FSDP"}
    by = [name for name, set_by in launched.items() if os.environ.get(set_by) == "true" or settings.get(name.lower())]
    syncs = bool(settings.get("sync_ref_model"))
    return Resuming(settings.get("processes"), by[0] if by else None, syncs)


def lock(folder: Path) -> FileLock:
    """Make the folder and take it for this process, until it ends however it ends; an InputError if it is taken."""
    held = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=0)
    except OSError as error:  # which filelock's Timeout is too
        taken = "is in use by another run; wait for its end, or"
        reason = taken if isinstance(error, Timeout) else f"cannot be written ({error.strerror or error});"
        raise InputError(f"output_dir {str(folder)!r} {reason} choose another --output_dir") from error
    return held


def next_free_folder(wanted: Path) -> tuple[Path, FileLock]:
    """`wanted`, or where it holds a run already the next free of `wanted-2`, `wanted-3`, ...; and its lock."""
    number, folder = 1, wanted
    while True:
        if not holds_a_run(folder):
            try:
                return folder, lock(folder)
            except InputError as error:
                if not isinstance(error.__cause__, Timeout):
                    raise
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")


def holds_a_run(folder: Path) -> bool:
    """Whether a run has left something there."""
    return any((folder / name).exists() for name in (*LOGS, SUMMARY)) or bool(checkpoints(folder))
