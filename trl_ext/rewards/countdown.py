"""Countdown's verifier: an expression is parsed, never evaluated as code, and its numbers are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from trl_ext.rewards.cursor import Cursor, scan
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.graders import GRADERS, Grade, texts_of

MAX_CHARACTERS = 200
_TOKEN = re.compile(r"\s*(?:([0-9]{1,6})|([-+*/()]))")
_REFERENCE = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+(?:[\s,]+[0-9]+)*)\s*")
_SPELLINGS = {"×": "*", "÷": "/", "−": "-", r"\times": "*", r"\cdot": "*", r"\div": "/"}


@GRADERS.register
def countdown(responses: Sequence[str], references: Sequence[object], *, answer_format: str = "r1_zero") -> list[Grade]:
    """Correct if the answer is an expression of the given numbers, each used at most once, that equals the target.

    An equals sign and what follows it are ignored: `3 * 8 = 24` is `3 * 8`.

    Args:
        references: `target: number number ...`.

    Raises:
        UnknownName: no such answer format.
        ValueError: a reference answer has another form.
        TypeError: a response is not a text.
    """
    extract = ANSWER_FORMATS.get_function(answer_format)
    answers = [extract(response) for response in texts_of(responses)]
    return [
        Grade(True, answer, *solves(answer, reference))
        if answer is not None
        else Grade(False, None, False, "no answer")
        for answer, reference in zip(answers, references, strict=True)
    ]


def solves(expression: str, reference: object) -> tuple[bool, str]:
    """Whether an expression solves `target: number number ...`, and why not."""
    match = _REFERENCE.fullmatch(str(reference))
    if match is None:
        raise ValueError(f"a Countdown answer is `target: number number ...`, not {reference!r}")
    target, given = int(match[1]), Counter(int(number) for number in re.findall(r"[0-9]+", match[2]))
    for spelling, operator in _SPELLINGS.items():
        expression = expression.replace(spelling, operator)
    expression = expression.partition("=")[0]
    try:
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"longer than {MAX_CHARACTERS} characters")
        tokens = [match[1] or match[2] for match in scan(_TOKEN, expression)]
        value = _Parser(tokens).value()
    except (ValueError, ZeroDivisionError, RecursionError) as error:
        return False, f"not an expression: {error}"
    used = Counter(int(token) for token in tokens if token.isdigit())
    if used - given:
        return False, "uses numbers that are not given, or one too often"
    return (value == target, "equal" if value == target else f"equals {value}")


class _Parser(Cursor):
    """Recursive descent over sums, products and brackets; values are exact."""

    def value(self) -> Fraction:
        """The value of the whole text, or a ValueError or ZeroDivisionError."""
        value = self._sum()
        if self.token:
            raise ValueError(f"{self.token!r} is left over")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self.accept("+", "-"):
            value += self._product() if sign == "+" else -self._product()
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while sign := self.accept("*", "/"):
            value = value * self._atom() if sign == "*" else value / self._atom()
        return value

    def _atom(self) -> Fraction:
        token = self.take()
        if not token:
            raise ValueError("it ends too early")
        if token == "-":
            return -self._atom()
        if token == "(":
            value = self._sum()
            if self.take() != ")":
                raise ValueError("a bracket stays open")
            return value
        if not token.isdigit():
            raise ValueError(f"{token!r} where a number should be")
        return Fraction(int(token))
