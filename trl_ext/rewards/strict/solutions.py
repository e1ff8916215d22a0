r"""Answers of several parts: `(x,y)=(5,8),(8,5)`, `AB=4, CD=5`, `3 to 2`, and `n\pi` for all integers n."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence

from trl_ext.rewards.expression import variables
from trl_ext.rewards.strict.answers import Answer, Named, Ordered, Quantity, Several, Union, Unreadable, is_expression
from trl_ext.rewards.strict.grammar import parse
from trl_ext.rewards.strict.progressions import as_progression
from trl_ext.rewards.strict.statements import LABEL, NAME

MAX_PARTS = 8
_TUPLE = re.compile(rf"(\({NAME}(?:,{NAME})+\))(?:=|\\in)(.+)")
_LIST_SIGN = re.compile(r"(?P<bracket>[()\[\]{}])|[,;] ?(?:(?:and|or) )?| and | or ")
_PART = re.compile(r"[,;]| and ")
_INTERVALS = re.compile(r"[(\[][^()\[\]]{1,100}[)\]](?: ?or ?[(\[][^()\[\]]{1,100}[)\]])+")
_EVERY = "(?:all |any |every |some |each |an |arbitrary )?"
_INTEGERS = re.compile(
    rf"\(?(?:(?:where|for|with|and) ?)?{_EVERY}"
    rf"(?:integers? (?P<named>[a-z])|(?P<name>[a-z]) ?(?:\\in ?\\mathbb\{{Z\}}|(?:is )?{_EVERY}integer))\)?\Z"
)
_INTEGERS_LENGTH = 40  # no match is longer: looked for in the whole text, the pattern would take quadratic time
_LETTER = re.compile(r"[a-zA-Z]|\\(?:theta|phi|alpha|beta|gamma|lambda)")
_UNKNOWN = re.compile(r"(?:[a-zA-Z]|\\theta)=")


def of_several_parts(text: str, words: str, read: Callable[[str], Sequence[Answer]]) -> list[Answer]:
    r"""What a clean text means as an answer of several parts.

    Args:
        words: the text with the words of `\text` groups as they are.
        read: the readings of a part.
    """
    answers = list[Answer]()
    with contextlib.suppress(Unreadable):
        if "=" in text or r"\in" in text:
            answers += _tuples(words) or _labeled(words, read)
        if " to " in words:
            answers += _ratio(words)
        if "or" in words and _INTERVALS.fullmatch(words):
            several = parse(words)
            answers += [Union(several.items)] if isinstance(several, Several) else []
        start = max(0, len(words) - _INTEGERS_LENGTH)
        if (r"\mathbb{Z}" in text or "integer" in text) and (match := _INTEGERS.search(words, start)):
            tree = parse(_UNKNOWN.sub("", words[: match.start()].strip(", "), count=1))
            answers += [progression] if (progression := as_progression(tree, match["named"] or match["name"])) else []
    return answers


def of_quantities(words: str, read: Callable[[str], Sequence[Answer]]) -> list[Answer]:
    r"""`4 cm, 5 cm` and `(6,235 degrees)`: several answers or a point, at least one of which has a unit."""
    is_point = words.startswith("(") and words.endswith(")")
    parts = _split_outside_of_brackets(words[1:-1] if is_point else words)
    if not 1 < len(parts) <= MAX_PARTS or not all(parts):
        return []
    items = [read(part) for part in parts]
    units = {item[0].unit for item in items if item and isinstance(item[0], Quantity)}
    if len({unit.dimension for unit in units}) < len(units):  # 3 cm and 4 m are not 3, 4
        return []
    if not all(items) or not any(isinstance(item[0], Quantity) and item[0].unit.is_listed for item in items):
        return []
    values = tuple(item[0] for item in items)
    return [Ordered("()", values) if is_point else Several(values)]


def _split_outside_of_brackets(words: str) -> list[str]:
    """The items of a list; none if a bracket is closed that is not open."""
    parts, depth, last = list[str](), 0, 0
    for match in _LIST_SIGN.finditer(words):
        if match["bracket"]:
            depth += 1 if match["bracket"] in "([{" else -1
            if depth < 0:
                return []
        elif depth == 0:
            parts.append(words[last : match.start()].strip())
            last = match.end()
    return [part for part in (*parts, words[last:].strip()) if part or not parts]


def _tuples(words: str) -> list[Answer]:
    """`(x,y)=(5,8) or (x,y)=(8,5)`: several tuples with the name of one."""
    if (match := _TUPLE.fullmatch(words)) is None:
        return []
    label, rest = match[1], match[2].replace(f"{match[1]}=", "")
    several, size = parse(rest), label.count(",") + 1
    if not isinstance(several, Several) or len(several.items) < 2:
        return []
    fit = all(isinstance(item, Ordered) and item.brackets == "()" and len(item.items) == size for item in several.items)
    return [Named(label, several)] if fit else []


def _labeled(words: str, read: Callable[[str], Sequence[Answer]]) -> list[Answer]:
    """`AB=4, CD=5` in this order, or in another if the names are given on both sides."""
    parts = [part.strip().partition("=") for part in _PART.split(words)]
    names = [name for name, _, _ in parts]
    if not 1 < len(set(names)) == len(parts) <= MAX_PARTS:
        return []
    are_letters = all(map(_LETTER.fullmatch, names))
    if not are_letters and not all(map(LABEL.fullmatch, names)):
        return []
    values = [read(value) for _, _, value in parts]
    if not all(values):
        return []
    if are_letters and names != sorted(names, key=lambda name: (name.startswith("\\"), name)):
        return []
    named = [Named(name, value[0]) for name, value in zip(names, values, strict=True)]
    point = Named(f"({','.join(names)})", Ordered("()", tuple(value[0] for value in values)))
    in_order: list[Answer] = [one for _, one in sorted(zip(names, named, strict=True), key=lambda pair: pair[0])]
    lists: list[Answer] = [Ordered(",", tuple(named)), Ordered("=", tuple(in_order))]
    return [point] if are_letters else lists


def _ratio(words: str) -> list[Answer]:
    items = [parse(part) for part in words.split(" to ")[:MAX_PARTS]]
    numbers = all(is_expression(item) and not variables(item) for item in items)
    return [Ordered(":", tuple(items))] if numbers else []
