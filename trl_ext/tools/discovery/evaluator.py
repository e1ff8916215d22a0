"""The command line of every problem's `evaluator.py PROGRAM`: run, verify, print the verdict, exit with 0, 1 or 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from trl_ext.sandbox.limits import Limits, SandboxError
from trl_ext.tools.discovery.problem import Verdict, shown_score

_MAX_PROGRAM = 2**20  # bytes


def evaluator_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every evaluator has."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog="exit status: 0 valid, 1 invalid, 2 no verdict (wrong arguments, or no sandbox here)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM", help="a Python file")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the program (60)")
    parser.add_argument("--memory_mb", type=int, default=2048, help="MiB of address space (2048)")
    parser.add_argument("--no_namespaces", action="store_true", help="limits without isolation, for debugging")
    return parser


def evaluate(arguments: argparse.Namespace, verify: Callable[[bytes, Limits], Verdict]) -> int:
    """Judge the file, print the verdict, and return the exit status."""
    try:
        program = arguments.program.read_bytes()
        if len(program) > _MAX_PROGRAM:
            raise ValueError(f"{str(arguments.program)!r} has {len(program)} bytes, more than {_MAX_PROGRAM}")
        limits = Limits(arguments.seconds, arguments.memory_mb, namespaces=not arguments.no_namespaces)
        verdict = verify(program, limits)
    except (OSError, ValueError, SandboxError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(verdict) if arguments.json else as_text(verdict))
    return 0 if verdict.valid else 1


def as_json(verdict: Verdict) -> str:
    """The verdict as one JSON object on one line."""
    judged = {"validity": float(verdict.valid), "score": verdict.score, "message": verdict.message}
    return json.dumps({**verdict.details, **judged})


def as_text(verdict: Verdict) -> str:
    """The verdict line by line. Text that the program may have influenced is marked, so it cannot imitate a line."""
    lines = [f"{name}: {value}" for name, value in verdict.details.items() if name != "program_output"]
    lines += [f"validity: {float(verdict.valid)}", f"score: {shown_score(verdict.score)}"]
    lines += [f"| {line}" for line in _printable(verdict.message).splitlines()]
    if "program_output" in verdict.details:
        lines.append(f"program_output: {verdict.details['program_output']!r}")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """The text without characters that control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
