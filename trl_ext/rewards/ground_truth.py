"""What a dataset may hold as a reference answer -> texts to compare with."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from numbers import Number


def accepted_answers(ground_truth: object) -> list[str]:
    """The accepted answers as texts: a text as it is, a number as `str` writes it, each of a list, tuple or set.

    Raises:
        TypeError: None, a dict, bytes or anything else that is not an answer.
        ValueError: NaN, which no answer equals.
    """
    if isinstance(ground_truth, (list, tuple, set, frozenset)):
        return [_text(reference) for reference in ground_truth]
    return [_text(ground_truth)]


def _text(reference: object) -> str:
    if isinstance(reference, str):
        return reference
    if isinstance(reference, (Number, Decimal, Fraction)):  # numpy's scalars are Numbers
        if reference != reference:
            raise ValueError("a reference answer is NaN, which no answer equals: drop the row or fill in its answer")
        return str(reference)
    kind = type(reference).__name__
    raise TypeError(f"a reference answer must be a text, a number or a list of them, got {kind}: {reference!r:.80}")
