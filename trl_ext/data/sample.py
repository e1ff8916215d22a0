"""A part of a dataset that stands for the whole of it, whatever the order of its rows is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from datasets import Dataset

Table: TypeAlias = "list[dict[str, Any]] | Dataset"

_KINDS = ("level", "subject", "type")  # columns that say what kind of problem a row is


def stratified_order(kinds: Sequence[Hashable], seed: int) -> list[int]:
    """The numbers of all rows in an order whose every prefix has each kind in proportion to the whole, to within one.

    Systematic sampling: of a kind's m rows, shuffled, the i-th has its place at (i + u) / m of the order, with one
    random u in [0, 1) for each kind. Rows of a single kind are shuffled.
    """
    rows_of: dict[Hashable, list[int]] = defaultdict(list)
    for row, kind in enumerate(kinds):
        rows_of[kind].append(row)
    draw = Random(f"sample {seed}")
    placed = []
    for rows in rows_of.values():
        draw.shuffle(rows)
        offset = draw.random()
        placed += [((i + offset) / len(rows), row) for i, row in enumerate(rows)]
    return [row for _, row in sorted(placed)]


def stratified_sample(table: Table, n: int | None, seed: int) -> tuple[list[int], list[str]]:
    """The numbers of n rows, or of all, in stratified order, and the columns that it goes by, if there are any."""
    named = [name for name in _KINDS if len(table) and name in table[0]]
    values = [[row.get(name) for row in table] if isinstance(table, list) else table[name] for name in named]
    kinds = [tuple(map(str, kind)) for kind in zip(*values, strict=True)]
    return stratified_order(kinds or [()] * len(table), seed)[:n], named
