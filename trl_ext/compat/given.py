"""Which settings were given: by a flag, in a YAML file or as a keyword argument, whatever their value.

A preset fills what was not given, so a value that equals the default must be told from one that nobody wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, Self

from trl_ext.compat import install

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_parsed: ContextVar[frozenset[str]] = ContextVar("_parsed", default=frozenset())


class _InstallsForParser:
    """What transformers' parser asks a class for before it reads its fields: a group of flags, which there is not."""

    def __get__(self, owner: object, kind: type[Any]) -> NoReturn:
        install()
        raise AttributeError(f"{kind.__name__} has no group")


class RecordsGiven:
    """Mixin for a dataclass of settings: records the names of the arguments that its constructor was called with.

    A parser passes every field, and so does `dataclasses.replace`; then those count that the parser was given. Hence
    a parser that is made for such a class has `record_in_parser` installed.
    """

    _argument_group_name = _InstallsForParser()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Record the names; unpickling and copying call this without arguments and restore the record."""
        self = super().__new__(cls)
        fields = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        passed = {*fields[: len(args)], *kwargs}
        _record(self, _parsed.get() & passed if passed >= set(fields) else passed)
        return self


def given(part: DataclassInstance, names: Iterable[str], off: bool = True) -> dict[str, Any]:
    """Those of the settings that were given, or that have another value than their default.

    Args:
        off: whether None and False count where they are the default: a preset must leave them alone, and nothing has
            to be refused because of them.
    """
    defaults = {f.name: _default(f) for f in dataclasses.fields(part)}
    values = {name: getattr(part, name) for name in names}
    changed = {name for name, value in values.items() if value != defaults[name]}
    said = {name for name in recorded_names(part) if off or not any(values.get(name) is no for no in (None, False))}
    return {name: value for name, value in values.items() if name in changed | said}


def recorded_names(part: object) -> tuple[str, ...]:
    """The settings that were given, in alphabetical order; none of a config that an earlier version pickled."""
    return tuple(getattr(part, "_given", ()))


def reset(part: DataclassInstance, *names: str) -> None:
    """Make settings as if they had not been given, once others have taken over what they say."""
    for field in dataclasses.fields(part):
        if field.name in names:
            setattr(part, field.name, _default(field))
    _record(part, {*recorded_names(part)} - {*names})


def record_in_parser() -> None:
    """Patch TRL's parser: the settings that it makes know which flags and which fields of its file were given."""
    from trl import TrlParser

    parse, set_defaults = TrlParser.parse_args_into_dataclasses, TrlParser.set_defaults_with_config

    @functools.wraps(parse)
    def parse_and_record(
        self: Any, args: Sequence[str] | None = None, *rest: object, **options: object
    ) -> tuple[Any, ...]:
        flags = {arg.partition("=")[0] for arg in (sys.argv[1:] if args is None else args)}
        destinations = {option.dest for flag, option in self._option_string_actions.items() if flag in flags}
        names = frozenset(destinations | getattr(self, "_names_in_file", set()))
        token = _parsed.set(names)
        try:
            parsed: tuple[Any, ...] = parse(self, args, *rest, **options)
        finally:
            _parsed.reset(token)
        for part in parsed:
            if dataclasses.is_dataclass(part) and not isinstance(part, RecordsGiven):
                _record(part, names & {f.name for f in dataclasses.fields(part)})
        return parsed

    @functools.wraps(set_defaults)
    def set_and_record(self: Any, **settings: object) -> object:
        self._names_in_file = set(settings)
        return set_defaults(self, **settings)

    TrlParser.parse_args_into_dataclasses = parse_and_record
    TrlParser.set_defaults_with_config = set_and_record


def _record(part: object, names: Iterable[str]) -> None:
    object.__setattr__(part, "_given", tuple(sorted(names)))  # in order: it is pickled into checkpoints


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
