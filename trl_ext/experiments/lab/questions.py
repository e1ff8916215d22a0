"""Questions that a small grid of runs answers: read from YAML, checked, and turned into commands.

A lab is a folder of YAML files: `lab.yaml` says what all its runs have in common, every other file is a question.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import InputError
from trl_ext.experiments.preflight import Planned, refusal_of
from trl_ext.io import as_flags, read_yaml
from trl_ext.redaction import redact
from trl_ext.registry import check_fields, unknown
from trl_ext.runs.recipes import RECIPES

COMMON = "lab.yaml"
GRPO = "grpo"  # the recipe of a cell that names none
_OURS = ("config", "output_dir", "resume", "seed")  # which the lab gives a run

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Lab:
    """What all runs of a lab have in common.

    Attributes:
        config: GRPO's YAML file, relative to the lab's folder.
        settings: of all its runs, over that file's.
        recipes: `config` and `settings` of other recipes, by their names in `RECIPES`.
    """

    config: str
    settings: Settings = field(default_factory=dict)
    recipes: Mapping[str, Settings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, common in self.recipes.items():
            if name not in RECIPES:
                raise unknown("recipe", name, RECIPES)
            if not {"config"} <= set(common) <= {"config", "settings"}:
                raise ValueError(f"recipes: {name}: config and settings are needed, got {', '.join(common)}")

    def of(self, recipe: str) -> tuple[str, Settings]:
        """A recipe's YAML file and settings.

        Raises:
            ValueError: the lab has none for it.
        """
        common = {GRPO: {"config": self.config, "settings": self.settings}, **self.recipes}
        if recipe not in common:
            raise unknown("recipe", recipe, common)
        return common[recipe]["config"], common[recipe].get("settings", {})


@dataclass(frozen=True)
class Question:
    """A question and its cells.

    Attributes:
        question: in words.
        cells: their settings, over the question's, by label; `recipe` among them is the cell's recipe, GRPO by default.
        reference: the cell that the others are compared with.
        settings: of all cells, over the lab's.
        after: questions whose best cells' settings this one starts from, under its own.
        published: what is known of the real model, in words.
    """

    name: str
    question: str
    cells: Mapping[str, Settings]
    reference: str
    settings: Settings = field(default_factory=dict)
    after: Sequence[str] = ()
    published: str = ""

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


@dataclass(frozen=True)
class Cell:
    """One cell's runs: their recipe and settings, without the seed.

    Attributes:
        own: settings that differ from the lab's; they name the run.
    """

    recipe: str
    config: str
    common: Settings
    own: Settings

    @property
    def arguments(self) -> list[str]:
        """Of its recipe."""
        return ["--config", self.config, *as_flags({**self.common, **self.own})]

    def run_name(self, seed: int) -> str:
        """A folder's name that says what sets the run apart, the same for every question that needs it."""
        recipe = {} if self.recipe == GRPO else {"recipe": self.recipe}
        words = [f"{name}={_short(value)}" for name, value in sorted({**recipe, **redact(dict(self.own))}.items())]
        return re.sub(r"[^\w=.,+-]", "_", ",".join([*words, f"seed={seed}"]))


def read_lab(folder: Path) -> Lab:
    """`lab.yaml` of a folder.

    Raises:
        InputError: it cannot be read, or has fields that are not a lab's.
    """
    content = _mapping(folder / COMMON)
    try:
        check_fields(content, Lab)
        lab = Lab(**content)
        configs = [lab.of(recipe)[0] for recipe in (GRPO, *lab.recipes)]
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / COMMON}: {error}") from error
    for config in configs:
        if not (folder / config).is_file():
            raise InputError(f"{folder / COMMON}: config: no file {str(folder / config)!r}")
    return lab


def question_names(folder: Path) -> list[str]:
    """The questions of a lab."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.name != COMMON)


def read_question(folder: Path, name: str) -> Question:
    """The question `name` of a lab.

    Raises:
        InputError: there is none of that name, or its file does not describe one; names the cell and the setting.
    """
    known = question_names(folder)
    if name not in known:
        raise InputError(f"{folder}: {unknown('question', name, known)}")
    path = folder / f"{name}.yaml"
    content = _mapping(path)
    try:
        check_fields(content, Question)
        return Question(**{"name": name, **content})
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: {error}") from error


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a mapping")
    return content


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True).replace('"', "") if isinstance(value, (Mapping, list)) else str(value)


def cells_of(lab: Lab, folder: Path, question: Question, winners: Mapping[str, Settings]) -> dict[str, Cell]:
    """A question's cells by label.

    Args:
        winners: settings of the best cell of every question that this one comes after.

    Raises:
        InputError: a cell's recipe is not one of the lab's.
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
    """The questions, each after those whose winners it starts from, as far as they are among them.

    Raises:
        InputError: they wait for one another.
    """
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
    """Parse the arguments of every cell in a process of its own, which takes no device.

    Args:
        planned: questions with their cells.
        more: arguments of all runs, over every setting.

    Raises:
        InputError: with the question, the cell and what does not fit.
    """
    each = [(question.name, label, cell) for question, cells in planned for label, cell in cells.items()]
    if refusal := refusal_of([Planned(cell.recipe, cell.config, [*cell.arguments, *more]) for _, _, cell in each]):
        question, label, _ = each[refusal.stage - 1]
        raise InputError(f"question {question!r}, cell {label!r}: {refusal.message}")
