r"""Sets of real numbers as unions of intervals: `-2x \ge -6`, `|x|<2`, `x \ne 3`, `x<1 or x>2`, `\{x \mid 1<x<2\}`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from trl_ext.rewards.expression import (
    Apply,
    Constant,
    Expression,
    Number,
    Variable,
    are_equal,
    exact_value,
    numeric_value,
    variables,
)
from trl_ext.rewards.strict.answers import Answer, Named, Ordered, Relation, Several, Union, Unreadable, is_expression

_BUILDER = re.compile(r"\\\{\s*([a-zA-Z])(?:\s*\\in\s*(?:\\mathbb\{R\}|R))?\s*[|:](.+)\\\}")
_ALL_REALS = re.compile(
    r"(?:the set of )?(?:(?:all|any|every|the) )+reals?(?: numbers?| values?| [a-z])?(?![a-z])|the set of real numbers",
    re.IGNORECASE,
)
_EXCEPT = re.compile(r"\\mathbb\{R\},? ?except (?:for )?(?:[a-z]=)?(.+)")
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INFINITY = Constant("inf")
MINUS_INFINITY = Apply("negate", (_INFINITY,))  # as the grammar reads it
REALS = Ordered("()", (MINUS_INFINITY, _INFINITY))
MAX_PARTS = 6
Link = tuple[Answer, str, Answer]


def solution_set(text: str, parse: Callable[[str], Answer]) -> Answer | None:
    """The set that a clean text describes, with the name of its unknown if it is a condition on one; else None.

    Args:
        parse: text to a tree; raises `Unreadable`.
    """
    builder = _BUILDER.fullmatch(text)
    condition = builder[2] if builder else text
    try:
        answer = _set_of(
            _EXCEPT.sub(r"\\mathbb{R}\\setminus\\{\1\\}", _ALL_REALS.sub(r"\\mathbb{R}", condition)), parse
        )
    except Unreadable:
        return None
    return None if builder and (not isinstance(answer, Named) or answer.name != builder[1]) else answer


def _set_of(condition: str, parse: Callable[[str], Answer]) -> Answer | None:
    for word in ("or", "and"):
        parts = re.split(rf"\s*(?<![a-zA-Z]){word}(?![a-zA-Z])\s*", condition)
        if 1 < len(parts) <= MAX_PARTS:
            return _combined(word, [_set_of(part, parse) for part in parts])
    tree = parse(condition)
    if isinstance(tree, Relation):
        return as_set(tree)
    if isinstance(tree, Several):
        return _combined("and", [as_set(item) for item in _exclusions(tree)])
    return tree if isinstance(tree, (Ordered, Union)) else None


def _exclusions(several: Several) -> list[Relation]:
    r"""The conditions of `x \ne 1, 2` or `x > 0, x \ne 1`, which all hold; none of `x < 1, x > 2`, which may not."""
    conditions = list[Relation]()
    for item in several.items:
        if conditions and conditions[-1].operators == ("!=",) and is_expression(item):
            item = Relation((conditions[-1].sides[0], item), ("!=",))
        if not isinstance(item, Relation):
            return []
        conditions.append(item)
    return conditions if sum(relation.operators != ("!=",) for relation in conditions) <= 1 else []


def as_set(relation: Relation) -> Named | None:
    r"""`x < 3` as `(-\infty, 3)`, `1 \le x < 3` as `[1, 3)`, `x \ne 3` as two intervals; None for anything else."""
    if relation.operators == ("in",):
        unknown, values = relation.sides
        is_set = isinstance(values, (Ordered, Union))
        return Named(unknown.name, values) if is_set and isinstance(unknown, Variable) else None
    if not set(relation.operators) <= {"<", "<=", ">", ">=", "!="}:
        return None
    return _between(relation) or _combined("and", [_solved(*link) for link in links(relation)])


def are_conditions(tree: Answer) -> bool:
    """Whether a list consists of conditions on one unknown: `x<1 and x>2` is not the list `x<1 or x>2`."""
    if not isinstance(tree, Several):
        return False
    as_sets = [as_set(item) if isinstance(item, Relation) else None for item in tree.items]
    return all(as_sets) and len({named.name for named in as_sets if named}) == 1


def links(relation: Relation) -> list[Link]:
    """The pairs of neighboring sides with the sign between them."""
    return list(zip(relation.sides, relation.operators, relation.sides[1:], strict=False))


def turned(relation: Relation) -> Relation:
    """The same, read from right to left."""
    return Relation(relation.sides[::-1], tuple(_TURNED.get(sign, sign) for sign in relation.operators[::-1]))


def minus(a: Expression, b: Expression) -> Expression:
    """`a - b`."""
    return Apply("add", (a, Apply("negate", (b,))))


def substituted(node: Expression, values: Mapping[Expression, Expression]) -> Expression:
    """`node` with other expressions in the place of some of its parts."""
    if node in values:
        return values[node]
    if isinstance(node, Apply):
        return Apply(node.function, tuple(substituted(argument, values) for argument in node.arguments))
    return node


def without(values: Answer, points: Answer) -> Answer:
    r"""`\mathbb{R}\setminus\{3\}` as `(-\infty, 3) \cup (3, \infty)`; `Unreadable` if nothing is left."""
    left: Answer | None = None
    if isinstance(values, (Ordered, Union)) and isinstance(points, Several) and all(map(is_expression, points.items)):
        left = _common([values, *(_ray("!=", point) for point in points.items if is_expression(point))])
    if left is None:
        raise Unreadable("a difference")
    return left


def _between(relation: Relation) -> Named | None:
    r"""`1 < x \le 2a`: an unknown alone on one side, between bounds that may have other unknowns."""
    relation = turned(relation) if relation.operators[0] in (">", ">=") else relation
    places = [place for place, side in enumerate(relation.sides) if isinstance(side, Variable)]
    if len(places) != 1 or places[0] > 1 or len(relation.sides) - places[0] > 2:
        return None
    if not set(relation.operators) <= {"<", "<="}:
        return None
    at = places[0]
    low: tuple[Answer, str] = (MINUS_INFINITY, "(")
    high: tuple[Answer, str] = (_INFINITY, ")")
    if at == 1:
        low = relation.sides[0], "[" if relation.operators[0] == "<=" else "("
    if at < len(relation.operators):
        high = relation.sides[at + 1], "]" if relation.operators[at] == "<=" else ")"
    unknown = relation.sides[at]
    assert isinstance(unknown, Variable)
    return Named(unknown.name, Ordered(low[1] + high[1], (low[0], high[0])))


# Solving.


def _solved(left: Answer, sign: str, right: Answer) -> Named | None:
    """The numbers for which a condition holds that is linear in one unknown or in its absolute value."""
    if not is_expression(left) or not is_expression(right):
        return None
    difference = minus(left, right)
    names = variables(difference)
    if len(names) != 1:
        return None
    (name,) = names
    bars = {bar for bar in _absolutes(difference) if variables(bar)}
    if not bars:
        values = _where_linear(difference, sign, name)
    elif len(bars) == 1 and variables(whole := substituted(difference, {(bar := bars.pop()): Variable("|")})) == {"|"}:
        values = _where_absolute(bar.arguments[0], _root(whole, sign, "|"), name)
    else:
        return None
    return None if values is None else Named(name, values, is_solved=_is_alone(left, right) or _is_alone(right, left))


def _is_alone(side: Expression, other: Expression) -> bool:
    return isinstance(side, Variable) and not variables(other)


def _where_linear(node: Expression, sign: str, name: str) -> Answer | None:
    root = _root(node, sign, name)
    return None if root is None else _ray(*root)


def _where_absolute(inner: Expression, condition: tuple[str, Expression] | None, name: str) -> Answer | None:
    """Where the absolute value of `inner` is below, above or unequal to a bound that is not negative."""
    if condition is None:
        return None
    sign, bound = condition
    size = position(bound)
    if size == 0 and sign in (">", "!="):
        return _where_linear(inner, "!=", name)
    if size is None or size <= 0:
        return None
    above = _where_linear(minus(inner, bound), sign, name)
    below = _where_linear(Apply("add", (inner, bound)), _TURNED.get(sign, sign), name)
    if above is None or below is None:
        return None
    return Union((*_intervals(above), *_intervals(below))) if sign in (">", ">=") else _intersection(above, below)


def _root(node: Expression, sign: str, name: str) -> tuple[str, Expression] | None:
    """`-2x + 6 > 0` as `x < 3`: the sign and the bound where `node` is linear in `name`; None where it is not."""
    at_0, at_1 = (substituted(node, {Variable(name): Number(Fraction(n))}) for n in (0, 1))
    offset = _simplest(at_0)
    slope = _simplest(minus(_simplest(at_1), offset))
    line = Apply("add", (Apply("multiply", (slope, Variable(name))), offset))
    rise = position(slope)
    if not rise or are_equal(slope, Number(Fraction(0))) or not are_equal(node, line):
        return None
    bound = _simplest(Apply("divide", (Apply("negate", (offset,)), slope)))
    return (sign if rise > 0 else _TURNED.get(sign, sign)), bound


def _simplest(node: Expression) -> Expression:
    value = exact_value(node)
    return node if value is None else Number(value)


def _absolutes(node: Expression) -> list[Apply]:
    if not isinstance(node, Apply):
        return []
    inner = [bar for argument in node.arguments for bar in _absolutes(argument)]
    return [node, *inner] if node.function == "absolute" else inner


# Intervals.


def _ray(sign: str, bound: Expression) -> Answer:
    below, above = Ordered("()", (MINUS_INFINITY, bound)), Ordered("()", (bound, _INFINITY))
    if sign == "!=":
        return Union((below, above))
    brackets = {"<": "()", "<=": "(]", ">": "()", ">=": "[)"}[sign]
    return Ordered(brackets, (below if sign in ("<", "<=") else above).items)


def _combined(word: str, parts: list[Answer | None]) -> Named | None:
    named = [part for part in parts if isinstance(part, Named)]
    if not parts or len(named) < len(parts) or len({part.name for part in named}) != 1:
        return None
    is_solved = all(part.is_solved for part in named)
    if word == "or":
        return Named(named[0].name, Union(tuple(item for part in named for item in _intervals(part.value))), is_solved)
    common = _common([part.value for part in named])
    return None if common is None else Named(named[0].name, common, is_solved)


def _intervals(values: Answer) -> tuple[Answer, ...]:
    return values.items if isinstance(values, Union) else (values,)


def _common(sets: Sequence[Answer]) -> Answer | None:
    common: Answer | None = sets[0]
    for values in sets[1:]:
        common = _intersection(common, values) if common else None
    return common


class _End(NamedTuple):
    place: Fraction | float
    value: Answer
    bracket: str


def _intersection(a: Answer, b: Answer) -> Answer | None:
    """The intersection of unions of intervals; None if it is empty or cannot be determined."""
    common = list[Answer]()
    for first, second in product(map(_ends, _intervals(a)), map(_ends, _intervals(b))):
        if first is None or second is None:
            return None
        low = max(first[0], second[0], key=lambda end: (end.place, end.bracket == "("))
        high = min(first[1], second[1], key=lambda end: (end.place, end.bracket == "]"))
        if low.place < high.place:
            common.append(Ordered(low.bracket + high.bracket, (low.value, high.value)))
    return common[0] if len(common) == 1 else Union(tuple(common)) if common else None


def _ends(interval: Answer) -> tuple[_End, _End] | None:
    if not isinstance(interval, Ordered) or len(interval.items) != 2 or interval.brackets in (":", "|", ","):
        return None
    (low, high), brackets = interval.items, interval.brackets
    low_place, high_place = position(low), position(high)
    if low_place is None or high_place is None:
        return None
    return _End(low_place, low, brackets[0]), _End(high_place, high, brackets[1])


def position(bound: Answer) -> Fraction | float | None:
    """Where a number lies on the line; None if it is not real or cannot be determined."""
    if bound in (MINUS_INFINITY, _INFINITY):
        return -math.inf if bound == MINUS_INFINITY else math.inf
    if not is_expression(bound) or variables(bound):
        return None
    if (exact := exact_value(bound)) is not None:
        return exact
    try:
        place = float(numeric_value(bound, {}))
    except (ArithmeticError, TypeError, ValueError):
        return None
    return place if math.isfinite(place) else None
