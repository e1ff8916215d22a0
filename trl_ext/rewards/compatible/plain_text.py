r"""Stage B's normal form: an answer as plain text, `\frac{1}{2}` as `1/2`, without units, spaces and capitals."""

from __future__ import annotations

import contextlib
import re

from trl_ext.rewards.compatible.latex_text import NotConvertible, latex_to_text

_WHOLE_TEXT = re.compile(r"\\text\{(.+)\}")
_UNITS = """degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"""
_DELETED = {unit: re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNITS.split()}
_DELETED["\\circ"] = re.compile(r"\^ *\\circ")
_COMMA_WITH_THIN_SPACE = re.compile(r",\\! *")
_MINUS = re.compile(r"- +")
_MIXED_NUMBER = re.compile(r"([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")


def plain_text_normal_form(text: str) -> str:
    """The normal form of one answer."""
    if match := _WHOLE_TEXT.fullmatch(text):
        text = match[1]
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for telltale, pattern in _DELETED.items():
        if telltale in text:
            text = pattern.sub("", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = _COMMA_WITH_THIN_SPACE.sub("", text)
    value = _near_integer(text)
    text = text if value is None else str(round(value))
    if "\\" in text:
        with contextlib.suppress(NotConvertible):
            text = latex_to_text(text)
    text = _MIXED_NUMBER.sub(r"\1+\2", _MINUS.sub("-", text))
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    if is_integer_text(text):
        return str(int(float(text.replace(",", ""))))
    return text


def is_integer_text(text: str) -> bool:
    """Whether the text is a number within 1e-7 of an integer, thousands separators allowed."""
    return _near_integer(strip_thousands_commas(text)) is not None


def strip_thousands_commas(text: str) -> str:
    """Remove commas before exactly three digits, as often as that finds any.

    The character after the three digits is used up by the match, so of three separators in a row the middle one stays.
    """
    while (stripped := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = stripped
    return text


def _near_integer(text: str) -> float | None:
    try:
        value = float(text)
        return value if abs(value - round(value)) <= 1e-7 else None
    except (ValueError, OverflowError):  # no number; infinite
        return None
