r"""Labels and chains: `|PQ|=3` names what is 3, and `2/7 \approx 0.29` gives the same value twice.

A label is removed only if it names one thing; the members of a chain must agree, or it is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

from trl_ext.rewards.expression import Number, numeric_value
from trl_ext.rewards.strict.answers import Answer, Named, Ordered, is_expression
from trl_ext.rewards.strict.equality import equal

NAME = r"(?:[a-zA-Z]|\\(?:theta|phi|rho|alpha|beta|gamma|lambda|mu|omega))(?:_\{?\w+\}?)?"
_NOUNS = "|".join(
    f"[{noun[0].upper()}{noun[0]}]{noun[1:]}"
    for noun in """answer area average base circumference cost degree diameter difference dimension distance
    height length maximum mean median minimum mode number perimeter price probability product profit radius
    range rate ratio remainder result slope solution speed sum time total value volume weight width""".split()
)
_KINDS = "[Tt]otal|[Ff]inal|Surface|surface|[Cc]ombined|[Mm]inimum|[Mm]aximum|[Gg]reatest|[Ll]east|[Aa]verage|[Mm]ean"
_LENGTH = r"(?:[A-Z]{2}|\[[A-Z]{3,}\])"  # of a segment, or an area
_ANGLE = r"(?:[A-Z]|\\(?:theta|alpha|beta|gamma|phi)|\\angle ?[A-Z]{1,3})"
_LABELS = {  # what stands left of the sign -> the brackets that its value must have, or None for any
    "function": (rf"{NAME}'?\(\w{{1,3}}(?:,\w{{1,3}})*\)", None),
    "segment": (r"m?(?:\\angle ?|\\triangle ?|\\overline)?\{?[A-Z]{1,4}\}?|\|[A-Z]{2}\||\[[A-Z]{3,}\]", None),
    "words": (rf"\\text\{{\s*(?:[Tt]he )?(?:(?:{_KINDS}) )?(?:{_NOUNS})\s*\}}", None),
    "quotient": (rf"\\frac\{{?{_LENGTH}\}}?\{{?{_LENGTH}\}}?|{_LENGTH}/{_LENGTH}", None),
    "function of an angle": (rf"\\?(?:sin|cos|tan|cot|sec|csc) ?(?:{_ANGLE}|\({_ANGLE}\))", None),
    "ratio": (rf"(?:{NAME}|[A-Z]{{2}})(?::(?:{NAME}|[A-Z]{{2}}))+", ":"),
    "tuple": (rf"\({NAME}(?:,{NAME})+\)", "()"),
}
LABEL = re.compile("|".join(f"(?P<{kind.replace(' ', '_')}>{pattern})" for kind, (pattern, _) in _LABELS.items()))
_SIGN = re.compile(r"(?<![<>!:])=|\\approx(?![a-zA-Z])|\\simeq(?![a-zA-Z])")
_DECIMAL = re.compile(r"-?\d*\.?\d+")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
MAX_MEMBERS = 8


def statement(text: str, read: Callable[[str], Sequence[Answer]]) -> Answer | None:
    """The value of a labeled or chained answer, with its name if it has one; None for any other text.

    Args:
        text: clean.
        read: the readings of a part.
    """
    members, signs = _split(text)
    if not signs or len(members) > MAX_MEMBERS or not all(members):
        return None
    label = LABEL.fullmatch(members[0])
    is_variable = bool(re.fullmatch(NAME, members[0]))
    if signs[0] == "=" and (label or (is_variable and len(members) > 2)):
        is_ratio = label is not None and label.lastgroup == "ratio"  # in brackets 9:16 is no time of day
        values = [f"({member})" if is_ratio else member for member in members[1:]]
        value = _agreed(values, signs[1:], read)
        if value is None or (label and not _fits(label, value)):
            return None
        return Named(members[0].replace("{", "").replace("}", ""), value)
    return None if len(members) < 2 or is_variable else _agreed(members, signs, read)


def _split(text: str) -> tuple[list[str], list[str]]:
    """The parts between signs outside of brackets, and the signs; no signs in a list or a condition."""
    depth, starts = 0, list[int]()
    for character in text:
        starts.append(depth)
        depth += _BRACKETS.get(character, 0)
    is_list = any(depth == 0 and character in ",;<>" for depth, character in zip(starts, text, strict=True))
    if is_list or re.search(r"\b(?:or|and)\b|\\[lg]e\b", text):
        return [text], []
    members, signs, last = [], [], 0
    for match in _SIGN.finditer(text):
        if starts[match.start()] == 0:
            members.append(text[last : match.start()].strip())
            signs.append(match[0])
            last = match.end()
    return [*members, text[last:].strip()], signs


def _fits(label: re.Match[str], value: Answer) -> bool:
    brackets = _LABELS[(label.lastgroup or "").replace("_", " ")][1]
    if brackets is None:
        return True
    names = re.split(r"[,:]", label[0])
    return isinstance(value, Ordered) and value.brackets == brackets and len(value.items) == len(names)


def _agreed(members: list[str], signs: list[str], read: Callable[[str], Sequence[Answer]]) -> Answer | None:
    r"""The last member before a `\approx`, if all the others equal it and what follows rounds it."""
    exact: Answer | None = None
    for member, sign in zip(members, ["=", *signs], strict=True):
        if sign == "=":
            agreeing = [reading for reading in read(member) if exact is None or equal(reading, exact)]
            if not agreeing:
                return None
            exact = agreeing[0]
        elif exact is None or not _rounds(member, exact):
            return None
    return exact


def _rounds(text: str, exact: Answer) -> bool:
    """Whether the decimal `text` is `exact` to the places that it shows."""
    if not _DECIMAL.fullmatch(text) or not is_expression(exact):
        return False
    try:
        value = numeric_value(exact, {})
    except (KeyError, ArithmeticError):
        return False
    places = -int(Decimal(text).as_tuple().exponent)
    off = abs(value - numeric_value(Number(Fraction(text)), {}))
    return bool(off * 100 * 10**places <= 51)  # half a unit of the last place, and what evaluating leaves
