r"""Are two equal answers in the same form? `1+x` and `x+1` are; `\frac24` and `\frac12` are not."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from itertools import product

from trl_ext.rewards.expression import Apply, Number
from trl_ext.rewards.strict.answers import Answer, Named, Ordered, Quantity, Relation, Several, Union
from trl_ext.rewards.strict.forms import factors
from trl_ext.rewards.strict.read import readings
from trl_ext.rewards.strict.result import Result

_ONE = Number(Fraction(1))


def has_same_form(answer: str, reference: str) -> Result:
    """Whether two texts differ in the order of terms, factors and items, and in names, at most."""
    forms = [{_form(reading) for reading in readings(text)} for text in (answer, reference)]
    return Result(any(a == t for a, t in product(*forms)), "form")


def _form(answer: Answer) -> Hashable:
    if isinstance(answer, (Named, Quantity)):
        return _form(answer.value)
    if isinstance(answer, Relation):
        return _form(answer.sides[-1]) if answer.operators == ("=",) else (answer.operators, *map(_form, answer.sides))
    if isinstance(answer, Ordered):
        return (answer.brackets, *map(_form, answer.items))
    if isinstance(answer, (Several, Union)):
        return (type(answer).__name__, _in_any_order(answer.items))
    if not isinstance(answer, Apply):
        return answer
    if answer.function == "add":
        return ("add", _in_any_order(answer.arguments))
    if answer.function == "negate" and isinstance(answer.arguments[0], Number):
        return Number(-answer.arguments[0].value)  # as a whole number is read
    if answer.function in ("multiply", "divide", "negate"):
        above, below = factors(answer)
        above = [factor for factor in above if factor != _ONE]
        return ("multiply", _is_negative(answer), _in_any_order(above), _in_any_order(below))
    return (answer.function, *map(_form, answer.arguments))


def _in_any_order(items: Sequence[Answer]) -> Hashable:
    return tuple(sorted(repr(_form(item)) for item in items))


def _is_negative(answer: Answer) -> bool:
    if not isinstance(answer, Apply):
        return False
    if answer.function == "negate":
        return not _is_negative(answer.arguments[0])
    if answer.function in ("multiply", "divide"):
        return sum(map(_is_negative, answer.arguments)) % 2 == 1
    return False
