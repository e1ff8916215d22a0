r"""Spellings that take more than one pattern: emphasis and quotes, currency signs, `{1 \over 2}`, `0.33\ldots`."""

from __future__ import annotations

import re
import unicodedata

from trl_ext.rewards.extract import closing_brace

MAX_REWRITES = 20  # of one kind in a text
_WRAPPED = re.compile(
    r"(\*{1,3})(?=\S)([^*`\"']+)(?<=\S)\1|(_{1,3}|`|\"|')(?=\S)([^*_`\"']+)(?<=\S)\3|``([^`']+)''"
    r"|([*_`\"]+)([^*_`\"']+)\6"
)
MARKS = ("*", "`", "_", '"', "'", "$")
MARKED_ENDS = tuple(f"{mark}}}" for mark in ".,;:!? ")
_OVER = re.compile(r"\\(over|choose)(?![a-zA-Z])")
_FRACTION_OF = {"over": r"\frac", "choose": r"\binom"}
_OPENING, _CLOSING = "{([", "})]"
_ENDLESS = re.compile(r"(?<!\d)(\d*\.\d{2,40})\s*(?:\\ldots(?![a-zA-Z])|\.{3,})")
_DOTTED = re.compile(r"(?<![\d.])(\d*\.\d*)\\dot\s*\{?(\d)\}?(?:(\d{0,30})\\dot\s*\{?(\d)\}?)?")
_IN_BRACKETS = re.compile(r"(-?\d*\.\d*)\((\d{1,30})\)")
_PERIOD = re.compile(r"(\d*?)(\d+?)\2+")
_END_OF_TEXT = re.compile(r"(?<=[^\s.,;:!?{}])[\s.,;:]+\}$|(?<=[a-zA-Z]{3})[!?]+[\s.]*\}$")


def unwrapped(text: str) -> str:
    """Text without emphasis of Markdown, quotes and dollars around all of it."""
    for _ in range(3):
        if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
            text = text[1:-1].strip()
        core = text.strip().removesuffix(".").rstrip()
        if not core.startswith(MARKS) or (match := _WRAPPED.fullmatch(core)) is None:
            return text
        text = match[2] or match[4] or match[5] or match[7]
    return text


def with_named_currencies(text: str) -> str:
    r"""Text with `\currencyeuro` for the euro sign, and the like for every sign of a currency but the dollar."""
    for sign in {sign for sign in text if not sign.isascii() and unicodedata.category(sign) == "Sc"}:
        name = unicodedata.name(sign).removesuffix(" SIGN").removesuffix(" MARK").split()[-1].lower()
        text = text.replace(sign, rf"\currency{'sterling' if name == 'pound' else name} ")
    return text


def with_fractions(text: str) -> str:
    r"""`{a \over b}` as `\frac{a}{b}`, and `{n \choose k}` as `\binom{n}{k}`."""
    for _ in range(MAX_REWRITES):
        if (match := _OVER.search(text)) is None:
            break
        start, end = _group_around(text, match.start(), match.end())
        above, below = text[start : match.start()].strip(), text[match.end() : end].strip()
        text = f"{text[:start]}{_FRACTION_OF[match[1]]}{{{above}}}{{{below}}}{text[end:]}"
    return text


def _group_around(text: str, start: int, end: int) -> tuple[int, int]:
    """Where the group begins and ends that a place is in: behind the bracket that is open there, up to its end."""
    depth = 0
    while start > 0 and depth >= 0:
        start -= 1
        depth += (text[start] in _CLOSING) - (text[start] in _OPENING)
    start += depth < 0
    depth = 0
    while end < len(text) and depth >= 0:
        depth += (text[end] in _OPENING) - (text[end] in _CLOSING)
        end += 1
    return start, end - (depth < 0)


def with_matrix_environments(text: str) -> str:
    r"""`\pmatrix{1\cr 2}` as the environment."""
    for _ in range(MAX_REWRITES):
        if (match := re.search(r"\\([pb]?matrix)\s*\{", text)) is None:
            break
        if (closing := closing_brace(text, match.end() - 1)) is None:
            break
        inside = text[match.end() : closing]
        text = rf"{text[: match.start()]}\begin{{{match[1]}}}{inside}\end{{{match[1]}}}{text[closing + 1 :]}"
    return text


def with_periods(text: str) -> str:
    r"""`0.166\ldots`, `0.1\dot{6}` and `0.1(6)` as `0.1\overline{6}`."""
    if "\\" not in text and "(" not in text and "..." not in text:
        return text
    text = _DOTTED.sub(lambda m: rf"{m[1]}\overline{{{m[2]}{m[3] or ''}{m[4] or ''}}}", text)
    if match := _IN_BRACKETS.fullmatch(text):
        return rf"{match[1]}\overline{{{match[2]}}}"
    return _ENDLESS.sub(_with_period, text)


def _with_period(match: re.Match[str]) -> str:
    whole, _, digits = match[1].partition(".")
    period = _PERIOD.fullmatch(digits)
    return match[0] if period is None else rf"{whole or 0}.{period[1]}\overline{{{period[2]}}}"


def without_marks_in_text(text: str) -> str:
    r"""`\text{ellipse.}` and `5\text{.}` without the full stop."""
    return _END_OF_TEXT.sub("}", text) if r"\text" in text else text
