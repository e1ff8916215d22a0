r"""What an expression is for all integers in the place of a variable: `\frac{\pi}{4}+n\pi`."""

from __future__ import annotations

from fractions import Fraction

from trl_ext.rewards.expression import Apply, Expression, Number, Variable, are_equal, variables
from trl_ext.rewards.strict.answers import Answer, Progression, is_expression
from trl_ext.rewards.strict.sets import minus, substituted

PARAMETERS = frozenset("jklmn")
MAX_STEPS = 8  # between the offsets of two progressions that are the same


def as_progression(tree: Answer, name: str | None = None) -> Progression | None:
    """The values of an expression for all integers in the place of a variable, in which it is linear."""
    if not is_expression(tree):
        return None
    names = {name} if name else variables(tree) & PARAMETERS
    if len(names) != 1 or not names <= variables(tree):
        return None
    (parameter,) = names
    at_0, at_1, at_2 = (_at(tree, parameter, n) for n in range(3))
    step = minus(at_1, at_0)
    return Progression(at_0, step) if are_equal(minus(at_2, at_1), step) else None


def _at(tree: Expression, name: str, value: int) -> Expression:
    return substituted(tree, {Variable(name): Number(Fraction(value))})


def same_progression(answer: Progression, reference: Progression) -> bool:
    r"""Whether they have the same values: `\frac{5\pi}{4}+n\pi` has those of `\frac{\pi}{4}+n\pi`."""
    shift = minus(answer.offset, reference.offset)
    for step in (answer.step, Apply("negate", (answer.step,))):
        if are_equal(step, reference.step):
            steps = [Apply("multiply", (Number(Fraction(n)), step)) for n in range(-MAX_STEPS, MAX_STEPS + 1)]
            return any(are_equal(shift, distance) for distance in steps)
    return False
