r"""Does an answer only repeat the problem? Where the problem is known, answers that equal the reference are checked.

`\frac{24}{36}` for `\frac23` is correct, unless the problem was to reduce it: then the answer stands in the problem.
"""

from __future__ import annotations

import re

MAX_LENGTH = 20_000  # characters of a problem that are searched
_FRACTION = re.compile(
    r"\\[cdt]?frac\s*(?:(\w)\s*(?=\{)|(\w)\s*(\w)|\{(\w{1,40})\}\s*(\w)|(?=\{))|(?<!\w)(\w{1,40})\s*/\s*(\w{1,40})"
)
_IGNORED = re.compile(r"\\(?:(?:left|right|displaystyle|textstyle|quad|qquad)(?![a-zA-Z])|[!,;: ])|[\s{}]")
_BETWEEN = re.compile(r"\\[()\[\]]|\$|(?<![\\a-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z])")  # delimiters, and words
_MARK = "\x00"
_TIMES = re.compile(r"\\(?:cdot|times)(?![a-zA-Z])")
_FACTOR = re.compile(r"\bfactor", re.IGNORECASE)
_EXPAND = re.compile(
    r"\b(?:expan|multiply|multipli|simplif|distribut|product|combine|combini|form\b|polynomial|express|write)",
    re.IGNORECASE,
)
_PERCENTAGE = re.compile(
    r"\b(?:what(?:'s)?|how many)(?: (?:is|was|are|were|will|would|be|the|its|his|her|their|total|overall|annual"
    r"|average|combined|expected|new|approximate|probability|chance)){0,4} percent"
    r"|\b(?:as a|find the|calculate the|determine the) percent",
    re.IGNORECASE,
)


def occurs_in(answer: str, problem: str) -> bool:
    """Whether the answer's text stands in the problem, between signs that are no part of a longer expression."""
    text = _bare(answer[:MAX_LENGTH]).strip(f".,;{_MARK}")
    if not text:
        return False
    return (
        re.search(rf"(?<![\w+\-*/^\\.]){re.escape(text)}(?![\w+\-*/^!]|\.\d)", _bare(problem[:MAX_LENGTH])) is not None
    )


def asks_for_factors(problem: str) -> bool:
    """Whether the problem says that something is to be factored."""
    return _FACTOR.search(problem) is not None


def asks_for_terms(problem: str) -> bool:
    """Whether the problem says that something is to be multiplied out, or in which form it is to be given."""
    return _EXPAND.search(problem) is not None


def asks_for_percentage(problem: str) -> bool:
    """Whether the answer is a percentage, so that `44%` is 44: "what percent", and not "what is 20 percent of 50"."""
    return _PERCENTAGE.search(problem) is not None


def _bare(text: str) -> str:
    """The text without spaces, braces and markup that change nothing, fractions of one kind, marks for words."""
    text = _BETWEEN.sub(_MARK, _TIMES.sub("*", _FRACTION.sub(_with_braces, text)))
    return _IGNORED.sub("", re.sub(r"\}\s*\{", "|", text))


def _with_braces(match: re.Match[str]) -> str:
    parts = [part for part in match.groups() if part]
    return r"\frac" + "".join(f"{{{part}}}" for part in parts)
