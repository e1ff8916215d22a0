"""Provenance of a split's rows: how many there are, which of them are used, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trl_ext.redaction import redact_text


@dataclass
class Source:
    """Where the rows of a split come from."""

    dataset: str
    split: str
    available: int | None  # rows that the split has; None of a generated dataset, which is endless
    rows: int  # those that are used
    order: Literal["stored", "sampled", "generated"]  # the dataset's, a seeded sample's, or the generator's
    stratified_by: list[str] = field(default_factory=list)  # columns that the sample is in proportion of
    sample_seed: int = 0
    several_boxes: list[str] = field(default_factory=list)  # places of such solutions, whose last box is the answer
    too_long: list[str] = field(default_factory=list)  # places of rows left out because their prompts are too long
    unusable: list[str] = field(default_factory=list)  # answers that the grader can hardly accept, with their places
    also_in_training: int = 0  # problems of a validation set that are in the training set too
    differs: str = ""  # in what the rows are not those of the benchmark that they are read as
    passed_over: list[str] = field(default_factory=list)  # copies on the Hub that could not be read, and why
    selected: str = ""  # by what, where not all of these rows are used
    columns: str = ""  # which are read, and how
    first: str = ""  # the first row's problem and answer

    def place(self, row: int) -> str:
        """Where a row stands: the line of a .jsonl file from 1, else the row from 0."""
        return f"line {row + 1}" if self.dataset.endswith(".jsonl") else f"row {row}"

    def file(self) -> str:
        """The dataset's name, or the path of the split's file."""
        return self.dataset.replace("{split}", self.split)

    def line(self, role: str) -> str:
        """What is to be known of the rows of a role, such as `train`, as a person reads it."""
        origin = "generated" if self.available is None else f"of {self.available}"
        known = [f"{role}: {self.rows} problems {origin} ({self.file()!r}, split {self.split!r})"]
        if self.order == "sampled" and self.available != self.rows + len(self.too_long):
            by = f"stratified by {' and '.join(self.stratified_by)}" if self.stratified_by else "drawn at random"
            known.append(f"{by} with sample_seed {self.sample_seed}")
        if self.selected:
            known.append(self.selected)
        if self.passed_over:
            known.append(f"read in place of {'; '.join(self.passed_over)}")
        if self.differs:
            known.append(f"{self.differs}: what is measured is not the benchmark's figure")
        if self.too_long:
            known.append(f"{len(self.too_long)} too long and left out: {listed(self.too_long)}")
        if boxes := self.several_boxes:
            known.append(f"{len(boxes)} solutions with several boxes, of which the last is taken: {listed(boxes)}")
        if bad := self.unusable:
            known.append(f"{len(bad)} reference answers that hardly any response can match: {listed(bad, 3)}")
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
