"""What an answer can be other than an expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from trl_ext.rewards.expression import Apply, Constant, Expression, Number, Variable
from trl_ext.rewards.strict.units import Unit


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with a unit."""

    value: Answer
    unit: Unit


@dataclass(frozen=True, slots=True)
class Text:
    """Words, or the letter of a choice."""

    words: str


@dataclass(frozen=True, slots=True)
class Time:
    """A time of day; without its half it is on a clock of 12 or of 24 hours."""

    hour: int
    minute: str
    half: str | None  # am or pm

    @property
    def hour_of_24(self) -> int:
        """The hour on a clock of 24 hours; 12 am is 0."""
        return self.hour if self.half is None else self.hour % 12 + 12 * (self.half == "pm")


@dataclass(frozen=True, slots=True)
class Several:
    """Answers in any order: a list without brackets, a set, the two values of a plus-minus."""

    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tuple or an interval with its brackets; `:` for a ratio, `|` for the rows of a matrix and for each row.

    `,` marks what may be a number or a list (`100,200`), or has names (`AB=4, CD=5`), `=` the latter in the order of
    names, `::` what may be a time of day or a ratio (`9:16`).
    """

    brackets: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals or sets."""

    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """`left operator right`, with `=`, `<`, `<=`, `!=` or `in`; in a chain several hold at once."""

    sides: tuple[Answer, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A value with the name that the answer gives it: `|PQ|` in `|PQ|=3`, `x` for the set where `x<3`.

    It is not solved if the answer has a condition from which the value follows: `2x<6` instead of `x<3`.
    """

    name: str
    value: Answer
    is_solved: bool = True


@dataclass(frozen=True, slots=True)
class Progression:
    r"""`offset` plus any multiple of `step`: `\frac{\pi}{4}+n\pi` for all integers n."""

    offset: Expression
    step: Expression


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral with its base."""

    digits: str
    base: str


Answer: TypeAlias = (
    Expression | Quantity | Text | Time | Several | Ordered | Union | Relation | Named | Progression | Based
)


def is_expression(answer: Answer) -> TypeGuard[Expression]:
    """Whether an answer is a number, a constant, a variable or a function of them."""
    return isinstance(answer, (Number, Constant, Variable, Apply))


class Unreadable(ValueError):
    """This grader cannot read the text as an answer."""
