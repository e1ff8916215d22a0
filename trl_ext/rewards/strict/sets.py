r"""Conditions on one unknown as the set of its values: `x<3`, `-2x \ge -6`, `x<1 or x>2`, `\{x \mid 1<x<2\}`."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

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
from trl_ext.rewards.strict.answers import Answer, Named, Ordered, Relation, Union, Unreadable, is_expression

_BUILDER = re.compile(r"\\\{\s*([a-zA-Z])(?:\s*\\in\s*(?:\\mathbb\s*\{?R\}?|R))?\s*[|:](.+)\\\}")
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INFINITY = Constant("inf")
MINUS_INFINITY = Apply("add", (Number(Fraction(0)), Apply("negate", (_INFINITY,))))  # as the grammar reads it
MAX_PARTS = 6


def solution_set(text: str, parse: Callable[[str], Answer]) -> Named | None:
    """The set that a clean text describes, with the name of its unknown; None if it is no condition on one.

    Args:
        parse: text to a tree; raises `Unreadable`.
    """
    builder = _BUILDER.fullmatch(text)
    condition = builder[2] if builder else text
    for word in ("or", "and"):
        parts = re.split(rf"\s*(?<![a-zA-Z]){word}(?![a-zA-Z])\s*", condition)
        if 1 < len(parts) <= MAX_PARTS:
            found = [solution_set(part, parse) for part in parts]
            return _combined(word, found) if all(found) else None  # type: ignore[arg-type]
    try:
        relation = parse(condition)
    except Unreadable:
        return None
    named = as_interval(relation) if isinstance(relation, Relation) else None
    return None if named is None or (builder and named.name != builder[1]) else named


def as_interval(relation: Relation) -> Named | None:
    r"""`x < 3` as `(-\infty, 3)`, `1 \le x < 3` as `[1, 3)`; None for what is none."""
    if not set(relation.operators) <= {"<", "<=", ">", ">="}:
        return None
    relation = _solved(relation) if len(relation.operators) == 1 else relation
    if relation.operators[0] in (">", ">="):
        relation = turned(relation)
    places = [place for place, side in enumerate(relation.sides) if isinstance(side, Variable)]
    if len(places) != 1 or places[0] > 1 or len(relation.sides) - places[0] > 2:
        return None
    if not set(relation.operators) <= {"<", "<="}:
        return None
    at, low, high, brackets = places[0], MINUS_INFINITY, _INFINITY, ["(", ")"]
    bounds: list[Answer] = [low, high]
    if at == 1:
        bounds[0], brackets[0] = relation.sides[0], "[" if relation.operators[0] == "<=" else "("
    if at < len(relation.sides) - 1:
        bounds[1], brackets[1] = relation.sides[at + 1], "]" if relation.operators[at] == "<=" else ")"
    unknown = relation.sides[at]
    assert isinstance(unknown, Variable)
    return Named(unknown.name, Ordered("".join(brackets), tuple(bounds)))


def turned(relation: Relation) -> Relation:
    """The same, read from right to left."""
    return Relation(relation.sides[::-1], tuple(_TURNED.get(sign, sign) for sign in relation.operators[::-1]))


def substituted(node: Expression, values: dict[str, Number]) -> Expression:
    """`node` with numbers in the place of its variables."""
    if isinstance(node, Variable):
        return values[node.name]
    if isinstance(node, Apply):
        return Apply(node.function, tuple(substituted(argument, values) for argument in node.arguments))
    return node


def _solved(relation: Relation) -> Relation:
    """`-2x >= -6` as `x <= 3`: linear in one unknown with rational coefficients, or as it was."""
    left, right = relation.sides
    if not is_expression(left) or not is_expression(right) or isinstance(left, Variable) or isinstance(right, Variable):
        return relation
    difference = Apply("add", (left, Apply("negate", (right,))))
    names = sorted(variables(difference))
    if len(names) != 1:
        return relation
    at = [exact_value(substituted(difference, {names[0]: Number(Fraction(n))})) for n in (0, 1)]
    if at[0] is None or at[1] is None or at[0] == at[1]:
        return relation
    slope, unknown = at[1] - at[0], Variable(names[0])
    line = Apply("add", (Apply("multiply", (Number(slope), unknown)), Number(at[0])))
    if not are_equal(difference, line):
        return relation
    sign = relation.operators[0] if slope > 0 else _TURNED[relation.operators[0]]
    return Relation((unknown, Number(-at[0] / slope)), (sign,))


def _combined(word: str, parts: list[Named]) -> Named | None:
    name = parts[0].name
    if any(part.name != name for part in parts):
        return None
    values = [part.value for part in parts]
    if word == "or":
        flat = [item for value in values for item in (value.items if isinstance(value, Union) else (value,))]
        return Named(name, Union(tuple(flat)))
    common: Answer | None = values[0]
    for value in values[1:]:
        common = _intersection(common, value)
    return None if common is None else Named(name, common)


def _intersection(a: Answer | None, b: Answer) -> Ordered | None:
    """Of two intervals; None for an empty one and for what cannot be told."""
    if not isinstance(a, Ordered) or not isinstance(b, Ordered):
        return None
    ends = [[(_position(i.items[end]), i.items[end], i.brackets[end]) for i in (a, b)] for end in (0, 1)]
    if any(position is None for pair in ends for position, _, _ in pair):
        return None
    low = max(ends[0], key=lambda end: (end[0], end[2] == "("))
    high = min(ends[1], key=lambda end: (end[0], end[2] == "]"))
    return Ordered(low[2] + high[2], (low[1], high[1])) if low[0] < high[0] else None  # type: ignore[operator]


def _position(bound: Answer) -> float | None:
    if bound in (MINUS_INFINITY, _INFINITY):
        return float("-inf") if bound == MINUS_INFINITY else float("inf")
    if not is_expression(bound) or variables(bound):
        return None
    try:
        return float(numeric_value(bound, {}))
    except (ArithmeticError, TypeError, ValueError):
        return None
