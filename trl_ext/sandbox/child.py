"""Runs a program as a main module and sends the requested globals, or the error, as one JSON object."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_FILE = "program.py"
_MAX_DETAIL = 2000  # characters of a traceback


def run(program: bytes, names: list[str], result: int) -> NoReturn:
    """Execute the program and send its globals `names`, or the error, to the file descriptor `result`."""
    _reply(result, lambda: _globals_after(program, names))


def run_blocks(blocks: bytes, result: int) -> NoReturn:
    """Execute blocks of code, a JSON array of texts, in one space, of which the last one prints; send the error."""
    _reply(result, lambda: _printed_by_last(json.loads(blocks)))


def _reply(result: int, execute: Callable[[], dict[str, Any]]) -> NoReturn:
    ours = os.getpid()
    try:
        reply: dict[str, Any] = {"values": execute()}
    except MemoryError:
        reply = {"error": "memory", "detail": "MemoryError"}
    except _Unreadable as error:
        reply = {"error": "result", "detail": str(error)}
    except BaseException as error:
        reply = {"error": "error", "detail": _describe(error)}
    if os.getpid() != ours:  # a process that the program forked
        os._exit(0)
    try:
        tell(result, reply)
    except MemoryError:
        tell(result, {"error": "memory", "detail": "MemoryError"})
    os._exit(0)


class _Unreadable(Exception):
    """A global that is not a plain value."""


def _globals_after(program: bytes, names: list[str]) -> dict[str, Any]:
    space, dumps = _main_module(), json.dumps
    _show_lines(program.decode(errors="replace"))
    with _may_exit():
        exec(compile(program, _FILE, "exec", dont_inherit=True), space)
    values = {}
    for name in names:
        if name in space:
            try:
                values[name] = json.loads(dumps(space[name], default=_plain))
            except (TypeError, ValueError, RecursionError) as error:
                raise _Unreadable(f"`{name}` is no list of plain values: {_describe(error, 0)}") from None
    return values


def _printed_by_last(blocks: list[str]) -> dict[str, Any]:
    """Execute blocks; everything but what the last one prints, and the value of an expression at its end, is lost."""
    space, output = _main_module(), os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    for file in (1, 2):
        os.dup2(silent, file)
    for block in blocks[:-1]:
        with contextlib.suppress(BaseException):  # it did so as the last one, too: what it had done by then stays
            exec(compile(block, "earlier.py", "exec", dont_inherit=True), space)
        with contextlib.suppress(BaseException):  # a block may have put anything there
            sys.stdout.flush()
    for file in (1, 2):
        os.dup2(output, file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # lines before a limit are kept
    _show_lines(blocks[-1])
    tree = ast.parse(blocks[-1], _FILE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with _may_exit():
        exec(compile(tree, _FILE, "exec", dont_inherit=True), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval", dont_inherit=True), space)
            if value is not None:
                print(repr(value))
    sys.stdout.flush()
    return {}


@contextlib.contextmanager
def _may_exit() -> Iterator[None]:
    """`exit()` as the last line is not a failure."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def _main_module() -> dict[str, Any]:
    """The space of a new main module."""
    main_module = types.ModuleType("__main__")
    main_module.__file__ = _FILE
    sys.modules["__main__"], sys.argv = main_module, [_FILE]
    return main_module.__dict__


def _show_lines(program: str) -> None:
    """Have tracebacks show the program's lines."""
    linecache.cache[_FILE] = (len(program), None, program.splitlines(keepends=True), _FILE)


def _plain(value: object) -> object:
    """A NumPy array or number in Python's types."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _describe(error: BaseException, frames: int = 4) -> str:
    """The exception with its last frames within the program; the end of it if it is long."""
    try:
        trace = error.__traceback__ if frames else None
        while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-frames)).strip()
        for path in (sys.prefix, sys.base_prefix):  # do not reveal local paths
            text = text.replace(path, "python")
        return text[-_MAX_DETAIL:]
    except BaseException:  # a message of a million digits, or an exception that cannot be printed
        return "an exception that cannot be shown"


def tell(file: int, message: dict[str, Any]) -> None:
    """Write one JSON object and a newline to a file descriptor."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]
