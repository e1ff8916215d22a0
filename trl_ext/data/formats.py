"""Layouts of datasets: how their columns become a problem and an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_ext.data.countdown import described
from trl_ext.generation.conversation import is_conversation

Row = Mapping[str, Any]


def value_at(row: Row, column: str) -> Any:
    """A column's value, or one inside of it: `reward_model.ground_truth`; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


@dataclass(frozen=True)
class Columns:
    """Where a row has its problem and its answer."""

    problem: str
    answer: str
    answer_source: str  # how the answer is found in its column, a name of `ANSWER_SOURCES`
    needed: tuple[str, ...] = ()  # columns by which a table is recognized
    read: Callable[[Row], dict[str, Any]] | None = None  # makes the two columns from others

    is_conversation: bool = False  # whether the problem is one, for a table to be recognized

    def __str__(self) -> str:
        made = f"{', '.join(self.needed)} -> " if self.read else ""
        return f"{made}{self.problem!r} is the problem, {self.answer!r} has the answer ({self.answer_source})"


def _read_countdown(row: Row) -> dict[str, Any]:
    return described(int(row["target"]), [int(number) for number in row["nums"]])


def _read_chat(row: Row) -> dict[str, Any]:
    said = {role: [m["content"] for m in row["messages"] if m.get("role") == role] for role in ("user", "assistant")}
    return {"problem": said["user"][0] if said["user"] else None, "answer": (said["assistant"] or [None])[-1]}


FORMATS = (
    Columns("problem", "answer", "as_is", ("problem", "answer")),  # the course's MATH
    Columns("question", "answer", "after_hashes", ("question", "answer")),  # GSM8K
    Columns("problem", "solution", "last_boxed", ("problem", "solution")),  # MATH
    Columns("problem", "answer", "as_is", ("target", "nums"), _read_countdown),  # Countdown-Tasks-3to4
    Columns("problem", "answer", "final_answer", ("messages",), _read_chat),  # Tulu 3
    Columns("prompt", "reward_model.ground_truth", "as_is", ("prompt", "reward_model"), is_conversation=True),  # verl
    Columns("prompt", "answer", "as_is", ("prompt", "answer"), is_conversation=True),  # TRL's conversations
    Columns("prompt", "solution", "last_boxed", ("prompt", "solution"), is_conversation=True),
)


def columns_of(first: Row, asked: Mapping[str, str]) -> Columns:
    """Where a table has its problems and answers: as asked for, and the rest as in the format that has its columns.

    Args:
        first: the table's first row.
        asked: fields of `Columns` that settings give; those that they leave out may be recognized.
    """
    recognized = Columns("problem", "answer", "as_is")
    for columns in FORMATS:
        agrees = all(getattr(columns, field) == name for field, name in asked.items() if field != "answer_source")
        fits = set(columns.needed) <= first.keys() and columns.is_conversation <= is_conversation(first.get("prompt"))
        if fits and agrees:
            recognized = columns
            break
    problem, answer = asked.get("problem", recognized.problem), asked.get("answer", recognized.answer)
    return replace(
        recognized, problem=problem, answer=answer, answer_source=asked.get("answer_source", recognized.answer_source)
    )
