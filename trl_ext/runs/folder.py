"""A run's folder: taken by one run at a time, and what a resumed run finds there."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from trl_ext.compat.renamed import current_names
from trl_ext.compat.startup import START
from trl_ext.data.dataset import EARLIER
from trl_ext.errors import InputError
from trl_ext.evaluation.yardstick import RESOLVED, YARDSTICK
from trl_ext.io import plain
from trl_ext.redaction import redact
from trl_ext.runs.checkpoints import RUN_RECORD, checkpoints, damage, newest, set_aside

LOGS = ("metrics.jsonl", "generations.jsonl")
_LOCK = "_in_use"  # `push_to_hub` leaves it out

# Settings that change what is written down or when, and not what is learnt.
_HARMLESS = {
    "disable_tqdm", "output_dir", "project", "report_to", "resume", "resume_changed", "resume_from_checkpoint",
    "run_name", "dataloader_pin_memory", "include_num_input_tokens_seen", "restore_callback_states_from_checkpoint",
    "skip_memory_metrics", "trackio_space_id", "vllm_gpu_memory_utilization", "max_nonfinite_steps", "reward_timeout",
    "time_budget", "restore_best", "final_validation_problems", "validate_every", "validation_batch_size",
    "collapse_threshold", "stop_after_zero_variance_steps",
}  # fmt: skip
_HARMLESS_PREFIXES = (
    "do_", "eval_", "hub_", "log_", "logging_", "push_to_hub", "save_",
)  # fmt: skip
_LENGTH = {"max_steps", "n_ei_steps", "n_grpo_steps", "num_train_epochs"}
_SCHEDULES_WITHOUT_AN_END = ("constant", "constant_with_warmup")


class Clock:
    """Wall-clock of a run: since this process started, and what earlier processes of the same run used."""

    def __init__(self, spent: float = 0.0) -> None:
        self.spent = spent

    def seconds(self) -> float:
        """Seconds so far."""
        return time.time() - START + self.spent


@dataclass
class Run:
    """One run and its folder.

    Attributes:
        settings: what makes it this experiment and no other.
        checkpoint: what this process goes on from, if anything.
        validations: so far, one entry each.
        seconds_to_make_policy: that its start took to make its base policy; 0 where it was there.
        without_spread: its last logged steps in a row in which no group had different rewards.
        ended_early: the rule that ended it before its last step, if one did.
    """

    folder: Path
    settings: dict[str, Any]
    checkpoint: Path | None = None
    clock: Clock = field(default_factory=Clock)
    validations: list[dict[str, Any]] = field(default_factory=list)
    seconds_to_make_policy: float = 0.0
    without_spread: int = 0
    ended_early: str | None = None

    def record(self) -> dict[str, Any]:
        """What a checkpoint has to hold of it."""
        return {
            "settings": self.settings,
            "wall_clock_s": self.clock.seconds(),
            "validations": self.validations,
            "seconds_to_make_policy": self.seconds_to_make_policy,
            "without_spread": self.without_spread,
            "logs": log_sizes(self.folder),
        }


@contextlib.contextmanager
def open_run(
    output_dir: Path, settings: dict[str, Any], resume: str | None, changed: bool, say: Callable[[str], None]
) -> Iterator[Run]:
    """Take a run's folder while the block runs: a new one, or that of the checkpoint that the run goes on from.

    Every rank calls it; the first one decides for all.

    Args:
        output_dir: of a new run; where it holds a run already, `-2`, `-3`, ... is appended.
        resume: as `find_checkpoint` has it; None for a new run.
        changed: resume with other settings than the run has had.
        say: prints a line.

    Raises:
        InputError: the folder is in use or cannot be written, there is no such checkpoint, or the settings differ.
    """
    held, found, error = None, None, None
    if PartialState().is_main_process:
        try:
            found, held = _choose(output_dir, settings, resume, changed, say)
        except InputError as refusal:
            error = str(refusal)
    found, error = broadcast_object_list([found, error])
    if found is None:
        raise InputError(error)
    folder, checkpoint, record = found
    try:
        clock, validations = Clock(record.get("wall_clock_s", 0.0)), record.get("validations", [])
        made = record.get("seconds_to_make_policy", 0.0)
        yield Run(folder, settings, checkpoint, clock, validations, made, record.get("without_spread", 0))
    finally:
        if held is not None:
            held.release()


def _choose(
    output_dir: Path, settings: dict[str, Any], resume: str | None, changed: bool, say: Callable[[str], None]
) -> tuple[tuple[Path, Path | None, dict[str, Any]], FileLock]:
    checkpoint, skipped = find_checkpoint(resume, output_dir) if resume else (None, [])
    for line in skipped:
        say(line)
    if checkpoint is None:
        if resume:
            say(f"nothing to resume in {output_dir}: a fresh run")
        folder, held = free_folder(output_dir)
        return (folder, None, {}), held
    record = read_record(checkpoint)
    if record is None:
        say(f"{checkpoint} is of a stock trainer: the model, optimizer and schedule go on, the rest of it is new")
        folder, held = free_folder(output_dir)
        return (folder, checkpoint, {}), held
    lines = differences(record["settings"], settings)
    if lines and not changed:
        raise InputError(
            f"{checkpoint} is of another experiment:\n  " + "\n  ".join(lines) + "\nSet them back, start a new run "
            "without --resume, or ask for it with --resume_changed"
        )
    otherwise = [line for line in lines if line.partition(":")[0] in YARDSTICK]
    if otherwise:
        say(
            f"validations are not as they were ({'; '.join(otherwise)}): those so far are left out, and the policy is "
            "measured again"
        )
        record["validations"] = []
    held = lock(checkpoint.parent)
    set_aside(checkpoint)
    cut_logs(checkpoint.parent, record["logs"])
    say(f"resumed from {checkpoint}")
    return (checkpoint.parent, checkpoint, record), held


def lock(folder: Path) -> FileLock:
    """Make the folder and take it for this process, until it ends however it ends.

    Raises:
        InputError: another process has it, or nothing can be written there.
    """
    held = FileLock(folder / _LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=0)
    except Timeout as error:
        raise InputError(
            f"output_dir {str(folder)!r} is in use by another run; wait for its end, or choose another --output_dir"
        ) from error
    except OSError as error:
        raise InputError(
            f"output_dir {str(folder)!r} cannot be written ({error.strerror or error}); choose another --output_dir"
        ) from error
    return held


def free_folder(wanted: Path) -> tuple[Path, FileLock]:
    """`wanted`, or where it holds a run already the next free of `wanted-2`, `wanted-3`, ...; and its lock.

    Raises:
        InputError: nothing can be written there.
    """
    number, folder = 1, wanted
    while True:
        if not is_taken(folder):
            try:
                return folder, lock(folder)
            except InputError as error:
                if not isinstance(error.__cause__, Timeout):
                    raise
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")


def is_taken(folder: Path) -> bool:
    """Whether a run has left something there."""
    return any((folder / name).exists() for name in (*LOGS, "summary.json")) or bool(checkpoints(folder))


def find_checkpoint(resume: str, output_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` names (`auto`: the newest good one, None where there is none), and lines to print.

    Raises:
        InputError: there is no such checkpoint, or it is damaged.
    """
    if resume == "auto":
        return newest(output_dir)
    checkpoint = Path(resume)
    if not checkpoint.is_dir():
        known = [str(path) for path in checkpoints(output_dir)]
        raise InputError(
            f"--resume {resume!r}: there is no such folder. Of {str(output_dir)!r} there are: "
            f"{', '.join(known) or 'none'}; `--resume auto` takes the newest good one"
        )
    found = damage(checkpoint)
    if found:
        raise InputError(f"--resume {resume!r}: {found}; `--resume auto` takes the newest good one")
    return checkpoint, []


def read_record(checkpoint: Path) -> dict[str, Any] | None:
    """What the run has put down beside the trainer's state; None in a checkpoint of a stock trainer."""
    path = checkpoint / RUN_RECORD
    record: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return record


def settings_of(parts: Iterable[Any], **more: Any) -> dict[str, Any]:
    """Every field of the settings' dataclasses, as JSON has it."""
    found = {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part) if f.init}
    found = {name: value for name, value in found.items() if name != "hub_token"}
    as_json: dict[str, Any] = json.loads(json.dumps(redact(plain({**found, **more}))))
    return as_json


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that would make the resumed run another experiment."""
    before, now = {**EARLIER, **current_names(before, warn=False)}, {**EARLIER, **now}
    harmless = _HARMLESS | (_LENGTH if now.get("lr_scheduler_type") in _SCHEDULES_WITHOUT_AN_END else set())
    harmless |= {name for name in RESOLVED if before.get(name) is None}  # of a run that has not noted it
    return [
        f"{name}: was {before.get(name)!r}, is {now.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and name not in harmless and not name.startswith(_HARMLESS_PREFIXES)
        if name != "policy" or not has_same_files(Path(str(before.get(name))), Path(str(now.get(name))))
    ]


def has_same_files(folder: Path, other: Path) -> bool:
    """Whether two folders hold the same files, byte by byte, as those of a base policy that another version has built.

    What it was built by is no part of it: `recipe.json`.
    """
    if not (folder.is_dir() and other.is_dir()):
        return False
    names = {path.name for path in (*folder.iterdir(), *other.iterdir())} - {"recipe.json"}
    _, differing, missing = filecmp.cmpfiles(folder, other, names, shallow=False)
    return not differing and not missing


def log_sizes(folder: Path, logs: Sequence[str] = LOGS) -> dict[str, int]:
    """Bytes of each log, once they are on the disk."""
    sizes = {}
    for path in (folder / name for name in logs if (folder / name).exists()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    return sizes


def cut_logs(folder: Path, sizes: Mapping[str, int]) -> None:
    """Take away what was logged after the checkpoint: the resumed run logs it again."""
    for path in (folder / name for name in LOGS):
        if path.exists() and path.stat().st_size > sizes.get(path.name, 0):
            os.truncate(path, sizes.get(path.name, 0))
