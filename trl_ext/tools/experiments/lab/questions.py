"""Questions that a small grid of runs answers: read from YAML, checked, and turned into commands.

A lab is a folder of YAML files: `lab.yaml` says what all its runs have in common, every other file is a question.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.registry import unknown
from trl_ext.tools.experiments.lab.preregistration import Hypothesis, read_hypothesis, unmeasured
from trl_ext.tools.experiments.preflight import check_runs
from trl_ext.tools.experiments.runspec import (
    GRPO,
    RunSpec,
    Settings,
    from_fields,
    named_in_errors,
    read_experiment,
    refuse_taken,
)

COMMON = "lab.yaml"
SEEDS = (0, 1, 2)  # of a question without a hypothesis


@dataclass(frozen=True)
class Lab:
    """What all runs of a lab have in common."""

    config: str  # GRPO's YAML file, relative to the lab's folder
    settings: Settings = field(default_factory=dict)  # of all its runs, over that file's
    recipes: Mapping[str, Settings] = field(default_factory=dict)  # `config` and `settings` of others of `RECIPES`

    def base(self, recipe: str) -> RunSpec:
        """What all its runs of a recipe start from; a ValueError if the lab has nothing, or something wrong, for it."""
        known = {GRPO: {"config": self.config, "settings": self.settings}, **self.recipes}
        if recipe not in known:
            raise unknown("recipe", recipe, known)
        with named_in_errors(f"recipes: {recipe}"):
            base = from_fields(known[recipe], RunSpec, recipe=recipe)
            if base.config is None or base.recipe != recipe:
                raise ValueError(f"config and settings are needed, got {', '.join(known[recipe])}")
        return base


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
        refuse_taken(self.settings, "the lab")
        for label, settings in self.cells.items():
            refuse_taken(settings, "the lab", where=f"cell {label}")
        self.hypothesis  # noqa: B018, refuses one that cannot be read

    @property
    def hypothesis(self) -> Hypothesis | None:
        """What is preregistered; None where nothing is."""
        return None if self.preregistered is None else read_hypothesis(self.preregistered, self.cells)

    @property
    def seeds(self) -> Sequence[int]:
        """Those of the hypothesis."""
        return SEEDS if (hypothesis := self.hypothesis) is None else hypothesis.seeds


def read_lab(folder: Path) -> Lab:
    """`lab.yaml` of a folder; an InputError if it cannot be read, or has fields that are not a lab's."""
    lab = read_experiment(folder / COMMON, Lab)
    with named_in_errors(folder / COMMON):
        for recipe in (GRPO, *lab.recipes):
            lab.base(recipe).located(folder)
    return lab


def question_names(folder: Path) -> list[str]:
    """The questions of a lab."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.name != COMMON)


def read_question(folder: Path, name: str) -> Question:
    """The question `name` of a lab; an InputError, with the cell and the setting, if there is none or it is wrong."""
    known = question_names(folder)
    if name not in known:
        raise InputError(f"{folder}: {unknown('question', name, known)}")
    return read_experiment(folder / f"{name}.yaml", Question, name=name)


def cells_of(
    lab: Lab, folder: Path, question: Question, winners: Mapping[str, Settings], more: Sequence[str] = ()
) -> dict[str, RunSpec]:
    """A question's cells by label; an InputError if a cell's recipe is not one of the lab's.

    Args:
        winners: settings of the best cell of every question that this one comes after.
        more: arguments of every cell, over its settings.
    """
    inherited: dict[str, Any] = {}
    for name in question.after:
        inherited |= winners[name]
    cells = {}
    for label, settings in question.cells.items():
        own = {**inherited, **question.settings, **settings}
        try:
            base = lab.base(str(own.pop("recipe", GRPO)))
        except ValueError as error:
            raise InputError(f"question {question.name!r}, cell {label!r}: {error}") from error
        common, config = base.settings, os.path.normpath(folder / str(base.config))
        differing = {name: value for name, value in own.items() if name not in common or common[name] != value}
        cells[label] = dataclasses.replace(base, config=config, settings=differing, common=common, more=more)
    return cells


def in_order(questions: Iterable[Question]) -> list[Question]:
    """The questions, each after those of them whose winners it starts from; an InputError where they go in a circle."""
    left, ordered = list(questions), []
    while left:
        names = {question.name for question in left}
        ready = [question for question in left if not names & set(question.after)]
        if not ready:
            raise InputError(f"these questions come after one another, in a circle: {', '.join(sorted(names))}")
        ordered += ready
        left = [question for question in left if question not in ready]
    return ordered


def check(planned: Sequence[tuple[Question, Mapping[str, RunSpec]]]) -> None:
    """Parse the arguments of every cell in a process that takes no device.

    Raises:
        InputError: with the question, the cell and what does not fit.
    """
    runs = {}
    for question, cells in planned:
        for label, cell in cells.items():
            runs[f"question {question.name!r}, cell {label!r}"] = cell
            if (hypothesis := question.hypothesis) and (
                why := unmeasured(hypothesis, {**cell.common, **cell.settings})
            ):
                raise InputError(f"question {question.name!r}, cell {label!r}: {why}")
    check_runs(runs)
