r"""Is an answer worked out as far as the reference answer is? `17+25` is not for 42, nor `2x+4=10` for `x=3`.

Asked of answers that are equal to the reference answer. What the reference answer has left to do, the answer may have
left to do as well: `2^{100}-1` for `4^{50}-1`.
"""

from __future__ import annotations

from trl_ext.rewards.expression import Expression, Number, Variable, variables
from trl_ext.rewards.strict.answers import (
    Answer,
    Named,
    Ordered,
    Quantity,
    Relation,
    Several,
    Union,
    is_expression,
)
from trl_ext.rewards.strict.forms import (
    EXPAND,
    FRACTION,
    contains,
    factor_count,
    has_function,
    has_reciprocal,
    unfinished_sides,
    work_left,
)

NOT_WORKED_OUT, NOT_EXPANDED, NOT_FACTORED = "not worked out", "not multiplied out", "not factored"
_ORDER = ("", NOT_EXPANDED, NOT_FACTORED, NOT_WORKED_OUT)


def left_to_do(answer: Answer, reference: Answer) -> str:
    """Why an answer that equals the reference is not worked out as far; the empty text if it is."""
    if answer == reference:
        return ""
    if isinstance(answer, Named) and not answer.is_solved and not _is_unsolved(reference):
        return NOT_WORKED_OUT
    if isinstance(answer, Relation) and isinstance(reference, Relation):
        return _in_relation(answer, reference)
    answers, references = _items(answer), _items(reference)
    if answers != [answer] or references != [reference]:
        return max((_least(item, references) for item in answers), key=_ORDER.index, default="")
    return _in_expression(answer, reference) if is_expression(answer) and is_expression(reference) else ""


def _least(item: Answer, references: list[Answer]) -> str:
    return min((left_to_do(item, reference) for reference in references), key=_ORDER.index, default="")


def least(reasons: list[str]) -> str:
    """The reason that says the least against an answer with several readings."""
    return min(reasons, key=_ORDER.index)


def _items(answer: Answer) -> list[Answer]:
    """What is inside of an answer that is not an expression."""
    if isinstance(answer, (Named, Quantity)):
        return [answer.value]
    if isinstance(answer, (Several, Ordered, Union)):
        return list(answer.items)
    if isinstance(answer, Relation):
        return [side for side in answer.sides if not isinstance(side, Variable)] or [answer]
    return [answer]


def _in_expression(answer: Expression, reference: Expression) -> str:
    if isinstance(answer, Number):
        return ""
    names = variables(reference)
    if not variables(answer) <= names:
        return NOT_WORKED_OUT
    left = _left(answer)
    if left:
        left -= _left(reference)
        left -= {"function"} if has_function(reference) else set()
        left -= {FRACTION} if has_reciprocal(reference) else set()
    if left - {EXPAND}:
        return NOT_WORKED_OUT
    if left:
        return NOT_EXPANDED
    wanted = factor_count(reference) if names else 0
    return NOT_FACTORED if wanted > 1 and factor_count(answer) < wanted else ""


def _left(node: Expression) -> set[str]:
    return {*work_left(node), *(["quotient"] if contains(node, "quotient") else [])}


def _in_relation(answer: Relation, reference: Relation) -> str:
    unknowns = _solved_for(reference)
    if not unknowns:
        return NOT_WORKED_OUT if unfinished_sides(answer.sides) - unfinished_sides(reference.sides) else ""
    if not unknowns & _solved_for(answer):
        return NOT_WORKED_OUT
    sides = [[side for side in one.sides if side not in unknowns] for one in (answer, reference)]
    return max((_least(side, sides[1]) for side in sides[0]), key=_ORDER.index, default="")


def _solved_for(relation: Relation) -> set[Answer]:
    """The variables that stand alone on one side and in no other."""
    solved = set[Answer]()
    for place, side in enumerate(relation.sides):
        others = [other for n, other in enumerate(relation.sides) if n != place]
        if isinstance(side, Variable) and not any(
            is_expression(other) and side.name in variables(other) for other in others
        ):
            solved.add(side)
    return solved


def _is_unsolved(reference: Answer) -> bool:
    if isinstance(reference, Named):
        return not reference.is_solved
    return isinstance(reference, Relation) and not _solved_for(reference)
