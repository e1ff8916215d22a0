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
from trl_ext.io import as_flags
from trl_ext.redaction import redact
from trl_ext.registry import check_fields, unknown

COMMON = "lab.yaml"
RECIPE = "grpo"  # of every cell
_OURS = ("config", "output_dir", "resume", "seed")  # which the lab gives a run


@dataclass(frozen=True)
class Lab:
    """What all runs of a lab have in common.

    Attributes:
        config: the recipe's YAML file, relative to the lab's folder.
        settings: of all runs, over that file's.
    """

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A question and its cells.

    Attributes:
        question: in words.
        cells: their settings, over the question's, by label.
        reference: the cell that the others are compared with.
        settings: of all cells, over the lab's.
        published: what is known of the real model, in words.
    """

    name: str
    question: str
    cells: Mapping[str, Mapping[str, Any]]
    reference: str
    settings: Mapping[str, Any] = field(default_factory=dict)
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


def read_lab(folder: Path) -> Lab:
    """`lab.yaml` of a folder.

    Raises:
        InputError: it cannot be read, or has fields that are not a lab's.
    """
    content = _mapping(folder / COMMON)
    try:
        check_fields(content, Lab)
        lab = Lab(**content)
    except (ValueError, TypeError) as error:
        raise InputError(f"{folder / COMMON}: {error}") from error
    if not (folder / lab.config).is_file():
        raise InputError(f"{folder / COMMON}: config: no file {str(folder / lab.config)!r}")
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
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a mapping")
    return content


def run_name(settings: Mapping[str, Any], seed: int) -> str:
    """A folder's name that says what sets the run apart, the same for every question that needs it."""
    words = [f"{name}={_short(value)}" for name, value in sorted(redact(dict(settings)).items())]
    return re.sub(r"[^\w=.,+-]", "_", ",".join([*words, f"seed={seed}"]))


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True).replace('"', "") if isinstance(value, (Mapping, list)) else str(value)


def own_settings(lab: Lab, question: Question, cell: str) -> dict[str, Any]:
    """What a cell sets that the lab does not set so already."""
    own = {**question.settings, **question.cells[cell]}
    return {name: value for name, value in own.items() if name not in lab.settings or lab.settings[name] != value}


def _config(folder: Path, lab: Lab) -> str:
    return os.path.normpath(folder / lab.config)


def commands(
    lab: Lab, folder: Path, script: Path, questions: Iterable[Question], seeds: Sequence[int], more: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Script and arguments of every run that the questions need, once each, by the run's name.

    Args:
        more: arguments of all runs, over every setting.
    """
    found = {}
    for question in questions:
        for cell in question.cells:
            own = own_settings(lab, question, cell)
            for seed in seeds:
                flags = as_flags({**lab.settings, **own})
                arguments = ["--config", _config(folder, lab), *flags, *more, "--seed", str(seed)]
                found[run_name(own, seed)] = [str(script), *arguments]
    return found


def check(lab: Lab, folder: Path, questions: Iterable[Question], more: Sequence[str] = ()) -> None:
    """Parse the arguments of every cell in a process of its own, which takes no device.

    Raises:
        InputError: with the question, the cell and what does not fit.
    """
    cells = [(question, cell) for question in questions for cell in question.cells]
    flags = [as_flags({**lab.settings, **own_settings(lab, question, cell)}) for question, cell in cells]
    if refusal := refusal_of([Planned(RECIPE, _config(folder, lab), [*given, *more]) for given in flags]):
        question, cell = cells[refusal.stage - 1]
        raise InputError(f"question {question.name!r}, cell {cell!r}: {refusal.message}")
