"""One table type for every axis: a dict of pure functions with strict lookup.

A member is registered under its function's name, so a configuration can be grepped. Options are checked against
the function's signature when the configuration is built, before any rollout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from trl_ext.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])
_FOLDERS: set[str] = set()  # folders of loaded user files
_INTERACTIVE = "__main__"  # where a notebook's cells define their functions
_EXPONENT = re.compile(r"[-+]?(\d++\.?\d*+|\.\d+)[eE][-+]?\d+")


class UnknownName(InputError):
    """A name that is not in a table. The message names the nearest match and lists the choices."""


def defaults_of(of: Any) -> dict[str, Any]:
    """The default of each field of a dataclass; `dataclasses.MISSING` where there is none."""
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(of)
    }


_SHOWN = 60  # names in a message


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for a `name` that is not among the `known` names of a `kind`."""
    choices = sorted(known)
    begun = [choice for choice in choices if name and choice.startswith(name)]
    nearest = begun or difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    more = f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else ""  # folders next to a misspelled one
    return UnknownName(f"unknown {kind} {name!r}.{hint} Known: {', '.join(choices[:_SHOWN]) or '(none)'}{more}")


class Registry(dict[str, Callable[..., Any]]):
    """Functions of one kind by name; `build` binds options after checking them against the signature.

    Args:
        kind: what a member is called in messages.
        fault: calls a user's own member on a small example with groups (or as many rows) of the given size, and
            describes what is wrong with the result; None if nothing is.
        properties: properties that a member may declare when it is registered; False if undeclared.
        inputs: names of keyword-only parameters that the caller fills in, not the configuration: a member that has
            one asks for it, and what no member asks for need not be computed.
        adapt: a user's own function and its import path -> one with the signature of the members.
    """

    def __init__(
        self,
        kind: str,
        fault: Callable[[Callable[..., Any], int], str | None] | None = None,
        properties: Iterable[str] = (),
        inputs: Iterable[str] = (),
        adapt: Callable[[Callable[..., Any], str], Callable[..., Any]] = lambda function, _: function,
    ) -> None:
        super().__init__()
        self.kind, self.fault, self.adapt = kind, fault, adapt
        self.properties, self.inputs = tuple(properties), tuple(inputs)

    @typing.overload
    def register(self, function: F, /) -> F: ...

    @typing.overload
    def register(self, /, **declared: bool) -> Callable[[F], F]: ...

    def register(self, function: F | None = None, /, **declared: bool) -> F | Callable[[F], F]:
        """Decorator: add a function under its own name, once; declared properties become its attributes."""
        for name in declared:
            if name not in self.properties:
                raise unknown(f"property of a {self.kind}", name, self.properties)

        def add(function: F) -> F:
            if function.__name__ in self and not _is_redefined(function, self[function.__name__]):
                raise ValueError(f"{self.kind} {function.__name__!r} is registered twice")
            vars(function).update(declared)
            self[function.__name__] = function
            return function

        return add if function is None else add(function)

    def get_function(self, name: str) -> Callable[..., Any]:
        """The member called `name`, or the function of an import path `file.py:function` or `module:function`."""
        if not isinstance(name, str):
            raise InputError(
                f"{self.kind}: {name!r} is not a name; register the function with a decorator and give its name, or "
                "give file.py:function"
            )
        if name in self:
            return self[name]
        if ":" in name:
            return self.adapt(import_function(name, self.kind), name)
        raise unknown(self.kind, name, self)

    def options(self, name: str) -> dict[str, Any]:
        """Option names of a member with their defaults: its keyword-only arguments that are no inputs."""
        keywords = _keyword_only(self.get_function(name))
        return {option: default for option, default in keywords.items() if option not in self.inputs}

    def inputs_of(self, member: Callable[..., Any]) -> tuple[str, ...]:
        """Names of the inputs that a member asks for, next to its positional ones."""
        return tuple(name for name in _keyword_only(member) if name in self.inputs)

    def build(self, name: str, example_size: int = 4, /, **options: object) -> Callable[..., Any]:
        """The member `name` with its options bound.

        Args:
            name: in the table, or an import path.
            example_size: completions per prompt in the example that a user's own member is called with.

        Raises:
            UnknownName: the name, or an option, does not exist.
            ValueError: a required option is missing, or a user's own function returns another type than a member.
        """
        function, known = self.get_function(name), self.options(name)
        hints = _hints(function)
        for option, value in options.items():
            if option not in known:
                raise unknown(f"option of {self.kind} {name!r}", option, known)
            if not fits(value, hints.get(option, object)):
                expected = getattr(hints[option], "__name__", hints[option])
                raise ValueError(f"option {option!r} of {self.kind} {name!r} must be {expected}, got {value!r}")
        for option, default in known.items():
            if default is inspect.Parameter.empty and option not in options:
                raise ValueError(f"{self.kind} {name!r} needs the option {option!r}")
        bound = functools.update_wrapper(functools.partial(function, **options), function)
        if self.fault and (name not in self or function.__module__ == _INTERACTIVE):
            self.try_on_example(name, bound, example_size)
        return bound

    def try_on_example(self, name: str, member: Callable[..., Any], size: int) -> None:
        """Refuse a member that raises, or returns something else than it should, on an example of groups of `size`."""
        assert self.fault is not None
        try:
            fault = self.fault(member, size)
        except Exception as error:
            error.add_note(f"in a call on an example, before any training: G={size} completions per prompt, T=3 tokens")
            raise
        if fault:
            raise ValueError(f"{self.kind} {name!r} {fault}")


def _is_redefined(function: Callable[..., Any], member: Callable[..., Any]) -> bool:
    """Whether a notebook's cell that defines a member was run again."""
    return function.__module__ == member.__module__ == _INTERACTIVE and function is not member


def parse_options(name: str, options: Mapping[str, Any] | str | None) -> dict[str, Any] | None:
    """Options given as a mapping, as JSON, or as `a=1,b=2`; another text is a ValueError that shows both forms."""
    if options is None or isinstance(options, Mapping):
        return None if options is None else {key: _number(value) for key, value in options.items()}
    try:
        if options.lstrip().startswith("{"):
            parsed = json.loads(options)
            assert isinstance(parsed, dict)
            return parsed
        pairs = [item.split("=", 1) for item in options.split(",")]
        values = {key.strip(): _number(yaml.safe_load(value)) for key, value in pairs}
        return {key: None if value in ("none", "None") else value for key, value in values.items()}  # as a flag's none
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f'{name} {options!r} is neither `eps_low=0.1,eps_high=0.3` nor JSON `{{"eps_low": 0.1}}`'
        ) from error


def _number(value: Any) -> Any:
    """`value`, or the number it writes as `1e-6`, which YAML 1.1 reads as a text."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _keyword_only(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # a name under TYPE_CHECKING
        return {}


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type, or an integer where a float is meant; True of a type that has parts."""
    try:
        return isinstance(value, hint) or (isinstance(value, int) and isinstance(float(value), hint))
    except TypeError:  # a type that cannot be checked, such as list[str]
        return True


def import_function(path: str, kind: str) -> Callable[..., Any]:
    """What `file.py:function` or `package.module:function` names. A file is loaded once."""
    where, _, attribute = path.rpartition(":")
    module = _load_file(Path(where), kind) if where.endswith(".py") else _load_module(where, kind)
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ValueError(f"{kind}: {where!r} has no function {attribute!r}. It has: {', '.join(public) or 'none'}")
    return function


def _load_module(name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{kind}: cannot import {name!r} ({error})") from error


def _load_file(path: Path, kind: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{kind}: no file {str(path)!r} (working directory: {Path.cwd().name!r})")
    path = path.resolve()
    name = f"trl_ext_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None  # a .py path always has one
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            with _siblings_of(path):
                spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, SyntaxError):
                raise ValueError(f"{kind}: {error.filename}, line {error.lineno}: {error.msg}") from error
            if isinstance(error, ImportError):
                raise ValueError(f"{kind}: {str(path)!r} cannot be imported: {error}") from error
            raise
    return sys.modules[name]


@contextlib.contextmanager
def _siblings_of(path: Path) -> Iterator[None]:
    """In the block, imports look into the file's folder first, as for a script; others' siblings are unloaded."""
    folder = str(path.parent)
    for other, module in list(sys.modules.items()):
        place = Path(getattr(module, "__file__", None) or "").parent
        if str(place) in _FOLDERS - {folder} and (path.parent / f"{other}.py").exists():
            del sys.modules[other]  # modules that imported it keep it
    _FOLDERS.add(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
