"""Provenance of a split's rows: how many there are, which of them are used, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trl_ext.redaction import redact_text


@dataclass
class Source:
    """Where the rows of a split come from.

    Attributes:
        available: rows that the split has; None of a generated dataset, which is endless.
        rows: those that are used.
        order: as they stand in the dataset, as a seeded sample draws them, or as they are generated.
        stratified_by: columns that the sample is in proportion of.
        several_boxes: places of solutions with several boxes, of which the last one is the answer.
        too_long: places of rows that are left out because their prompts are too long.
        unusable: reference answers that the run's grader can hardly accept, with their places.
        also_in_training: problems of a validation set that are in the training set too.
        columns: which are read, and how.
        first: the first row's problem and answer.
    """

    dataset: str
    split: str
    available: int | None
    rows: int
    order: Literal["stored", "sampled", "generated"]
    stratified_by: list[str] = field(default_factory=list)
    sample_seed: int = 0
    several_boxes: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    also_in_training: int = 0
    columns: str = ""
    first: str = ""

    def place(self, row: int) -> str:
        """Where a row stands: the line of a .jsonl file from 1, else the row from 0."""
        return f"line {row + 1}" if self.dataset.endswith(".jsonl") else f"row {row}"

    def file(self) -> str:
        """The dataset's name, or the path of the split's file."""
        return self.dataset.replace("{split}", self.split)

    def line(self, role: str) -> str:
        """What is to be known of the rows, as a person reads it.

        Args:
            role: what they are for, such as `train`.
        """
        of = "generated" if self.available is None else f"of {self.available}"
        known = [f"{role}: {self.rows} problems {of} ({self.file()!r}, split {self.split!r})"]
        if self.order == "sampled" and self.available != self.rows + len(self.too_long):
            by = f"stratified by {' and '.join(self.stratified_by)}" if self.stratified_by else "drawn at random"
            known.append(f"{by} with sample_seed {self.sample_seed}")
        if self.too_long:
            known.append(f"{len(self.too_long)} too long and left out: {listed(self.too_long)}")
        if self.several_boxes:
            known.append(
                f"{len(self.several_boxes)} solutions with several boxes, of which the last is taken: "
                f"{listed(self.several_boxes)}"
            )
        if self.unusable:
            known.append(
                f"{len(self.unusable)} reference answers that hardly any response can match: {listed(self.unusable, 3)}"
            )
        if self.also_in_training:
            known.append(f"{self.also_in_training} of them are in the training set too")
        if self.first:
            known.append(f"{self.columns}; the first: {self.first}")
        return redact_text("; ".join(known))

    def summary(self) -> dict[str, Any]:
        """The same for a JSON file, with every place."""
        return dict(vars(self))


def listed(places: list[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more
