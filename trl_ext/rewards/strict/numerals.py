"""Number words behind a number: `5 hundred`, `2.5 thousand`, `3 dozen`, `3 quarters`."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZES = {
    "hundred": 100, "thousand": 1_000, "dozen": 12, "half": "1/2", "halves": "1/2", "third": "1/3", "quarter": "1/4",
    "fourth": "1/4", "fifth": "1/5", "sixth": "1/6", "seventh": "1/7", "eighth": "1/8", "ninth": "1/9", "tenth": "1/10",
    "hundredth": "1/100", "thousandth": "1/1000",
}  # fmt: skip
_FIRST_WORD = re.compile(r"\s*([A-Za-z]+)\s*")


def split_number_word(phrase: str) -> tuple[Fraction, str] | None:
    """The factor that the first word of a phrase stands for and the words after it, or None.

    >>> split_number_word("hundred apples")
    (Fraction(100, 1), 'apples')
    """
    match = _FIRST_WORD.match(phrase)
    word = match[1].lower() if match else ""
    size = _SIZES.get(word) or _SIZES.get(word.removesuffix("s"))
    return None if match is None or size is None else (Fraction(str(size)), phrase[match.end() :])
