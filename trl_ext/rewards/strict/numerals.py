"""Number words: after a number (`5 hundred`, `3 dozen`, `3 quarters`) and alone (`twenty-one`, `two thirds`)."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZES = {
    "hundred": "100", "thousand": "1000", "dozen": "12", "half": "1/2", "halves": "1/2", "third": "1/3",
    "quarter": "1/4", "fourth": "1/4", "fifth": "1/5", "sixth": "1/6", "seventh": "1/7", "eighth": "1/8",
    "ninth": "1/9", "tenth": "1/10", "hundredth": "1/100", "thousandth": "1/1000",
}  # fmt: skip
_FIRST_WORD = re.compile(r"\s*([A-Za-z]+)\s*")


def split_number_word(phrase: str) -> tuple[Fraction, str] | None:
    """The factor that the first word of a phrase stands for and the words after it, or None.

    >>> split_number_word("hundred apples")
    (Fraction(100, 1), 'apples')
    """
    match = _FIRST_WORD.match(phrase)
    size = _size(match[1].lower()) if match else None
    return None if match is None or size is None else (size, phrase[match.end() :])


def _size(word: str) -> Fraction | None:
    size = _SIZES.get(word) or _SIZES.get(word.removesuffix("s"))
    return None if size is None else Fraction(size)


_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ADDED = {word: n for n, word in enumerate(_WORDS)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
MAX_WORDS = 12


def spelled_number(text: str) -> Fraction | None:
    """The number that English words spell, or None.

    >>> spelled_number("two hundred and five"), spelled_number("minus two thirds")
    (Fraction(205, 1), Fraction(-2, 3))
    """
    words = [word for word in re.split(r"[ -]+", text.lower()) if word != "and"]
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    if not 0 < len(words) <= MAX_WORDS:
        return None
    part = _size(words[-1])
    if part is None or part > 1:
        part = Fraction(1)
    else:
        words = words[:-1]
    value = _whole_number(words)
    return None if value is None else sign * value * part


def _whole_number(words: list[str]) -> int | None:
    total, group, last = 0, 0, 0
    for word in words:
        if word in _ADDED:
            if group % 100 and not (last >= 20 and 0 < _ADDED[word] < 10):
                return None  # `five six` is no number
            group += _ADDED[word]
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _SCALES and group:
            total, group = total + group * _SCALES[word], 0
        else:
            return None
        last = _ADDED.get(word, 0)
    return total + group if words else None
