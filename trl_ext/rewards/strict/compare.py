"""(answer, truth) -> right or wrong, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from trl_ext.rewards.expression import (
    Apply,
    Constant,
    Expression,
    Number,
    Variable,
    are_equal,
    exact_value,
    variables,
)
from trl_ext.rewards.strict.answers import Answer, Based, Ordered, Quantity, Relation, Several, Text, Union
from trl_ext.rewards.strict.clean import clean
from trl_ext.rewards.strict.read import readings

MAX_LENGTH = 600  # characters; a longer answer is right only if it is the truth but for spelling
MAX_ITEMS = 24  # of an unordered answer

_EXPRESSION = (Number, Constant, Variable, Apply)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A verdict and a short reason for the log."""

    right: bool
    reason: str


def compare(answer: str, truth: str) -> Comparison:
    """Whether `answer` is mathematically the same as `truth`; see the package for the rules."""
    if not answer.strip():
        return Comparison(False, "no answer")
    if answer.strip() == truth.strip():
        return Comparison(True, "same text")
    if max(len(answer), len(truth)) > 10 * MAX_LENGTH:
        return Comparison(False, "too long")
    answer, truth = clean(answer), clean(truth)
    if answer == truth != "":
        return Comparison(True, "same text")
    if max(len(answer), len(truth)) > MAX_LENGTH:
        return Comparison(False, "too long")
    answers, truths = readings(answer), readings(truth)
    if not answers or not truths:
        return Comparison(False, "cannot read the answer" if truths else "cannot read the truth")
    if any(equal(a, t) for a, t in product(answers, truths)):
        return Comparison(True, "same value")
    return Comparison(False, _difference(answers[0], truths[0]))


def can_read(truth: str) -> bool:
    """Whether another text than `truth` itself could equal it."""
    text = clean(truth)
    return len(text) <= MAX_LENGTH and bool(readings(text))


def _difference(answer: Answer, truth: Answer) -> str:
    if isinstance(answer, Quantity) and isinstance(truth, Quantity) and answer.unit != truth.unit:
        return "another unit"
    if isinstance(answer, Several) and not isinstance(truth, Several):
        return "more than one answer"
    return "different value"


def equal(answer: Answer, truth: Answer) -> bool:
    """Whether two readings are the same thing."""
    if isinstance(answer, _EXPRESSION) and isinstance(truth, _EXPRESSION):
        return are_equal(answer, truth)
    if isinstance(answer, Quantity) or isinstance(truth, Quantity):
        return _equal_quantities(answer, truth)
    if isinstance(answer, Relation) or isinstance(truth, Relation):
        return _equal_relations(answer, truth)
    if isinstance(answer, Several) != isinstance(truth, Several):
        return _equal_to_the_only_one(answer, truth)
    rule = _RULES.get((type(answer), type(truth)))
    if rule is None and (isinstance(answer, Based) or isinstance(truth, Based)):
        return _equal_digits(answer, truth)
    return rule is not None and rule(answer, truth)


def _equal_quantities(answer: Answer, truth: Answer) -> bool:
    if isinstance(answer, Quantity) and isinstance(truth, Quantity):
        if answer.unit.dimension != truth.unit.dimension:
            return False
        if answer.unit.size == truth.unit.size:
            return equal(answer.value, truth.value)
        return equal(_scaled(answer), _scaled(truth))
    if isinstance(truth, Quantity):  # the unit may be left out; a percentage may be a number
        is_share = truth.unit.dimension == "ratio"
        return equal(answer, truth.value) or (is_share and equal(answer, _scaled(truth)))
    assert isinstance(answer, Quantity)  # a percentage or cents are another number than the bare one
    may_be_added = answer.unit.is_listed and (answer.unit.dimension not in ("ratio", "money") or answer.unit.size == 1)
    return may_be_added and equal(answer.value, truth)


def _scaled(quantity: Quantity) -> Answer:
    if not isinstance(quantity.value, _EXPRESSION):
        return quantity.value
    return Apply("multiply", (quantity.value, Number(quantity.unit.size)))


def _equal_in_order(answer: Ordered, truth: Ordered) -> bool:
    if answer.brackets != truth.brackets or len(answer.items) != len(truth.items):
        return False
    if truth.brackets == ":" and all(isinstance(item, _EXPRESSION) for item in answer.items + truth.items):
        return _proportional(answer.items, truth.items)  # type: ignore[arg-type]
    return all(map(equal, answer.items, truth.items))


def _proportional(a: Sequence[Expression], b: Sequence[Expression]) -> bool:
    """6:4 is 3:2."""
    return all(are_equal(Apply("multiply", (x, b[0])), Apply("multiply", (y, a[0]))) for x, y in zip(a, b, strict=True))


def _equal_in_any_order(answer: Any, truth: Any) -> bool:
    if len(answer.items) != len(truth.items) or len(truth.items) > MAX_ITEMS:
        return False
    left = list(answer.items)
    for item in truth.items:
        found = next((i for i, candidate in enumerate(left) if equal(candidate, item)), None)
        if found is None:
            return False
        del left[found]
    return True


def _equal_to_the_only_one(answer: Answer, truth: Answer) -> bool:
    """A set of one is its element."""
    several, other = (answer, truth) if isinstance(answer, Several) else (truth, answer)
    assert isinstance(several, Several)
    return len(several.items) == 1 and equal(several.items[0], other)


def _equal_words(answer: str, truth: str) -> bool:
    """The half of the day may be left out."""
    if answer[-3:] in (" am", " pm") and truth[-3:] in (" am", " pm"):
        return answer == truth
    return answer.removesuffix(" am").removesuffix(" pm") == truth.removesuffix(" am").removesuffix(" pm")


def _equal_digits(answer: Answer, truth: Answer) -> bool:
    """The base may be left out."""
    based, other = (answer, truth) if isinstance(answer, Based) else (truth, answer)
    assert isinstance(based, Based)
    if isinstance(other, Based):
        return based == other
    value = exact_value(other) if isinstance(other, _EXPRESSION) else None
    return value is not None and str(value) == based.digits


_RULES: dict[tuple[type, type], Callable[[Any, Any], bool]] = {
    (Text, Text): lambda answer, truth: _equal_words(answer.words, truth.words),
    (Several, Several): _equal_in_any_order,
    (Union, Union): _equal_in_any_order,
    (Ordered, Ordered): _equal_in_order,
}


# Relations.


def _equal_relations(answer: Answer, truth: Answer) -> bool:
    if isinstance(answer, Relation) and isinstance(truth, Relation):
        return _same_relation(answer, truth)
    relation, other = (answer, truth) if isinstance(answer, Relation) else (truth, answer)
    assert isinstance(relation, Relation)
    named = _named_value(relation)
    if named is not None and equal(named, other):
        return True
    interval = _as_interval(relation)
    return interval is not None and isinstance(other, Ordered) and equal(interval, other)


def _named_value(relation: Relation) -> Answer | None:
    r"""The 5 of `x = 5`, `5 = x`, `f(x) = 5` or `x \in 5`."""
    if len(relation.operators) != 1 or relation.operators[0] not in ("=", "in"):
        return None
    left, right = relation.sides
    if _is_name(left):
        return right
    return left if relation.operators[0] == "=" and isinstance(right, Variable) else None


def _is_name(side: Answer) -> bool:
    """`x` or `f(x)`, which is read as a product of two letters."""
    if isinstance(side, Variable):
        return True
    is_product = isinstance(side, Apply) and side.function == "multiply" and len(side.arguments) == 2
    return is_product and all(isinstance(letter, Variable) for letter in side.arguments)  # type: ignore[union-attr]


def _same_relation(answer: Relation, truth: Relation) -> bool:
    if answer.operators == truth.operators and all(map(equal, answer.sides, truth.sides)):
        return True
    turned = _turned(answer)
    if turned.operators == truth.operators and all(map(equal, turned.sides, truth.sides)):
        return True
    if answer.operators == truth.operators == ("=",):
        return _same_equation(answer, truth)
    a, t = _as_interval(answer), _as_interval(truth)
    return a is not None and t is not None and _unknown(answer) == _unknown(truth) and equal(a, t)


def _turned(relation: Relation) -> Relation:
    turn = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    return Relation(relation.sides[::-1], tuple(turn.get(operator, operator) for operator in relation.operators[::-1]))


def _same_equation(answer: Relation, truth: Relation) -> bool:
    """One equation is a constant multiple of the other."""
    sides = [*answer.sides, *truth.sides]
    if not all(isinstance(side, _EXPRESSION) for side in sides):
        return False
    a, t = (Apply("add", (x, Apply("negate", (y,)))) for x, y in (answer.sides, truth.sides))  # type: ignore[arg-type]
    if variables(a) != variables(t):
        return False
    at_point = {name: Number(Fraction(37 + 17 * i, 11)) for i, name in enumerate(sorted(variables(a)))}
    scale_a, scale_t = _substituted(a, at_point), _substituted(t, at_point)
    if are_equal(scale_a, Number(Fraction(0))) or are_equal(scale_t, Number(Fraction(0))):
        return False
    return are_equal(Apply("multiply", (a, scale_t)), Apply("multiply", (t, scale_a)))


def _substituted(node: Expression, values: dict[str, Number]) -> Expression:
    if isinstance(node, Variable):
        return values[node.name]
    if isinstance(node, Apply):
        return Apply(node.function, tuple(_substituted(argument, values) for argument in node.arguments))
    return node


def _unknown(relation: Relation) -> str | None:
    names = [side.name for side in relation.sides if isinstance(side, Variable)]
    return names[0] if len(names) == 1 else None


def _as_interval(relation: Relation) -> Ordered | None:
    r"""`x < 3` as `(-\infty, 3)`, `1 \le x < 3` as `[1, 3)`; None for what is none."""
    if _unknown(relation) is None or not set(relation.operators) <= {"<", "<=", ">", ">="}:
        return None
    if relation.operators[0] in (">", ">="):
        relation = _turned(relation)
    if not set(relation.operators) <= {"<", "<="}:
        return None
    infinity = Constant("inf")
    low: tuple[Answer, str] = (Apply("add", (Number(Fraction(0)), Apply("negate", (infinity,)))), "(")
    high: tuple[Answer, str] = (infinity, ")")
    at = next(i for i, side in enumerate(relation.sides) if isinstance(side, Variable))
    if at > 1 or len(relation.sides) - at > 2:
        return None
    if at == 1:
        low = (relation.sides[0], "[" if relation.operators[0] == "<=" else "(")
    if at < len(relation.sides) - 1:
        high = (relation.sides[at + 1], "]" if relation.operators[at] == "<=" else ")")
    return Ordered(low[1] + high[1], (low[0], high[0]))
