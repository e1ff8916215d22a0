"""Whether two readings are the same thing: one rule for each pair of kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from trl_ext.rewards.expression import Apply, Expression, Number, Variable, are_equal, variables
from trl_ext.rewards.strict.answers import (
    Answer,
    Based,
    Named,
    Ordered,
    Quantity,
    Relation,
    Several,
    Text,
    Time,
    Union,
    is_expression,
)
from trl_ext.rewards.strict.sets import Link, as_set, links, minus, position, substituted, turned

MAX_ITEMS = 24  # of an unordered answer

T = TypeVar("T")


def equal(answer: Answer, truth: Answer) -> bool:
    """Whether two readings are the same thing."""
    if is_expression(answer) and is_expression(truth):
        return are_equal(answer, truth)
    if isinstance(answer, Named) or isinstance(truth, Named):
        return _equal_named(answer, truth)
    if isinstance(answer, Quantity) or isinstance(truth, Quantity):
        return _equal_quantities(answer, truth)
    if isinstance(answer, Relation) or isinstance(truth, Relation):
        return _equal_relations(answer, truth)
    for inexplicit, other in ((answer, truth), (truth, answer)):
        if isinstance(inexplicit, Ordered) and (items := _items_meant(inexplicit, other)) is not None:
            return len(inexplicit.items) == len(items) and all(map(equal, inexplicit.items, items))
    if isinstance(answer, Several) != isinstance(truth, Several):
        return _equals_singleton(answer, truth)
    rule = _RULES.get((type(answer), type(truth)))
    return rule is not None and rule(answer, truth)


def _items_meant(inexplicit: Ordered, other: Answer) -> tuple[Answer, ...] | None:
    """The items of `other` if it settles that `100,200` is a list and no number, or `9:16` a ratio and no time."""
    if inexplicit.brackets == "::":
        return other.items if isinstance(other, Ordered) and other.brackets == ":" else None
    return other.items if inexplicit.brackets == "," and isinstance(other, Several) else None


def _equal_quantities(answer: Answer, truth: Answer) -> bool:
    if isinstance(answer, Quantity) and isinstance(truth, Quantity):
        if answer.unit.dimension != truth.unit.dimension:
            return False
        if answer.unit.size == truth.unit.size:
            return equal(answer.value, truth.value)
        return equal(_scaled(answer), _scaled(truth))
    if isinstance(truth, Quantity):  # the unit may be left out; a percentage may be a number
        is_ratio = truth.unit.dimension == "ratio"
        return equal(answer, truth.value) or (is_ratio and equal(answer, _scaled(truth)))
    assert isinstance(answer, Quantity)  # 5% and 5 cents are not the number 5
    may_be_added = answer.unit.is_listed and (answer.unit.dimension not in ("ratio", "money") or answer.unit.size == 1)
    return may_be_added and equal(answer.value, truth)


def _scaled(quantity: Quantity) -> Answer:
    if not is_expression(quantity.value):
        return quantity.value
    return Apply("multiply", (quantity.value, Number(quantity.unit.size)))


def _equal_in_order(answer: Ordered, truth: Ordered) -> bool:
    if answer.brackets != truth.brackets or len(answer.items) != len(truth.items):
        return False
    if truth.brackets == ":" and all(map(is_expression, answer.items + truth.items)):
        return _proportional(answer.items, truth.items)  # type: ignore[arg-type]
    return all(map(equal, answer.items, truth.items))


def _proportional(a: Sequence[Expression], b: Sequence[Expression]) -> bool:
    """6:4 is 3:2."""
    return all(are_equal(Apply("multiply", (x, b[0])), Apply("multiply", (y, a[0]))) for x, y in zip(a, b, strict=True))


def _equal_in_any_order(answer: Several | Union, truth: Several | Union) -> bool:
    return len(truth.items) <= MAX_ITEMS and _pair_up(answer.items, truth.items, equal)


def _pair_up(answers: Sequence[T], truths: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether the items are the same in some order."""
    if len(answers) != len(truths):
        return False
    left = list(answers)
    for item in truths:
        found = next((i for i, candidate in enumerate(left) if same(candidate, item)), None)
        if found is None:
            return False
        del left[found]
    return True


def _equals_singleton(answer: Answer, truth: Answer) -> bool:
    """A set of one is its element."""
    several, other = (answer, truth) if isinstance(answer, Several) else (truth, answer)
    assert isinstance(several, Several)
    return len(several.items) == 1 and equal(several.items[0], other)


def _equal_times(answer: Time, truth: Time) -> bool:
    """`am`/`pm` may be omitted on one side."""
    if answer.minute != truth.minute:
        return False
    is_omitted = (answer.half is None) != (truth.half is None)
    return answer.hour_of_24 == truth.hour_of_24 or (is_omitted and answer.hour == truth.hour)


def _equal_named(answer: Answer, truth: Answer) -> bool:
    """A name may be left out; given on both sides it is the same."""
    if isinstance(answer, Named) and isinstance(truth, Named):
        return answer.name == truth.name and equal(answer.value, truth.value)
    named, other = (answer, truth) if isinstance(answer, Named) else (truth, answer)
    assert isinstance(named, Named)
    if isinstance(other, Relation):
        left = other.sides[0]
        is_same = isinstance(left, Variable) and left.name == named.name and other.operators == ("=",)
        return is_same and equal(named.value, other.sides[1])
    return equal(named.value, other)


_RULES: dict[tuple[type, type], Callable[[Any, Any], bool]] = {
    (Text, Text): lambda answer, truth: answer == truth,
    (Time, Time): _equal_times,
    (Several, Several): _equal_in_any_order,
    (Union, Union): _equal_in_any_order,
    (Ordered, Ordered): _equal_in_order,
    (Based, Based): lambda answer, truth: answer == truth,
}


# Relations.

_STRICTNESS = {"=": "=", "!=": "!=", "<": "<", ">": "<", "<=": "<=", ">=": "<="}  # read in either direction


def _equal_relations(answer: Answer, truth: Answer) -> bool:
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        return _same_relation(answer, truth)
    relation, other = (answer, truth) if isinstance(answer, Relation) else (truth, answer)
    assert isinstance(relation, Relation)
    named = _named_value(relation)
    return named is not None and equal(named, other)


def _named_value(relation: Relation) -> Answer | None:
    r"""The 5 of `x = 5`, `5 = x` or `x \in 5`."""
    if len(relation.operators) != 1 or relation.operators[0] not in ("=", "in"):
        return None
    left, right = relation.sides
    if isinstance(left, Variable):
        return right
    return left if relation.operators[0] == "=" and isinstance(right, Variable) else None


def _same_relation(answer: Relation, truth: Relation) -> bool:
    if answer.operators == truth.operators and all(map(equal, answer.sides, truth.sides)):
        return True
    backwards = turned(answer)
    if backwards.operators == truth.operators and all(map(equal, backwards.sides, truth.sides)):
        return True
    if _pair_up(links(answer), links(truth), _same_link):  # as in `2 < 2x+2y` and `-x-y < -1`
        return True
    a, t = as_set(answer), as_set(truth)
    return a is not None and t is not None and equal(a, t)


def _same_link(answer: Link, truth: Link) -> bool:
    """Whether one is a constant multiple of the other, which turns the sign of an inequality if it is negative."""
    if _STRICTNESS.get(answer[1]) != _STRICTNESS.get(truth[1], ""):
        return False
    sides = (answer[0], answer[2], truth[0], truth[2])
    if not all(map(is_expression, sides)):
        return False
    a, t = minus(*sides[:2]), minus(*sides[2:])  # type: ignore[arg-type]
    if not variables(a) or variables(a) != variables(t):  # 1 < 2 is not 3 < 4
        return False
    values: dict[Expression, Expression] = {
        Variable(name): Number(Fraction(37 + 17 * i, 11)) for i, name in enumerate(sorted(variables(a)))
    }
    scale_a, scale_t = substituted(a, values), substituted(t, values)
    if are_equal(scale_a, Number(Fraction(0))) or are_equal(scale_t, Number(Fraction(0))):
        return False
    if _STRICTNESS[answer[1]] in ("<", "<="):
        is_turned = (answer[1] in (">", ">=")) != (truth[1] in (">", ">="))
        ratio = position(Apply("divide", (scale_a, scale_t)))
        if ratio is None or (ratio < 0) != is_turned:
            return False
    return are_equal(Apply("multiply", (a, scale_t)), Apply("multiply", (t, scale_a)))
