"""A calculator: expressions are parsed, never evaluated as code, and every operation bounds its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

import mpmath

from trl_ext.rewards.expression import Undefined, exact_value, numeric_value, variables
from trl_ext.rewards.strict.answers import Unreadable, is_expression
from trl_ext.rewards.strict.clean import clean
from trl_ext.rewards.strict.grammar import parse
from trl_ext.turns.calls import Answer, Call

MAX_CHARACTERS = 400
DIGITS = 15  # of a value that is not rational


class Calculator:
    """The tool `calculator`, in this process."""

    def __init__(self) -> None:
        self.function = calculator

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """The values."""
        return [self._answer(call) for call in calls]

    def close(self) -> None:
        """There is nothing to end."""

    def _answer(self, call: Call) -> Answer:
        began = time.monotonic()
        try:
            text, kind = calculator(**{name: str(value) for name, value in (call.arguments or {}).items()}), "ok"
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            return Answer(f"Error: {error}", "failed", time.monotonic() - began)
        return Answer(text, kind, time.monotonic() - began)  # type: ignore[arg-type]


def calculator(expression: str) -> str:
    """Work out an arithmetic expression: exactly if its value is rational, else to 15 digits.

    Args:
        expression: numbers with + - * / ^ ! sqrt and brackets, such as (3 + 4) * 12.

    Returns:
        The value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = parse(clean(expression))
    except Unreadable as error:
        raise ValueError(f"not an expression: {error}") from None
    if not is_expression(tree):
        raise ValueError("not one expression")
    if names := variables(tree):
        raise ValueError(f"not a number: {', '.join(sorted(names))}")
    value = exact_value(tree)
    if value is not None:
        return _shown(value)
    try:
        with mpmath.workdps(DIGITS + 5):
            return str(mpmath.nstr(numeric_value(tree, {}), DIGITS))
    except Undefined:
        raise ValueError("it has no value, or one that is too large") from None


def _shown(value: Fraction) -> str:
    """A whole number, or a fraction with its decimals."""
    try:
        if value.denominator == 1:
            return str(value.numerator)
        with mpmath.workdps(DIGITS + 5):
            decimals = mpmath.nstr(mpmath.mpf(value.numerator) / value.denominator, DIGITS)
        return f"{value} = {decimals}"
    except ValueError:  # Python's limit on the digits of a number
        raise ValueError("the value has too many digits") from None
