"""Runs a program as a main module and sends the requested globals, or the error, as one JSON object."""

from __future__ import annotations

import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

_MAX_DETAIL = 2000  # characters of a traceback


def run(program: bytes, names: list[str], result: int) -> None:
    """Execute the program and send its globals `names`, or the error, to the file descriptor `result`."""
    ours = os.getpid()
    try:
        reply: dict[str, Any] = {"values": _globals_after(program, names)}
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
    main_module = types.ModuleType("__main__")
    main_module.__file__ = "program.py"
    sys.modules["__main__"], sys.argv = main_module, ["program.py"]
    lines = program.decode(errors="replace").splitlines(keepends=True)
    linecache.cache["program.py"] = (len(program), None, lines, "program.py")  # tracebacks then show the line
    space, dumps = main_module.__dict__, json.dumps
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), space)
    except SystemExit as end:  # `exit()` as the last line is not a failure
        if end.code:
            raise
    values = {}
    for name in names:
        if name in space:
            try:
                values[name] = json.loads(dumps(space[name], default=_plain))
            except (TypeError, ValueError, RecursionError) as error:
                raise _Unreadable(f"`{name}` is no list of plain values: {_describe(error, 0)}") from None
    return values


def _plain(value: object) -> object:
    """A NumPy array or number in Python's types."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


def _describe(error: BaseException, frames: int = 4) -> str:
    """The exception with its last frames within the program; the end of it if it is long."""
    try:
        trace = error.__traceback__ if frames else None
        while trace is not None and trace.tb_frame.f_code.co_filename != "program.py":
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
