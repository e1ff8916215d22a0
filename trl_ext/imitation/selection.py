"""Which rollouts an expert-iteration step fine-tunes on: pure functions from graded rows to the rows that are kept.

A row has `question` (which of the step's questions it answers), `response`, `tokens`, `extracted` (the answer found in
it) and `outcome`; only rows with the outcome `correct` are ever kept. Order is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl_ext.evaluation.evaluator import is_correct
from trl_ext.registry import Registry

SELECTIONS = Registry("selection")

Row = dict[str, Any]


@SELECTIONS.register
def every(rows: Sequence[Row]) -> list[Row]:
    """All correct rollouts: questions that are easy now weigh more. Expert iteration as in the course handout."""
    return list(filter(is_correct, rows))


@SELECTIONS.register
def at_most(rows: Sequence[Row], *, k: int = 1) -> list[Row]:
    """The first k correct rollouts of each question, k at least 1."""
    return _select_per_question(rows, k, lambda row: 0)


@SELECTIONS.register
def shortest(rows: Sequence[Row], *, k: int = 1) -> list[Row]:
    """The k correct rollouts of each question with the fewest tokens, k at least 1."""
    return _select_per_question(rows, k, lambda row: row["tokens"])


@SELECTIONS.register
def distinct_answers(rows: Sequence[Row]) -> list[Row]:
    """Of each question's correct rollouts the first with each way to write the answer: `1/2` and `0.5` are two."""
    return _first_with(rows, lambda row: row["extracted"])


@SELECTIONS.register
def distinct_traces(rows: Sequence[Row]) -> list[Row]:
    """Each question's correct rollouts without those that say the same as an earlier one, spaces aside."""
    return _first_with(rows, lambda row: " ".join(row["response"].split()))


def _select_per_question(rows: Sequence[Row], k: int, key: Callable[[Row], Any]) -> list[Row]:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    by_question: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        if is_correct(row):
            by_question.setdefault(row["question"], []).append(place)
    kept = {p for places in by_question.values() for p in sorted(places, key=lambda p: key(rows[p]))[:k]}
    return [row for place, row in enumerate(rows) if place in kept]


def _first_with(rows: Sequence[Row], key: Callable[[Row], Any]) -> list[Row]:
    first_rows: dict[Any, Row] = {}
    for row in filter(is_correct, rows):
        first_rows.setdefault((row["question"], key(row)), row)
    return list(first_rows.values())
