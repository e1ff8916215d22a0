"""(answer, reference answer) -> correct or not, and why."""

from __future__ import annotations

from functools import partial
from itertools import product

from trl_ext.rewards.expression import Undefined, exact_value, numeric_value, variables
from trl_ext.rewards.residues import is_arithmetic, may_be_large, same_residues
from trl_ext.rewards.strict.answers import Answer, Quantity, Several, is_expression
from trl_ext.rewards.strict.clean import clean
from trl_ext.rewards.strict.equality import equal
from trl_ext.rewards.strict.read import readings_of_clean
from trl_ext.rewards.strict.result import Result
from trl_ext.rewards.strict.worked_out import least, left_to_do

PERCENTAGE = "a percentage"
MAX_LENGTH = 600  # characters; a longer answer is correct only if it is the reference in another spelling


def compare(answer: str, reference: str, tolerance: float = 0.0, worked_out: bool = True) -> Result:
    """Whether `answer` is mathematically the same as `reference`; see the package for the rules.

    Args:
        tolerance: relative error that a number may have.
        worked_out: the answer has to be worked out as far as the reference is, so that 17+25 is not 42.
    """
    if not answer.strip():
        return Result(False, "no answer")
    if reference.strip().lower() == "nan":  # as tables write a missing number
        return Result(False, "the reference answer is NaN")
    if answer.strip() == reference.strip():
        return Result(True, "same text")
    if max(len(answer), len(reference)) > 10 * MAX_LENGTH:
        return Result(False, "too long")
    answer, reference = clean(answer), clean(reference)
    if answer == reference != "":
        return Result(True, "same text")
    if max(len(answer), len(reference)) > MAX_LENGTH:
        return Result(False, "too long")
    answers, references = readings_of_clean(answer), readings_of_clean(reference)
    if not answers or not references:
        return Result(False, "cannot read the answer" if references else "cannot read the reference answer")
    for reason, are_same in (("same value", equal), ("within the tolerance", partial(_is_near, tolerance=tolerance))):
        left = list[str]()
        for a, t in product(answers, references) if reason == "same value" or tolerance else ():
            if are_same(a, t):
                left.append(left_to_do(a, t) if worked_out else "")
                if not left[-1]:
                    return Result(True, reason)
        if left:
            return Result(False, least(left))
    if any(_is_percentage(a, t, worked_out) for a, t in product(answers, references)):
        return Result(False, PERCENTAGE)
    return Result(False, _difference(answers[0], references[0]))


def is_readable(answer: str, reference: str) -> Result:
    """Whether any text other than `reference` itself could equal it; a comparison that ignores the answer."""
    text = clean(reference)
    is_read = len(text) <= MAX_LENGTH and text.lower() != "nan" and bool(readings_of_clean(text))
    return Result(is_read, "as strict reads it")


def _is_percentage(answer: Answer, reference: Answer, worked_out: bool) -> bool:
    """Whether `44%` is for 44, which it is not unless the problem asks for a percentage."""
    if not isinstance(answer, Quantity) or answer.unit.dimension != "ratio" or not is_expression(reference):
        return False
    return equal(answer.value, reference) and not (worked_out and left_to_do(answer.value, reference))


def _is_near(answer: Answer, reference: Answer, tolerance: float) -> bool:
    if isinstance(answer, Quantity) and isinstance(reference, Quantity) and answer.unit == reference.unit:
        answer, reference = answer.value, reference.value
    if not is_expression(answer) or not is_expression(reference) or variables(answer) | variables(reference):
        return False
    try:
        value, exact = numeric_value(answer, {}), numeric_value(reference, {})
    except Undefined:
        return False
    return bool(abs(value - exact) <= tolerance * abs(exact))


def _is_too_large(answer: Answer) -> bool:
    """Whether a number is beyond what is computed, so that it equals nothing but its own spelling."""
    if not may_be_large(answer) or not is_arithmetic(answer) or exact_value(answer) is not None:
        return False
    try:
        numeric_value(answer, {})
    except Undefined:
        return same_residues(answer, answer) is None
    return False


def _difference(answer: Answer, reference: Answer) -> str:
    if isinstance(answer, Quantity) and isinstance(reference, Quantity) and answer.unit != reference.unit:
        return "another unit"
    if isinstance(answer, Several) and not isinstance(reference, Several):
        return "more than one answer"
    if _is_too_large(answer) or _is_too_large(reference):
        return "too large to compute, or undefined"
    return "different value"
