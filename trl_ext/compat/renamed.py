"""Renamed settings: the old names in `RENAMED` work for one more release, with a warning.

They work as flags, in YAML files, in a config's constructor, as its attributes, and in records of earlier runs.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from trl_ext.errors import lines_in_notebook

C = TypeVar("C", bound=type)
RENAMED = {
    "skip_idle_rows": "skip_zero_advantage_rows",
    "compact_micro_batches": "dynamic_micro_batches",
    "share_prompts": "share_prompt_prefix",
    "settled_share": "uninformative_keep_prob",
    "decay_share": "lr_decay_fraction",
    "stop_below_best": "collapse_threshold",
    "stop_without_spread": "stop_after_zero_variance_steps",
}
RENAMED_IN_REWARDS = {"Verdict": "Grade", "in_format": "well_formed", "right": "correct"}  # a class and its fields
RENAMED_IN_DISCOVERY = {
    "Ran": "ProgramResult",
    "Failed": "ProgramFailure",
    "in_force": "describe_isolation",
    "Finished": "Polished",
    "finish": "polish",
    "NoAnswer": "RequestFailed",
}
RENAMED_QUESTIONS = {"length_normalisation": "length_normalization"}  # of the labs
_ALL = RENAMED | RENAMED_IN_REWARDS | RENAMED_IN_DISCOVERY | RENAMED_QUESTIONS


class RenamedWarning(DeprecationWarning):
    """A name of an earlier version was used; the message has the new one."""


def current_name(name: str, warn: bool = True) -> str:
    """The setting's name in this version, which is `name` if it was not renamed."""
    if name not in _ALL:
        return name
    if warn:
        warnings.warn(f"{name} is now called {_ALL[name]}; the next release drops the old name", RenamedWarning, 3)
    return _ALL[name]


def current_names(settings: Mapping[str, Any], warn: bool = True) -> dict[str, Any]:
    """Settings by their names in this version; a `ValueError` if one is given by both of its names."""
    for name in settings:
        if _ALL.get(name) in settings:
            raise ValueError(f"{name} and {_ALL[name]} are one setting, which was renamed; leave {name} out")
    return {current_name(name, warn): value for name, value in settings.items()}


def current_flags(arguments: Iterable[str], warn: bool = True) -> list[str]:
    """A command line whose flags have their names in this version."""
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        found.append(f"--{current_name(name, warn)}{equals}{value}" if name in RENAMED else argument)
    return found


def earlier_names_in(module: Mapping[str, object]) -> Callable[[str], object]:
    """A module's `__getattr__`, made from its `globals()`: finds what was renamed by its earlier name."""

    def earlier_name(name: str) -> object:
        if _ALL.get(name) not in module:
            raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
        return module[current_name(name)]

    return earlier_name


def accepts_earlier_names(cls: C) -> C:
    """Class decorator: the dataclass's constructor and attributes accept the earlier names of renamed fields."""
    earlier = {old for old, new in _ALL.items() if new in {f.name for f in dataclasses.fields(cls)}}
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def accept(self: object, *args: object, **kwargs: object) -> None:
        try:
            init(self, *args, **(current_names(kwargs) if kwargs and earlier & set(kwargs) else kwargs))
        except ValueError as error:  # TRL's and transformers' checks too; a notebook shows these in a few lines
            error._render_traceback_ = functools.partial(lines_in_notebook, error)  # type: ignore[attr-defined]
            raise

    def earlier_attribute(self: object, name: str) -> object:
        if name not in earlier:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self, current_name(name))

    cls.__init__ = accept  # type: ignore[misc]
    cls.__getattr__ = earlier_attribute  # type: ignore[attr-defined]
    return cls
