"""What a stored evaluation was made from, and whether the same command would measure that again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.errors import InputError
from trl_ext.io import read_yaml
from trl_ext.runs.fingerprint import (
    fingerprint_of_model,
    fingerprint_of_rows,
    fingerprints_of_named_files,
    in_words,
)
from trl_ext.runs.layout import SUMMARY

if TYPE_CHECKING:
    from trl_ext.recipes.evaluation_settings import Evaluation

FINGERPRINTS = "made_from"  # in an evaluation's settings.yaml
SETTINGS = "settings.yaml"


def fingerprints(settings: Evaluation, model: str, problems: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Hashes of weights, configuration, tokenizer and rows, and of own files of grader and tools.

    Raises:
        InputError: a file is missing.
    """
    try:
        own = {"grader": " ".join(fingerprints_of_named_files(settings.grader).values())}
        own["tools"] = " ".join(fingerprints_of_named_files((settings.tools or "").split(",")).values())
        hashes = fingerprint_of_model(model) | {"rows": fingerprint_of_rows(problems)}
    except (OSError, ValueError) as error:
        raise InputError(f"model {model!r}: {error}") from error
    return hashes | {name: value for name, value in own.items() if value} | fingerprint_of_judge(settings)


def fingerprint_of_judge(settings: Evaluation) -> dict[str, str]:
    """A hash of the judge's model, rubric and sampling, if there is one."""
    return {} if settings.judge_is is None else {"judge": settings.judge_is}


def refuse_other_inputs(folder: Path, there: Mapping[str, str] | None, mine: Mapping[str, str]) -> None:
    """Refuse to show or to continue an evaluation of another model or of other rows, in one line.

    One that an earlier version finished, without fingerprints, may be shown.
    """
    finished = (folder / SUMMARY).exists()
    if there is None and finished:
        return
    if there is None:
        raise InputError(
            f"{folder} holds an unfinished evaluation of an earlier version, which did not note the model and the rows "
            "that its samples are of. Give another --output_dir, or remove it."
        )
    if changed := [name for name in {**there, **mine} if there.get(name) != mine.get(name)]:
        state = f"a finished evaluation of {_when(folder)}" if finished else "an unfinished evaluation"
        raise InputError(
            f"{folder} holds {state}, and its {in_words(changed)} {'differs' if len(changed) == 1 else 'differ'} from "
            "what is there now, so its samples are of something else. Give another --output_dir, or remove it."
        )


def shown_line(folder: Path) -> str:
    """That a finished evaluation is shown and not measured, and of when it is."""
    known = read_yaml(folder / SETTINGS).get(FINGERPRINTS)
    made_from = "of the same weights, tokenizer, rows and settings"
    if known is None:
        made_from = "by a version that kept no fingerprint of the model and the rows, so they may be others now"
    elif "weights" not in known:
        made_from = "of the same responses and settings"
    return (
        f"shown, not measured again: the evaluation of {_when(folder)}, {made_from}; remove {folder} to measure again"
    )


def _when(folder: Path) -> str:
    return datetime.fromtimestamp((folder / SUMMARY).stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
