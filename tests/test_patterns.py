"""No regular expression of the package takes more than linear time on text that somebody else has written."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from re import _parser as sre  # type: ignore[attr-defined]
from typing import Any

import pytest

import trl_ext
from trl_ext.rewards.strict.compare import MAX_LENGTH

PACKAGE = Path(trl_ext.__file__).parent
METHODS = ("search", "match", "fullmatch", "sub", "subn", "findall", "finditer", "split")
LENGTH = 3_000  # of a text; a quadratic pattern takes some 0.1 s for it, a linear one below 1 ms
SECONDS = 0.06
# What reads texts of a bounded length only; `clean` and `compare`, which see to that, read any.
BOUNDED = {f"trl_ext.rewards.strict.{name}:": MAX_LENGTH for name in ("grammar", "read", "sets", "solutions", "units")}


def patterns_of(path: Path) -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Each pattern of a module's source with the method that it is used by, and where it is."""
    name = ".".join(("trl_ext", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            continue
        owner, place = node.func.value, f"{name}:{node.lineno}"
        if isinstance(owner, ast.Name) and owner.id == "re":
            made = node.args[0]
            if isinstance(made, ast.Constant):
                flags = ast.unparse(next((k.value for k in node.keywords if k.arg == "flags"), ast.Constant(0)))
                yield place, re.compile(made.value, eval(flags, {"re": re})), node.func.attr
        elif isinstance(owner, ast.Name) and owner.id.upper() == owner.id:
            found = getattr(importlib.import_module(name), owner.id, None)
            if isinstance(found, re.Pattern) and isinstance(found.pattern, str):
                yield place, found, node.func.attr


def literals(parsed: Any) -> Iterator[str]:
    """Runs of literal characters, and one character of each class, in a parsed pattern."""
    run = ""
    for kind, value in parsed:
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
            continue
        if run:
            yield run
            run = ""
        if name == "IN":
            for part, what in value:
                if str(part) == "RANGE":
                    yield chr(what[0])
                elif str(part) == "LITERAL":
                    yield chr(what)
                elif str(part) == "CATEGORY":
                    yield {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(what), "-")
        elif name in ("ANY", "NOT_LITERAL"):
            yield "z"
        for part in value if isinstance(value, (list, tuple)) else (value,):
            for inner in part if isinstance(part, list) else (part,):
                if isinstance(inner, sre.SubPattern):
                    yield from literals(inner)
    if run:
        yield run


def hostile(pattern: re.Pattern[str], length: int) -> Iterator[str]:
    """Runs of what the pattern looks for, of two such things in turn, and of one after another."""
    flags = pattern.flags & ~re.UNICODE
    units = list(dict.fromkeys([*literals(sre.parse(pattern.pattern, flags)), " ", "a", "7"]))[:10]
    for unit in units:
        yield unit * (length // len(unit))
    for first in units:
        for second in units:
            if first != second:
                yield (first + second) * (length // len(first + second))
                yield first + second * (length // len(second))


def seconds(pattern: re.Pattern[str], method: str, text: str) -> float:
    arguments = ("", text) if method in ("sub", "subn") else (text,)
    began = time.thread_time()  # not the clock on the wall: two cores may be busy with other tests
    found = getattr(pattern, method)(*arguments)
    if method == "finditer":
        list(found)
    return time.thread_time() - began


@pytest.mark.moderate
def test_every_pattern_of_the_package_takes_linear_time() -> None:
    known: dict[tuple[str, int, str], tuple[str, re.Pattern[str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for place, pattern, method in patterns_of(path):
            known.setdefault((pattern.pattern, pattern.flags, method), (place, pattern))
    assert len(known) > 60
    slow = {}
    for (_, _, method), (place, pattern) in known.items():
        length = next((most for where, most in BOUNDED.items() if place.startswith(where)), LENGTH)
        for text in hostile(pattern, length):
            if seconds(pattern, method, text) > SECONDS and min(seconds(pattern, method, text) for _ in "ab") > SECONDS:
                slow[place] = (pattern.pattern, text[:30])
                break
    assert not slow, "\n".join(f"{k}: {v}" for k, v in slow.items())
