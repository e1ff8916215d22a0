"""A run's folder: what its files are called, and what a finished run has left there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.io import read_json

if TYPE_CHECKING:
    from trl_ext.runs.summary import RunSummary

SUMMARY, CONFIG, METRICS, GENERATIONS, CURVE = (
    "summary.json", "config.yaml", "metrics.jsonl", "generations.jsonl", "curve.png",
)  # fmt: skip
BENCHMARK_LOG = "benchmarks.jsonl"  # figures of benchmarks that were measured on the way
TEACHERS = "teachers.json"  # how good the teachers are, where that was asked for
RESOLVED = "resolved.json"  # every setting of the run as data, those at their defaults too
PARTS = "samples.rank*.jsonl"  # what the ranks of an evaluation that has not finished have graded, by any attempt
RUN_RECORD = "run.json"  # in a checkpoint: what the run has put down next to the trainer's state


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint after an optimizer step."""
    return f"checkpoint-{step}"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run."""

    path: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run has written its summary, which it does last."""
        return (self.path / SUMMARY).exists()

    def summary(self) -> RunSummary:
        """What the run has come to; a FileNotFoundError where it has not finished."""
        contents: RunSummary = read_json(self.path / SUMMARY)
        return contents


def record_in(checkpoint: Path) -> dict[str, Any] | None:
    """What the run has put down next to the trainer's state; None in a checkpoint of stock TRL."""
    path = checkpoint / RUN_RECORD
    return read_json(path) if path.exists() else None


def attempts(wanted: Path) -> list[RunFolder]:
    """`wanted-3`, `wanted-2`, `wanted`: what a recipe that was told to write there may have chosen, latest first."""
    numbered = re.compile(rf"{re.escape(wanted.name)}-\d+")  # and not another run whose name begins like this one's
    later = wanted.parent.iterdir() if wanted.parent.is_dir() else ()
    folders = [place for place in later if numbered.fullmatch(place.name)]
    ordered = sorted(folders, key=lambda place: (len(place.name), place.name), reverse=True)
    return [RunFolder(place) for place in (*ordered, wanted)]


def finished(wanted: Path) -> RunFolder | None:
    """Where a recipe that was told to write to `wanted` has finished: there or in `wanted-2`, ..., or nowhere."""
    return next((run for run in attempts(wanted) if run.is_finished), None)
