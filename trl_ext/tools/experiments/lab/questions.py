"""Questions that a small grid of runs answers: read from YAML, checked, and turned into commands.

A lab is a folder of YAML files: `lab.yaml` says what all its runs have in common, every other file is a question.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trl_ext.errors import InputError
from trl_ext.io import as_flags, read_yaml
from trl_ext.redaction import redact
from trl_ext.registry import check_fields, unknown
from trl_ext.runs.recipes import RECIPES
from trl_ext.tools.experiments.lab.preregistration import Hypothesis, read_hypothesis, unmeasured
from trl_ext.tools.experiments.preflight import Planned, refusal_of

COMMON = "lab.yaml"
GRPO = "grpo"  # the recipe of a cell that names none
SEEDS = (0, 1, 2)  # of a question without a hypothesis
_LONGEST = 200  # characters of a run's name, without its seed
_OURS = ("config", "output_dir", "resume", "seed")  # which the lab gives a run

Settings = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Lab:
    """What all runs of a lab have in common."""

    config: str  # GRPO's YAML file, relative to the lab's folder
    settings: Settings = field(default_factory=dict)  # of all its runs, over that file's
    recipes: Mapping[str, Settings] = field(default_factory=dict)  # `config` and `settings` of others of `RECIPES`

    def __post_init__(self) -> None:
        for name, common in self.recipes.items():
            if name not in RECIPES:
                raise unknown("recipe", name, RECIPES)
            if not isinstance(common, Mapping) or not {"config"} <= set(common) <= {"config", "settings"}:
                raise ValueError(f"recipes: {name}: config and settings are needed, got {', '.join(common)}")

    def of(self, recipe: str) -> tuple[str, Settings]:
        """A recipe's YAML file and settings; a ValueError if the lab has none for it."""
        common = {GRPO: {"config": self.config, "settings": self.settings}, **self.recipes}
        if recipe not in common:
            raise unknown("recipe", recipe, common)
        return common[recipe]["config"], common[recipe].get("settings", {})


@dataclass(frozen=True)
class Question:
    """A question and its cells."""

    name: str
    question: str  # in words
    cells: Mapping[str, Settings]  # by label, over the question's; `recipe` among them is the cell's, GRPO by default
    reference: str  # the cell that the others are compared with
    settings: Settings = field(default_factory=dict)  # of all cells, over the lab's
    after: Sequence[str] = ()  # questions whose best cells' settings this one starts from, under its own
    published: str = ""  # what is known of the real model, in words
    preregistered: Settings | None = None  # the fields of a `Hypothesis`

    def __post_init__(self) -> None:
        if len(self.cells) < 2:
            raise ValueError(f"cells: two at least are needed to compare, got {len(self.cells)}")
        if self.reference not in self.cells:
            raise unknown("cell", str(self.reference), self.cells)
        for label, settings in {"settings": self.settings, **self.cells}.items():
            if not isinstance(settings, Mapping):
                raise ValueError(f"{label}: its settings must be a mapping, got {settings!r}")
            taken = [name for name in settings if name in _OURS]
            if taken:
                raise ValueError(f"{label}: {', '.join(taken)} is set by the lab; remove it")
        if isinstance(self.after, str):
            raise ValueError(f"after must be a list of questions, got {self.after!r}")
        self.hypothesis  # noqa: B018, refuses one that cannot be read

    @property
    def hypothesis(self) -> Hypothesis | None:
        """What is preregistered; None where nothing is."""
        return None if self.preregistered is None else read_hypothesis(self.preregistered, self.cells)

    @property
    def seeds(self) -> Sequence[int]:
        """Those of the hypothesis."""
        return SEEDS if (hypothesis := self.hypothesis) is None else hypothesis.seeds


@dataclass(frozen=True)
class Cell:
    """One cell's runs: their recipe and settings, without the seed."""

    recipe: str
    config: str
    common: Settings
    own: Settings  # those that differ from the lab's; they name the run

    @property
    def arguments(self) -> list[str]:
        """Of its recipe."""
        return ["--config", self.config, *as_flags({**self.common, **self.own})]

    def run_name(self, seed: int) -> str:
        """A folder's name that says what sets the run apart, the same for every question that needs it.

        Settings beyond `_LONGEST` characters, of the 255 that file systems allow a name, end in a digest of them all.
        """
        recipe = {} if self.recipe == GRPO else {"recipe": self.recipe}
        words = [f"{name}={_short(value)}" for name, value in sorted({**recipe, **redact(dict(self.own))}.items())]
        settings = re.sub(r"[^\w=.,+-]", "_", "".join(f"{word}," for word in words))
        if len(settings) > _LONGEST:
            settings = f"{settings[:_LONGEST]}-{hashlib.sha256(settings.encode()).hexdigest()[:12]},"
        return f"{settings}seed={seed}"


def read_lab(folder: Path) -> Lab:
    """`lab.yaml` of a folder; an InputError if it cannot be read, or has fields that are not a lab's."""
    lab = read_as(folder / COMMON, Lab)
    for recipe in (GRPO, *lab.recipes):
        config, _ = lab.of(recipe)
        if not (folder / config).is_file():
            raise InputError(f"{folder / COMMON}: config: no file {str(folder / config)!r}")
    return lab


def question_names(folder: Path) -> list[str]:
    """The questions of a lab."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.name != COMMON)


def read_question(folder: Path, name: str) -> Question:
    """The question `name` of a lab; an InputError, with the cell and the setting, if there is none or it is wrong."""
    known = question_names(folder)
    if name not in known:
        raise InputError(f"{folder}: {unknown('question', name, known)}")
    return read_as(folder / f"{name}.yaml", Question, name=name)


def read_as(path: Path, of: type[T], **more: str) -> T:
    """What a YAML file describes, and `more` that it need not say."""
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
        check_fields(content, of)
        return of(**{**more, **content})
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True).replace('"', "") if isinstance(value, (Mapping, list)) else str(value)


def cells_of(lab: Lab, folder: Path, question: Question, winners: Mapping[str, Settings]) -> dict[str, Cell]:
    """A question's cells by label; an InputError if a cell's recipe is not one of the lab's.

    The `winners` are settings of the best cell of every question that this one comes after.
    """
    inherited: dict[str, Any] = {}
    for name in question.after:
        inherited |= winners[name]
    found = {}
    for label, settings in question.cells.items():
        own = {**inherited, **question.settings, **settings}
        recipe = str(own.pop("recipe", GRPO))
        try:
            config, common = lab.of(recipe)
        except ValueError as error:
            raise InputError(f"question {question.name!r}, cell {label!r}: {error}") from error
        differing = {name: value for name, value in own.items() if name not in common or common[name] != value}
        found[label] = Cell(recipe, os.path.normpath(folder / config), common, differing)
    return found


def in_order(questions: Iterable[Question]) -> list[Question]:
    """The questions, each after those of them whose winners it starts from; an InputError where they go in a circle."""
    left, found = list(questions), []
    while left:
        names = {question.name for question in left}
        ready = [question for question in left if not names & set(question.after)]
        if not ready:
            raise InputError(f"these questions come after one another, in a circle: {', '.join(sorted(names))}")
        found += ready
        left = [question for question in left if question not in ready]
    return found


def check(planned: Sequence[tuple[Question, Mapping[str, Cell]]], more: Sequence[str] = ()) -> None:
    """Parse the arguments of every cell, and `more` over all of them, in a process that takes no device.

    Raises:
        InputError: with the question, the cell and what does not fit.
    """
    for question, cells in planned:
        for label, cell in cells.items():
            if (of := question.hypothesis) and (why := unmeasured(of, {**cell.common, **cell.own})):
                raise InputError(f"question {question.name!r}, cell {label!r}: {why}")
    each = [(question.name, label, cell) for question, cells in planned for label, cell in cells.items()]
    if refusal := refusal_of([Planned(cell.recipe, cell.config, [*cell.arguments, *more]) for _, _, cell in each]):
        name, label, _ = each[refusal.stage - 1]
        raise InputError(f"question {name!r}, cell {label!r}: {refusal.message}")
