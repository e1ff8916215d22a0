"""Whether two readings are the same thing: one rule for each pair of kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

from trl_ext.rewards.expression import Apply, Expression, Number, Variable, are_equal, exact_value, variables
from trl_ext.rewards.residues import may_be_large, same_residues
from trl_ext.rewards.strict.answers import (
    Answer,
    Based,
    Named,
    Ordered,
    Progression,
    Quantity,
    Relation,
    Several,
    Text,
    Time,
    Union,
    is_expression,
)
from trl_ext.rewards.strict.progressions import as_progression, same_progression
from trl_ext.rewards.strict.sets import Link, as_set, links, minus, position, substituted, turned

MAX_ITEMS = 24  # of an unordered answer

T = TypeVar("T")


def equal(answer: Answer, reference: Answer) -> bool:
    """Whether two readings are the same thing."""
    if is_expression(answer) and is_expression(reference):
        return are_equal(answer, reference) or _equal_beyond_bounds(answer, reference)
    if isinstance(answer, Named) or isinstance(reference, Named):
        return _equal_named(answer, reference)
    if isinstance(answer, Quantity) or isinstance(reference, Quantity):
        return _equal_quantities(answer, reference)
    if isinstance(answer, Relation) or isinstance(reference, Relation):
        return _equal_relations(answer, reference)
    for inexplicit, other in ((answer, reference), (reference, answer)):
        if isinstance(inexplicit, Ordered) and (items := _items_meant(inexplicit, other)) is not None:
            return len(inexplicit.items) == len(items) and all(map(equal, inexplicit.items, items))
    if isinstance(answer, Several) != isinstance(reference, Several):
        return _equals_singleton(answer, reference)
    if isinstance(answer, Progression) != isinstance(reference, Progression):
        return _equals_progression(answer, reference)
    rule = _RULES.get((type(answer), type(reference)))
    return rule is not None and rule(answer, reference)


def _equal_beyond_bounds(answer: Expression, reference: Expression) -> bool:
    """Whether two rational numbers are the same, one of which is too large to compute."""
    if not may_be_large(answer) and not may_be_large(reference):
        return False
    is_computed = exact_value(answer) is not None and exact_value(reference) is not None
    return not is_computed and same_residues(answer, reference) is True


def _items_meant(inexplicit: Ordered, other: Answer) -> tuple[Answer, ...] | None:
    """The items of `other` if it shows that `100,200` is a list, or that `9:16` is a ratio and not a time."""
    if inexplicit.brackets == "::":
        return other.items if isinstance(other, Ordered) and other.brackets == ":" else None
    return other.items if inexplicit.brackets == "," and isinstance(other, Several) else None


def _equal_quantities(answer: Answer, reference: Answer) -> bool:
    if isinstance(answer, Quantity) and isinstance(reference, Quantity):
        is_temperature = answer.unit.dimension == "angle" and reference.unit.dimension.startswith("degree ")
        if answer.unit.dimension != reference.unit.dimension and not is_temperature:
            return False
        if answer.unit.size == reference.unit.size:
            return equal(answer.value, reference.value)
        scaled = [_scaled(one.value, one.unit.size) for one in (answer, reference)]
        return scaled[0] is not None and scaled[1] is not None and equal(scaled[0], scaled[1])
    if _has_unit(answer) and _has_unit(reference):  # of an item on the one side, of all items on the other
        return False
    if isinstance(reference, Quantity):  # the unit may be left out; a percentage may be a number
        is_ratio = reference.unit.dimension == "ratio"
        scaled_reference = _scaled(reference.value, reference.unit.size) if is_ratio else None
        return equal(answer, reference.value) or (scaled_reference is not None and equal(answer, scaled_reference))
    assert isinstance(answer, Quantity)  # 5% and 5 cents are not the number 5
    may_be_added = answer.unit.is_listed and (answer.unit.dimension not in ("ratio", "money") or answer.unit.size == 1)
    return may_be_added and equal(answer.value, reference)


def _has_unit(answer: Answer) -> bool:
    """Whether an answer is a quantity, or has one among its items."""
    items = answer.items if isinstance(answer, (Several, Ordered, Union)) else ()
    return isinstance(answer, Quantity) or any(map(_has_unit, items))


def _scaled(value: Answer, size: Fraction) -> Answer | None:
    """A value, or each item of a list, in the base of its unit's dimension; None for what has no such value."""
    if isinstance(value, (Several, Ordered)) and not (isinstance(value, Ordered) and value.brackets in (":", "::")):
        items = [_scaled(item, size) for item in value.items]
        return None if None in items else replace(value, items=tuple(items))  # type: ignore[arg-type]
    return Apply("multiply", (value, Number(size))) if is_expression(value) else None


def _equal_in_order(answer: Ordered, reference: Ordered) -> bool:
    if answer.brackets != reference.brackets or len(answer.items) != len(reference.items):
        return False
    if reference.brackets == ":" and all(map(is_expression, answer.items + reference.items)):
        return _proportional(answer.items, reference.items)  # type: ignore[arg-type]
    return all(map(equal, answer.items, reference.items))


def _proportional(a: Sequence[Expression], b: Sequence[Expression]) -> bool:
    """`6:4` is `3:2`."""
    return all(are_equal(Apply("multiply", (x, b[0])), Apply("multiply", (y, a[0]))) for x, y in zip(a, b, strict=True))


def _equal_in_any_order(answer: Several | Union, reference: Several | Union) -> bool:
    return len(reference.items) <= MAX_ITEMS and _pair_up(answer.items, reference.items, equal)


def _pair_up(answers: Sequence[T], references: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether the items are the same in some order."""
    if len(answers) != len(references):
        return False
    left = list(answers)
    for item in references:
        partner = next((i for i, candidate in enumerate(left) if same(candidate, item)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _equals_singleton(answer: Answer, reference: Answer) -> bool:
    """A set of one is its element."""
    several, other = (answer, reference) if isinstance(answer, Several) else (reference, answer)
    assert isinstance(several, Several)
    return len(several.items) == 1 and equal(several.items[0], other)


def _equals_progression(answer: Answer, reference: Answer) -> bool:
    """One side says that it is for all integers; the other may leave that out."""
    pair = [one if isinstance(one, Progression) else as_progression(one) for one in (answer, reference)]
    return pair[0] is not None and pair[1] is not None and same_progression(pair[0], pair[1])


def _equal_times(answer: Time, reference: Time) -> bool:
    """`am`/`pm` may be omitted on one side."""
    if answer.minute != reference.minute:
        return False
    is_omitted = (answer.half is None) != (reference.half is None)
    return answer.hour_of_24 == reference.hour_of_24 or (is_omitted and answer.hour == reference.hour)


def _equal_named(answer: Answer, reference: Answer) -> bool:
    """A name may be left out; given on both sides it is the same."""
    if isinstance(answer, Named) and isinstance(reference, Named):
        return answer.name == reference.name and equal(answer.value, reference.value)
    named, other = (answer, reference) if isinstance(answer, Named) else (reference, answer)
    assert isinstance(named, Named)
    if isinstance(other, Relation):
        left = other.sides[0]
        is_same = isinstance(left, Variable) and left.name == named.name and other.operators == ("=",)
        return is_same and equal(named.value, other.sides[1])
    return equal(named.value, other)


_RULES: dict[tuple[type, type], Callable[[Any, Any], bool]] = {
    (Text, Text): lambda answer, reference: answer == reference,
    (Time, Time): _equal_times,
    (Several, Several): _equal_in_any_order,
    (Union, Union): _equal_in_any_order,
    (Ordered, Ordered): _equal_in_order,
    (Progression, Progression): same_progression,
    (Based, Based): lambda answer, reference: answer == reference,
}


# Relations.

_STRICTNESS = {"=": "=", "!=": "!=", "<": "<", ">": "<", "<=": "<=", ">=": "<="}  # read in either direction


def _equal_relations(answer: Answer, reference: Answer) -> bool:
    if isinstance(answer, Relation) and isinstance(reference, Relation):
        return _same_relation(answer, reference)
    relation, other = (answer, reference) if isinstance(answer, Relation) else (reference, answer)
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


def _same_relation(answer: Relation, reference: Relation) -> bool:
    for same in (answer, turned(answer)):
        if same.operators == reference.operators and all(map(equal, same.sides, reference.sides)):
            return True
    if _pair_up(links(answer), links(reference), _same_link):  # as in `2 < 2x+2y` and `-x-y < -1`
        return True
    a, t = as_set(answer), as_set(reference)
    return a is not None and t is not None and equal(a, t)


def _same_link(answer: Link, reference: Link) -> bool:
    """Whether one is a constant multiple of the other, which turns the sign of an inequality if it is negative."""
    if _STRICTNESS.get(answer[1]) != _STRICTNESS.get(reference[1], ""):
        return False
    sides = (answer[0], answer[2], reference[0], reference[2])
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
        is_turned = (answer[1] in (">", ">=")) != (reference[1] in (">", ">="))
        ratio = position(Apply("divide", (scale_a, scale_t)))
        if ratio is None or (ratio < 0) != is_turned:
            return False
    return are_equal(Apply("multiply", (a, scale_t)), Apply("multiply", (t, scale_a)))
