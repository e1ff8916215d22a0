"""`RunSpec`: a run of a recipe that an experiment starts, and how the YAML files of experiments are read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from trl_ext.errors import InputError
from trl_ext.io import as_flags, read_yaml
from trl_ext.redaction import redact
from trl_ext.registry import defaults_of, unknown
from trl_ext.runs.recipes import RECIPES

GRPO = "grpo"  # the recipe of a run that names none
TAKEN = ("config", "output_dir", "resume", "seed")  # settings that every experiment gives its runs itself
_LONGEST = 200  # characters of a run's name, without its seed
_BY_PROGRAM: Mapping[str, bool] = {"by_program": True}  # metadata of fields that no file may have
_KINDS: Mapping[Any, tuple[Any, str]] = {  # of fields' types, what a file may have in them; names may look like numbers
    Mapping: (Mapping, "a mapping"),
    Sequence: (list, "a list"),
    list: (list, "a list"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
}

Settings = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class RunSpec:
    """A run of a recipe, without its seed and its folder."""

    recipe: str  # a name of `RECIPES`
    config: str | None = None  # its YAML file; None for the recipe's own
    settings: Settings = field(default_factory=dict)  # over that file's; they tell it from its experiment's other runs
    common: Settings = field(default_factory=dict, kw_only=True, metadata=_BY_PROGRAM)  # of all of them, under its own
    more: Sequence[str] = field(default=(), kw_only=True, metadata=_BY_PROGRAM)  # arguments of all of them, over both

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise unknown("recipe", str(self.recipe), RECIPES)

    def located(self, folder: Path) -> Self:
        """With its YAML file from that folder; a ValueError if there is none."""
        config = os.path.normpath(folder / str(self.config))
        if not os.path.isfile(config):
            raise ValueError(f"config: no file {config!r}")
        return dataclasses.replace(self, config=config)

    def arguments(self) -> list[str]:
        """Of its recipe."""
        config = [] if self.config is None else ["--config", self.config]
        return [*config, *as_flags({**self.common, **self.settings}), *self.more]

    def command(self, recipes: Path, seed: int) -> list[str]:
        """Script and arguments; `recipes` is the folder with the recipes' scripts."""
        return [str(recipes / RECIPES[self.recipe].script), *self.arguments(), "--seed", str(seed)]

    def run_name(self, seed: int) -> str:
        """A folder's name that says what sets the run apart, the same for every question that needs it.

        Settings beyond `_LONGEST` characters, of the 255 that file systems allow a name, end in a digest of them all.
        """
        recipe = {} if self.recipe == GRPO else {"recipe": self.recipe}
        words = [f"{name}={_short(value)}" for name, value in sorted({**recipe, **redact(dict(self.settings))}.items())]
        settings = re.sub(r"[^\w=.,+-]", "_", "".join(f"{word}," for word in words))
        if len(settings) > _LONGEST:
            settings = f"{settings[:_LONGEST]}-{hashlib.sha256(settings.encode()).hexdigest()[:12]},"
        return f"{settings}seed={seed}"


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True).replace('"', "") if isinstance(value, (Mapping, list)) else str(value)


def refuse_taken(settings: object, owner: str, more: Collection[str] = (), where: str = "settings") -> None:
    """Refuse settings that are none, or that the experiment gives its runs: `TAKEN`, and `more`; a ValueError."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} must be a mapping, got {settings!r}")
    if taken := [name for name in settings if str(name).replace("-", "_") in (*TAKEN, *more)]:
        raise ValueError(f"{where}: {', '.join(taken)} is set by {owner}; remove it")


@contextlib.contextmanager
def named_in_errors(place: object) -> Iterator[None]:
    """What the block finds wrong with a file or a part of it is an InputError that says where."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{place}: {error}") from error


def read_experiment(path: Path, kind: type[T], **given: Any) -> T:
    """What a YAML file describes, an object of the dataclass `kind`.

    Args:
        given: fields that the file need not have.

    Raises:
        InputError: with the file, the field, its value and the choices.
    """
    with named_in_errors(path):
        return from_fields(read_yaml(path), kind, **given)


def from_fields(content: Any, kind: type[T], **given: Any) -> T:
    """An object of a dataclass from a file's mapping over what is `given`; a ValueError if a field is missing."""
    values = {**given, **checked_fields(content, kind)}
    for name, default in defaults_of(kind).items():
        if default is dataclasses.MISSING and name not in values:
            raise ValueError(f"missing field {name!r}, got {', '.join(map(str, content)) or 'none'}")
    return kind(**values)


def checked_fields(content: Any, kind: type) -> dict[str, Any]:
    """A file's mapping, if its names are fields of a dataclass and mappings, lists and numbers are where they belong.

    Raises:
        ValueError: they are not; with the field, its value and the choices.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"not a mapping: {content!r}")
    hints = typing.get_type_hints(kind)
    fields = [each.name for each in dataclasses.fields(kind) if not each.metadata.get("by_program")]
    for name, value in content.items():
        if name not in fields:
            raise unknown("field", str(name), fields)
        parts = typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        for part in parts:
            accepted, words = _KINDS.get(typing.get_origin(part) or part, (object, ""))
            if not isinstance(value, accepted) and not (value is None and types.NoneType in parts):
                raise ValueError(f"{name} must be {words}, got {value!r}")
    return dict(content)
