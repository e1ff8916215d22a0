"""What a dataset may hold as the right answer -> texts to compare with."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any


def truths_of(ground_truth: Any) -> list[str]:
    """The accepted answers as texts: a text as it is, a number as `str` writes it, each of a list, tuple or set.

    Raises:
        TypeError: None, a dict, bytes or anything else that is no answer.
    """
    if isinstance(ground_truth, (list, tuple, set, frozenset)):
        return [_text(truth) for truth in ground_truth]
    return [_text(ground_truth)]


def _text(truth: Any) -> str:
    if isinstance(truth, str):
        return truth
    if isinstance(truth, (Number, Decimal, Fraction)):  # numpy's scalars are Numbers
        if truth != truth:
            raise ValueError("a truth is NaN, which no answer equals: leave the row out, or fill in its answer")
        return str(truth)
    raise TypeError(f"a truth must be a text, a number or a list of them, got {type(truth).__name__}: {truth!r:.80}")
