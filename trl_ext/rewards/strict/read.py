r"""Text -> the answers that it may mean. Most texts have one reading; `5 m` is a length or five times m."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction
from functools import lru_cache

from trl_ext.rewards.expression import Apply, Number, exact_value
from trl_ext.rewards.strict.answers import (
    Answer,
    Based,
    Named,
    Ordered,
    Quantity,
    Several,
    Text,
    Time,
    Unreadable,
    is_expression,
)
from trl_ext.rewards.strict.clean import clean
from trl_ext.rewards.strict.forms import is_numeral
from trl_ext.rewards.strict.grammar import parse
from trl_ext.rewards.strict.numerals import spelled_number, split_number_word
from trl_ext.rewards.strict.sets import are_conditions, solution_set
from trl_ext.rewards.strict.solutions import of_quantities, of_several_parts
from trl_ext.rewards.strict.statements import statement
from trl_ext.rewards.strict.units import compound, currency, is_known, read_unit

_TEXT_GROUP = re.compile(r"\\text\s*\{([^{}]*)\}")
_NUMBER_IN_TEXT = re.compile(r"\\text\s*\{\s*-?\d[^{}]*\}\Z")  # with its unit: \text{5 cm}
_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_UNIT_IN_TEXT = re.compile(
    rf"(?P<value>.*?)\s*(?P<unit>\\text\s*\{{[^{{}}]*\}}{_POWER}(?:\s*/?\s*\\text\s*\{{[^{{}}]*\}}{_POWER})*)"
)
_UNIT_IN_WORDS = re.compile(r"(?P<value>.*?[\d})\]])(?P<space>\s*)(?P<unit>[A-Za-z][A-Za-z./ '-]*(?:\^\{?[23]\}?)?)")
_UNIT_SPELLINGS = {"{": "", "}": "", r"\dollar": "dollar", "%": "percent", "per cent": "percent"}
_PERCENT = re.compile(r"(?P<value>[^%]+?)\s*%")
_MONEY = re.compile(
    r"(?P<sign>-?)\s*+(?:\\currency(?P<name>[a-z]+)\s*+(?P<value>[^\\]++|[^\\]*+\\(?!currency).*)"
    r"|(?P<before>.*?\S)\s*+\\currency(?P<after>[a-z]+))"
)
_POUNDS = re.compile(r"[Pp]ounds?")  # of mass, or of money
_TRIGONOMETRIC = re.compile(r"(?<![a-z])(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DOLLARS = re.compile(r"(?P<sign>-?)\s*(?:\\dollar\s*(?P<value>.+)|(?P<before>[\d.,]+)\s*\\dollar)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ -]*")
_NOTHING = frozenset(
    f"{what}{s}" for what in ("no solution", "no real solution", "empty set", "the empty set") for s in ("", "s")
)
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)(?:\s+|(?=\()))?\(?\s*([A-Za-z])\s*[).]?")
_TIME = re.compile(r"(\d{1,2})\s*:\s*(\d{2})\s*(?:([ap])\s*\.?\s*m\b\.?)?", re.IGNORECASE)
_HOUR = re.compile(r"(0?[1-9]|1[0-2])\s*([ap])\s*\.?\s*m\b\.?", re.IGNORECASE)
_BASED = re.compile(
    r"(-?\(?[0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?\)?)\s*"
    r"(?:_\s*\{?\s*\(?(?:base ?)?(\w{1,9})\)?\s*\}?|\(?(?:in )?base ?(\w{1,9})\)?)"
)
_BASE_NAMES = {"two": "2", "three": "3", "eight": "8", "ten": "10", "sixteen": "16"}
_SIGNS = re.compile(r"[=<>:|]|\\(?:approx|simeq|le|ge|lt|gt|ne|in)(?![a-zA-Z])|reals?(?![a-z])")
_SEVERAL = re.compile(r"=|\\in(?![a-zA-Z])|integer| to |or")
_LIST_SIGN = re.compile(r"[,;]| and | or ")
_UNIT_IN_LIST = re.compile(r"[\d})] ?(?!and |or )[a-zA-Z]{2}")
_POINT = re.compile(r"([A-Z]) ?(\(.*,.*\))")  # P(1,2)
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,3}")
_INTEGER = re.compile(r"-?[0-9]{1,30}")
CACHED_TEXTS = 1_000
_JOINED_NUMBERS = re.compile(r"\d{1,3}(?:,\d{3})+")


def readings(text: str) -> tuple[Answer, ...]:
    """Everything that `text` may mean as an answer, the most likely first; nothing if it cannot be read."""
    return readings_of_clean(clean(text))


@lru_cache(maxsize=CACHED_TEXTS)
def readings_of_clean(text: str) -> tuple[Answer, ...]:
    """The readings of a clean text, cached: a reference answer comes once for each response of its group."""
    return (Number(Fraction(int(text))),) if _INTEGER.fullmatch(text) else tuple(_read(text))


def _read(text: str) -> list[Answer]:
    words = _without_text_groups(text)
    if time := _TIME.fullmatch(words):  # or a ratio, equal only to the same one
        is_time = bool(time[3]) or "0" in (time[1][0], time[2][0])
        ratio = () if is_time else (Ordered("::", (Number(Fraction(time[1])), Number(Fraction(time[2])))),)
        return [_time_of_day(time[1], time[2], time[3]), *ratio]
    if measured := compound(words):
        return [Quantity(Number(measured[0]), measured[1])]
    text = words if _NUMBER_IN_TEXT.match(text) else text
    answers: list[Answer] = [*_texts(text, words), *_quantities(text, words)]
    if based := _BASED.fullmatch(words):
        base = based[2] or based[3]
        if (base := _BASE_NAMES.get(base, base)).isdecimal():
            answers.append(Based(based[1].upper().replace("(", "").replace(")", ""), base))
    if _SCIENTIFIC.fullmatch(text):
        answers.append(Number(Fraction(text)))
    with contextlib.suppress(Unreadable):
        tree = parse(words)
        answers += [] if " and " in words and are_conditions(tree) else [tree]
    if _JOINED_NUMBERS.fullmatch(text):  # a number, or an ordered list
        answers.append(Ordered(",", tuple(Number(Fraction(item)) for item in text.split(","))))
    if _LIST_SIGN.search(words) and ("%" in text or r"\text" in text or _UNIT_IN_LIST.search(words)):
        answers = [*of_quantities(words, readings), *answers]
    if point := _POINT.fullmatch(words):
        answers += [Named(point[1], place) for place in readings(point[2]) if isinstance(place, Ordered)]
    if _SEVERAL.search(words):
        answers += of_several_parts(text, words, readings)
    if _SIGNS.search(text):  # or words for the real numbers
        answers += [said for said in (statement(text, readings), solution_set(words, parse)) if said]
    return answers


def _without_text_groups(text: str) -> str:
    r"""`\text{ or }` as words, so that `9\text{ or }8` is a list."""
    return _TEXT_GROUP.sub(lambda match: f" {match[1].strip()} ", text).strip() if "\\text" in text else text.strip()


def _time_of_day(hour: str, minute: str, half: str | None) -> Time:
    return Time(int(hour), minute, f"{half.lower()}m" if half else None)


def _texts(text: str, words: str) -> list[Answer]:
    plain = " ".join(words.split())
    if hour := _HOUR.fullmatch(plain):
        return [_time_of_day(hour[1], "00", hour[2])]
    if choice := _CHOICE.fullmatch(plain):
        is_marked = plain != choice[1] or "\\text" in text
        return [Text(choice[1].upper())] if is_marked or choice[1].isupper() else []
    if _WORDS.fullmatch(plain) and any(len(word) > 2 for word in re.split(r"[ -]", plain)):
        if plain.lower() in _NOTHING:
            return [Text(plain.lower()), Several(())]
        said, value = Text(plain.lower().replace("’", "'")), spelled_number(plain)
        return [said] if value is None else [said, Number(value)]
    return []


def _quantities(text: str, words: str) -> list[Answer]:
    answers: list[Answer] = []
    if r"\dollar" in text and (dollars := _DOLLARS.fullmatch(words)):
        answers += _quantity(dollars["sign"] + (dollars["value"] or dollars["before"]), "dollars")
    if r"\currency" in text and (money := _MONEY.fullmatch(words)):
        answers += _money(money)
    if "%" in text and (percent := _PERCENT.fullmatch(text)):
        answers += _quantity(percent["value"], "percent")
    if r"\text" in text and (match := _UNIT_IN_TEXT.fullmatch(text)) and not _is_of_angle(match["value"]):
        answers += _quantity(match["value"], _TEXT_GROUP.sub(r"\1", match["unit"]))
    if (match := _UNIT_IN_WORDS.fullmatch(text)) and _may_be_unit(match["space"], match["unit"]):
        answers += _quantity(match["value"], match["unit"])
    return answers


def _money(money: re.Match[str]) -> list[Answer]:
    with contextlib.suppress(Unreadable):
        return [
            Quantity(parse(money["sign"] + (money["value"] or money["before"])), currency(money["name"] or money[5]))
        ]
    return []


def _is_of_angle(value: str) -> bool:
    r"""Whether a unit is that of an angle within the value: `\sin 20^\circ` is no number of degrees; or of nothing."""
    return not value or _TRIGONOMETRIC.search(value) is not None


def _may_be_unit(space: str, unit: str) -> bool:
    """`5cm` and `5 m` may; `2t` and `2xy` are products."""
    word = unit.partition("^")[0].strip()
    if len(word) < 3 and " " not in word:
        return is_known(word) and (bool(space) or len(word) > 1)
    return bool(space) or is_known(word)


def _quantity(value: str, unit_phrase: str) -> list[Answer]:
    """`5` and `cm` as a quantity, `5` and `hundred` as a number, `5` and `hundred apples` as a quantity again."""
    counted = Fraction(1)
    while word := split_number_word(unit_phrase.replace(r"\text", "").strip("{} ")):
        counted, unit_phrase = counted * word[0], word[1]
    for spelling, usual in _UNIT_SPELLINGS.items():
        unit_phrase = unit_phrase.replace(spelling, usual)
    unit = read_unit(re.sub(r"\s*\^\s*", "^", unit_phrase))
    if unit and unit.dimension == "money":
        value = value.replace(r"\dollar", "")
    with contextlib.suppress(Unreadable):
        if unit or (counted != 1 and not unit_phrase.strip()):
            tree = _times(parse(_without_text_groups(value)), counted)
            units = [unit, currency("sterling")] if unit and _POUNDS.fullmatch(unit_phrase.strip()) else [unit]
            return [Quantity(tree, one) if one else tree for one in units]
    return []


def _times(tree: Answer, count: Fraction) -> Answer:
    """`5 hundred` as 500, since no work is left in it."""
    if count == 1:
        return tree
    if not is_expression(tree):
        raise Unreadable("a count")
    exact = exact_value(tree) if is_numeral(tree) else None
    return Apply("multiply", (tree, Number(count))) if exact is None else Number(exact * count)
