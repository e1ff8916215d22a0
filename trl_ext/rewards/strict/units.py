"""Units: the words after a number, their spellings and how they convert."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Dimension: its units with their size; the first name of each is the one used, the others are spellings of it.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "km kilometer kilometre": "1000", "cm centimeter centimetre": "1/100",
        "mm millimeter millimetre": "1/1000", "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "g gram": "1", "kg kilogram": "1000", "mg milligram": "1/1000", "lb lbs pound": "453.59237",
        "oz ounce": "28.349523125", "ton tonne": "1000000",
    },
    "time": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800",
        "ms millisecond": "1/1000",
    },
    "money": {"dollar dollars usd": "1", "cent cents": "1/100"},
    "volume": {"l L liter litre": "1", "ml mL milliliter millilitre": "1/1000"},
    "angle": {"degree deg": "1"},
    "ratio": {"percent percentage pct": "1/100"},
}  # fmt: skip
_OWN_DIMENSION = """unit month year radian rad euro rupee mole joule newton watt volt ohm hertz hz gallon
    quart pint cup acre hectare person people"""
_SHORT = {"mph": "mile per hour", "kmh": "km per hour", "kph": "km per hour"}
_PER = re.compile(r"\s*/\s*|\s+per\s+")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SINGULAR = re.compile(r"(?<=[a-z]{2})(?:(?<=[sxh])es|s)$")
_PART = re.compile(r"(\d+(?:\.\d+)?) ?([a-zA-Z]+)")
_COMPOUND = re.compile(rf"{_PART.pattern}\.?(?:(?: ?, ?| )(?:and )?{_PART.pattern}\.?){{1,3}}")
_NOT_A_UNIT = frozenset("or and either not approximately about none is are to no yes true false if than but".split())
# What is counted in answers: an answer may add one of these words to a bare number.
_NOUNS = frozenset(
    """apple arrangement bag ball banana bead bird block boat book bottle bowl box boy bracelet brother bus cake calorie
    camper candle candy car card case cat chair chicken child children choice class coin color combination cookie copy
    cow cracker crayon customer diamond digit dog doll donut door duck edge egg element employee envelope face factor
    family fish floor flower foot friend game gift girl glass goal grape group guest hat hole home horse house integer
    item jar key kid lap leaf leaves legs lemon letter line liter lollipop male man marble match meal member men mice
    minute mouse muffin necklace number nut onion orange outcome packet page pair pants paper part passenger path peach
    pear pen pencil person people permutation photo picture piece pizza plant plate player point pot potato problem
    puppy question room rose row scoop seat sheep sheet shell shirt shoe side sister slice sock solution song spot
    sticker stone story strawberry student subset team teacher term test ticket time tomato toy train tree
    triangle trip truck value vase vertex vertices visitor vote way wheel win window woman women word
    worker celsius fahrenheit""".split()
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a unit measures, and its size in that dimension's base; an unknown noun is its own dimension."""

    dimension: str
    size: Fraction
    is_listed: bool = True  # of a listed unit or noun: an answer may add it to a bare number


_KNOWN = {word: Unit(word, Fraction(1)) for word in _OWN_DIMENSION.split()} | {
    word: Unit(dimension, Fraction(size))
    for dimension, members in _TABLE.items()
    for spellings, size in members.items()
    for word in spellings.split()
}
_CODES = {"eur": "euro", "gbp": "sterling", "inr": "rupee", "jpy": "yen", "yen": "yen"}
_KNOWN |= {code: Unit(name, Fraction(1)) for code, name in _CODES.items()}


def read_unit(phrase: str) -> Unit | None:
    r"""The unit that a phrase names (`cm`, `square feet`, `cm^2`, `dollars per hour`), an unknown noun, or None.

    >>> read_unit("square cm") == read_unit("cm^2")
    True
    """
    above, *below = _PER.split(_SHORT.get(phrase.strip().lower(), phrase), maxsplit=1)
    if below and (top := read_unit(above)) and (bottom := read_unit(below[0])):
        is_listed = top.is_listed and bottom.is_listed
        return Unit(f"{top.dimension} per {bottom.dimension}", top.size / bottom.size, is_listed)
    words = [word for word in re.split(r"[\s.{}-]+", phrase) if word]
    if not words or len(words) > 6 or _NOT_A_UNIT & {word.lower() for word in words}:
        return None
    power = 1
    names = []
    for word in words:
        name, caret, exponent = word.partition("^")
        if caret:
            if exponent not in ("2", "3"):
                return None
            power *= int(exponent)
        if name.lower() in _POWERS:
            power *= _POWERS[name.lower()]
        elif name:
            names.append(name)
    return _combine(names, power)


def currency(name: str) -> Unit:
    """The unit of a currency, by the name that `clean` gives its sign."""
    return _KNOWN.get(name) or Unit(name, Fraction(1))


def compound(text: str) -> tuple[Fraction, Unit] | None:
    """A measure in several units of one dimension, in the dimension's base; None for any other text.

    It may be added to no bare number, since it does not say in which unit, except dollars and cents.

    >>> compound("1 hour and 30 minutes")
    (Fraction(5400, 1), Unit(dimension='time', size=Fraction(1, 1), is_listed=False))
    """
    if (match := _COMPOUND.fullmatch(text)) is None:
        return None
    parts = [(Fraction(value), _look_up(name)) for value, name in _PART.findall(match[0])]
    units = [unit for _, unit in parts if unit]
    if len(units) < len(parts) or len({unit.dimension for unit in units}) > 1:
        return None
    for large, (value, _), small in zip(units, parts[1:], units[1:], strict=False):
        if not value * small.size < large.size:  # 90 minutes are no part of an hour
            return None
    base = Unit(units[0].dimension, Fraction(1), is_listed=units[0].dimension == "money")
    return sum((value * unit.size for (value, _), unit in zip(parts, units, strict=True)), Fraction(0)), base


def is_known(word: str) -> bool:
    """Whether the table has this word."""
    return _look_up(word) is not None


def _combine(names: list[str], power: int) -> Unit | None:
    if not all(re.fullmatch(r"[A-Za-z/']+", name) for name in names):
        return None
    if len(names) == 1 and (unit := _look_up(names[0])):
        return unit if power == 1 else Unit(f"{unit.dimension}^{power}", unit.size**power)
    if not names or (len(names) == 1 and len(names[0]) < 3 and "/" not in names[0]):
        return None
    noun = " ".join(_singular(name.lower()) for name in names)
    is_listed = all(_is_listed(word) for name in names for word in name.split("/") if word)
    return Unit(noun if power == 1 else f"{noun}^{power}", Fraction(1), is_listed)


def _is_listed(word: str) -> bool:
    return word == "per" or is_known(word) or bool({word.lower(), _singular(word.lower())} & _NOUNS)


def _look_up(word: str) -> Unit | None:
    if len(word) < 3 or word in _KNOWN:  # m is not M
        return _KNOWN.get(word)
    return _KNOWN.get(word.lower()) or _KNOWN.get(_singular(word.lower()))


def _singular(word: str) -> str:
    return _SINGULAR.sub("", word)
