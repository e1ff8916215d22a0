"""What a resumed run finds: its checkpoint, whether the settings are those of the same experiment, and its logs."""

from __future__ import annotations

import dataclasses
import filecmp
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trl_ext.compat.on_resume import on_resume
from trl_ext.data.dataset import FIRST_ROWS
from trl_ext.errors import InputError
from trl_ext.io import plain
from trl_ext.redaction import redact
from trl_ext.registry import defaults_of
from trl_ext.runs.checkpoints import checkpoints, find_corruption, newest
from trl_ext.runs.layout import BENCHMARK_LOG, GENERATIONS, METRICS
from trl_ext.setting import OnResume

LOGS = (METRICS, GENERATIONS, BENCHMARK_LOG)
_SCHEDULES_WITHOUT_AN_END = ("constant", "constant_with_warmup")
_VALIDATION = (OnResume.VALIDATION, OnResume.VALIDATION_AS_USED)


@dataclass(frozen=True)
class SettingsKnowledge:
    """What each setting, by its name, means for resuming."""

    meaning: Mapping[str, OnResume]  # where another value does not simply make it another experiment
    defaults: Mapping[str, Any]  # as JSON has them: what a version had that did not know the setting

    @classmethod
    def of(cls, classes: Iterable[type]) -> SettingsKnowledge:
        """Of the settings of these dataclasses, and of what is noted next to them."""
        classes = list(classes)
        defaults = {name: value for part in classes for name, value in defaults_of(part).items()}
        known = {name: plain(value) for name, value in defaults.items() if value is not dataclasses.MISSING}
        noted = dict.fromkeys(("validated_on", "policy_is"), OnResume.VALIDATION_AS_USED)
        noted["foresee"] = OnResume.OF_PROCESS  # of a record of version 0.2, which knew check_memory by this name
        return cls(on_resume(classes) | noted, known | {"problems_are": FIRST_ROWS})

    def completed(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """An earlier record, with the default of each setting that its version did not have."""
        return {name: self.defaults[name] for name in now if name in self.defaults} | dict(before)

    def may_differ(self, name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
        """Whether a run may be resumed with another value of this setting."""
        meaning = self.meaning.get(name)
        if meaning is OnResume.LENGTH:
            return now.get("lr_scheduler_type") in _SCHEDULES_WITHOUT_AN_END
        if meaning is OnResume.VALIDATION_AS_USED:
            return before.get(name) is None
        return meaning in (OnResume.MAY_CHANGE, OnResume.OF_PROCESS)


class Difference(NamedTuple):
    """A setting that would make the resumed run another experiment."""

    name: str
    was: Any
    now: Any
    is_of_validation: bool

    def __str__(self) -> str:
        return f"{self.name}: was {self.was!r}, is {self.now!r}"


def find_checkpoint(resume: str, output_dir: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `--resume` names (`auto`: the newest good one, if there is one), and lines to print."""
    if resume == "auto":
        return newest(output_dir)
    checkpoint = Path(resume)
    if not checkpoint.is_dir():
        known = [str(path) for path in checkpoints(output_dir)]
        raise InputError(
            f"--resume {resume!r}: there is no such folder. Of {str(output_dir)!r} there are: "
            f"{', '.join(known) or 'none'}; `--resume auto` takes the newest good one"
        )
    if corruption := find_corruption(checkpoint):
        raise InputError(f"--resume {resume!r}: {corruption}; `--resume auto` takes the newest good one")
    return checkpoint, []


def recorded(part: Any) -> dict[str, Any]:
    """The settings of a dataclass that a run's files hold: all that can be given but the Hub's token."""
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.init and f.name != "hub_token"}


def settings_of(parts: Iterable[Any], **more: object) -> dict[str, Any]:
    """The settings of several dataclasses, as JSON has them."""
    settings = {name: value for part in parts for name, value in recorded(part).items()}
    as_json: dict[str, Any] = redact(plain(settings | more))
    return as_json


def differences(before: Mapping[str, Any], now: Mapping[str, Any], known: SettingsKnowledge) -> list[Difference]:
    """Each setting that would make the resumed run another experiment."""
    noted, before = before, known.completed(before, now)
    is_same_model = before.get("policy_is") is not None and before["policy_is"] == now.get("policy_is")
    where = ("policy", "model_name_or_path") if is_same_model else ()  # a folder that was moved, or written otherwise
    return [
        Difference(name, before.get(name), now.get(name), known.meaning.get(name) in _VALIDATION)
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and name not in where and not known.may_differ(name, noted, now)
        if name != "policy" or not has_same_files(Path(str(before.get(name))), Path(str(now.get(name))))
    ]


def has_same_files(folder: Path, other: Path) -> bool:
    """Whether two folders of a base policy, such as of two versions, hold the same files, but for how it was built."""
    if not (folder.is_dir() and other.is_dir()):
        return False
    names = {path.name for path in (*folder.iterdir(), *other.iterdir())} - {"recipe.json"}
    _, differing, missing = filecmp.cmpfiles(folder, other, names, shallow=False)
    return not differing and not missing


def cut_logs(folder: Path, sizes: Mapping[str, int]) -> None:
    """Take away what was logged after the checkpoint: the resumed run logs it again."""
    for path in (folder / name for name in LOGS):
        if path.exists() and path.stat().st_size > sizes.get(path.name, 0):
            os.truncate(path, sizes.get(path.name, 0))


def log_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each log, once they are on the disk."""
    sizes = {}
    for path in (folder / name for name in LOGS if (folder / name).exists()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    return sizes
