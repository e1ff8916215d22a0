"""Golomb rulers: marks at integers, no two pairs of which are equally far apart. Many marks on a short ruler."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from trl_ext.sandbox.limits import Limits
from trl_ext.tools.discovery.problem import Problem, Verdict, global_of, with_run

LENGTH = 100  # the best have 14 marks on a length of 127, 13 on 106, 12 on 85
_MAX_MARKS = 200

TASK = f"""Find a Golomb ruler of length at most {LENGTH} with many marks.

Write a complete Python program that sets the global `marks`: a list of distinct integers from 0 to {LENGTH}. All
differences between two marks must be different. The score is the number of marks. The program runs for at most 60
seconds on one core. Answer with one block that begins with ```python.
"""


def verify(program: str | bytes, limits: Limits | None = None) -> Verdict:
    """Run the program in the sandbox and check its global `marks`."""
    marks, failure, ran = global_of(program, "marks", limits)
    return with_run(failure or check(marks), ran, {"num_marks": 0, "length": 0})


def check(marks: Any) -> Verdict:
    """The exact verdict. The score is (marks, -length): the shorter of two equally good rulers is better."""
    if not isinstance(marks, list) or not 2 <= len(marks) <= _MAX_MARKS:
        return Verdict(False, (), f"`marks` must be a list of 2 to {_MAX_MARKS} integers")
    for i, mark in enumerate(marks):
        if type(mark) is not int or not 0 <= mark <= LENGTH:
            return Verdict(False, (), f"marks[{i}] must be an integer from 0 to {LENGTH}, got {str(mark)[:40]!r}")
    length = max(marks) - min(marks)
    details = {"num_marks": len(marks), "length": length}
    seen: dict[int, tuple[int, int]] = {}
    for a, b in combinations(sorted(marks), 2):
        first = seen.setdefault(b - a, (a, b))
        if first != (a, b) or a == b:
            return Verdict(False, (), f"the difference {b - a} is there twice: {first} and {(a, b)}", details)
    told = f"{len(marks)} marks on a length of {length}"
    return Verdict(True, (len(marks), -length), told, details)


def ruler() -> Problem:
    """The model writes programs that construct a ruler."""
    return Problem("golomb_ruler", TASK, verify, "marks")
