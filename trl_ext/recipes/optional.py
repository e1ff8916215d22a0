"""Settings that may be unset, and lists: the same words say "none" as a flag and in a YAML file.

`none`, `null`, `[]` and an empty text unset a setting whose type has None, and empty a list, as `null`, `[]` and
`['']` do in YAML. A list with one of these next to other values is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS = ("", "none", "null", "[]")
NAMED_NONE = ("report_to",)  # `none` is a choice among others
_TRUE_OR_TEXT = ("use_vllm", "scale_rewards")  # texts, of which two are true and false


_ACCEPTED: tuple[tuple[type, tuple[type, ...]], ...] = (
    (Enum, (str,)),
    (str, (str,)),
    (bool, (bool, str)),
    (int, (int, str)),
    (float, (float, int, str)),
    (list, (list, str, int, float)),
    (Mapping, (dict, str)),
)
_NAMES = {
    str: "text",
    bool: "boolean",
    int: "whole number",
    float: "number",
    list: "list of texts or numbers",
    dict: "mapping",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the type of a setting allows."""

    is_optional: bool
    is_list: bool
    kinds: tuple[type, ...] = ()  # of values that a YAML file may have for it; empty for any


def shapes_of(settings: Iterable[type]) -> dict[str, Shape]:
    """The shape of every setting of these dataclasses, by its name."""
    hints = {name: hint for kind in settings for name, hint in get_type_hints(kind).items()}
    defaults = {field.name: field.default for kind in settings for field in dataclasses.fields(kind) if field.init}
    shapes = {name: _shape_of(hints[name], default) for name, default in defaults.items()}
    for name in set(_TRUE_OR_TEXT) & set(shapes):
        shapes[name] = dataclasses.replace(shapes[name], kinds=(str, bool))
    return shapes


def _shape_of(hint: object, default: object) -> Shape:
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    others = [member for member in members if member is not type(None)]
    is_list = all(get_origin(member) is list or member is list for member in others)
    kinds = [_kinds_of(member) for member in others]
    known = () if () in kinds else tuple(dict.fromkeys(kind for accepted in kinds for kind in accepted))
    return Shape(default is None or len(others) < len(members), is_list, known)


def _kinds_of(hint: object) -> tuple[type, ...]:
    """The types of what YAML reads for a member of a union; a text may be converted. Empty for any."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return tuple({type(value) for value in get_args(hint)})
    if not isinstance(kind, type):
        return ()
    for base, accepted in _ACCEPTED:
        if issubclass(kind, base):
            return accepted
    return ()


def is_none(value: object) -> bool:
    """Whether a value of a flag or of a YAML file says that the setting has none."""
    return value is None or value == [] or (isinstance(value, str) and value.strip().lower() in _WORDS)


def take_words_for_none(parser: argparse.ArgumentParser, shapes: Mapping[str, Shape]) -> None:
    """Have the parser's flags take the words, where a number or a boolean is expected too."""
    for action in parser._actions:
        shape = shapes.get(action.dest)
        if shape is not None and (shape.is_optional or shape.is_list) and callable(action.type):
            convert = _several(action.type) if shape.is_list and action.type in (int, float) else action.type
            action.type = _or_none(convert)


def _several(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Also of numbers with commas between them, as `1,0.2`, which are a list."""

    @functools.wraps(convert, updated=())
    def converted(text: str) -> Any:
        return [convert(part) for part in text.split(",")] if "," in text else convert(text)

    return converted


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(convert, updated=())  # argparse's messages have its name
    def converted(text: str) -> Any:
        return None if is_none(text) else convert(text)

    return converted


def check_kinds(settings: Mapping[str, object], shapes: Mapping[str, Shape]) -> None:
    """Raise a `ValueError` for a setting of a YAML file that is null and needs a value, or is no text, number or list
    where one belongs.
    """
    for name, value in settings.items():
        shape = shapes.get(name)
        if shape is None or ((shape.is_optional or shape.is_list) and is_none(value)):
            continue
        if value is None:
            raise ValueError(f"{name}: null: this setting needs a value; leave it out for its default")
        is_nested = isinstance(value, list) and any(isinstance(item, (list, dict, bool)) for item in value)
        if shape.kinds and (type(value) not in shape.kinds or is_nested):
            quotes = '; in "quotes" it is one' if shape.kinds[0] is str and isinstance(value, (int, float)) else ""
            raise ValueError(f"{name}: {value!r} is no {_NAMES[shape.kinds[0]]}{quotes}")


def resolve_none(settings: argparse.Namespace, shapes: Mapping[str, Shape]) -> None:
    """Bring parsed settings, of flags and of a YAML file, to None or an empty list where they say "none".

    Raises:
        ValueError: a list has "none" next to other values.
    """
    for name, shape in shapes.items():
        value = getattr(settings, name, dataclasses.MISSING)
        if value is dataclasses.MISSING:
            continue
        if shape.is_list:
            setattr(settings, name, _resolved_list(name, value, shape))
        elif name in NAMED_NONE:
            setattr(settings, name, "none" if is_none(value) else value)
        elif shape.is_optional:
            setattr(settings, name, None if is_none(value) else value)


def _resolved_list(name: str, value: object, shape: Shape) -> list[Any] | None:
    values = _list_of(name, value)
    return None if not values and shape.is_optional else values


def _list_of(name: str, value: object) -> list[Any]:
    """The values of a list setting, which may be a single one."""
    given = value if isinstance(value, (list, tuple)) else [value]
    values = [number for member in given for number in (member if isinstance(member, list) else [member])]
    none = [member for member in values if is_none(member)]
    if none and len(none) < len(values):
        raise ValueError(f"{name}: {none[0] or 'an empty text'!r} next to other values: give either none or values")
    return [] if none else list(values)
