r"""(answer, truth) -> right or wrong, for short LaTeX answers such as mini-MATH's.

Two answers are equal when they are the same text after normalisation, or the same rational number. Nothing that a
model writes is ever evaluated: numbers are matched by a regular expression whose length is bounded.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_LENGTH = 200  # characters; no answer that is right is longer

_REWRITES = (
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left|\\right|\\!|\\,|\\ |\$", ""),
    (r"\s+", ""),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"\\cdot|\\times", "*"),
    ("\u2212", "-"),
)
_INTEGER = r"[+-]?\d{1,30}"
_NUMBER = re.compile(rf"({_INTEGER}(?:\.\d{{1,30}})?)(?:/(\d{{1,30}}))?")
_LATEX_FRACTION = re.compile(rf"([+-]?)\\frac\{{({_INTEGER})\}}\{{({_INTEGER})\}}")


def is_equal(answer: str, truth: str) -> bool:
    r"""Whether `answer` is `truth` in another spelling: spaces, `\dfrac`, an unreduced or decimal fraction."""
    if not answer or len(answer) > _MAX_LENGTH:
        return False
    a, t = normalize(answer), normalize(truth)
    if a == t:
        return True
    number = as_rational(a)
    return number is not None and number == as_rational(t)


def normalize(text: str) -> str:
    """`text` without spaces and with one spelling of every LaTeX command that has several."""
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    return text.strip(".")


def as_rational(text: str) -> Fraction | None:
    r"""The exact value of `3`, `-0.25`, `1/4` or `\frac{1}{4}`, else None."""
    if match := _LATEX_FRACTION.fullmatch(text):
        sign, top, bottom = match.groups()
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    if match := _NUMBER.fullmatch(text):
        top, bottom = match[1], match[2] or "1"
        return None if int(bottom) == 0 else Fraction(top) / int(bottom)
    return None
