"""The kissing problem: how many unit spheres touch one in 11 dimensions, as integer points and an exact check.

Points x of one length |x| = R are centers of such spheres if no two are closer than R. With integers of any lengths
the same holds if the smallest distance is at least the largest length: scaled to one length, points only part.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Any

from trl_ext.registry import import_function
from trl_ext.sandbox import run_program
from trl_ext.sandbox.limits import Limits, ProgramFailure
from trl_ext.tools.discovery.problem import Polished, Problem, Verdict, global_of, with_run

DIMENSION = 11
MAX_POINTS = 1000  # no set of 869 is valid in 11 dimensions (de Laat and Leijenhorst 2022): larger sets are refused
_MAX_DIGITS = 100
NOTHING = {"num_points": 0, "dimension": DIMENSION}  # details of a program that leaves no points

TASK = f"""Find a large kissing configuration in {DIMENSION} dimensions.

Write a complete Python program that sets the global `points`: a list of points, each a list of {DIMENSION} integers
(numpy integers are fine, floats are not). It is valid if no point is zero, no two are equal, and the smallest squared
distance of two points is at least the largest squared norm of a point. Integers have arbitrary size, so directions
with irrational coordinates can be rounded at a large radius, such as 10**12, where they have some room.

The score is the number of points. Known are 592 (Ganzhinov 2022) and 593 (AlphaEvolve 2025); also 604 (2026), but with
irrational coordinates and points that touch exactly, which no rounding keeps valid. The program runs for at most 60
seconds on one core, with the standard library, numpy and scipy, without network and files. Answer with one block that
begins with ```python.
"""

HYBRID_TASK = f"""{TASK}
A numeric polisher finishes what your program begins. Instead of `points` your program may set two globals:
`core`, a list of integer points that stay as they are, and `movable`, a list of directions in {DIMENSION} dimensions
(floats are fine here) that the polisher moves until the whole set is valid, if it can. So what counts is structure:
a good core, and directions near the holes of it. Your program may also contain its own improvement of them.
"""


def verify(program: str | bytes, limits: Limits | None = None) -> Verdict:
    """Run the program in the sandbox and check its global `points`."""
    points, failure, ran = global_of(program, "points", limits)
    return with_run(failure or check(points), ran, NOTHING)


def check(points: Any) -> Verdict:
    """The exact verdict on `points`.

    The score is (count, slack). For a valid set, its size and -1. For an invalid one, what remains of it when the point
    with most points closer to it than the largest norm is dropped until there are none, and how far the complete set is
    from valid: min |x - y|^2 / max |x|^2 - 1, which is below 0.
    """
    reason = malformed(points)
    details: dict[str, Any] = {**NOTHING, "num_points": len(points) if isinstance(points, list) else 0}
    if reason:
        return Verdict(False, (), reason, details)
    norms = [sum(map(mul, x, x)) for x in points]
    largest = max(norms)
    smallest, pair, close = _closest(points, norms, largest)
    details |= {"min_squared_distance": smallest, "max_squared_norm": largest}
    if smallest is None or smallest >= largest:
        told = f"{len(points)} points, minimum squared distance {smallest} >= maximum squared norm {largest}"
        if smallest is None:
            told = "1 point, which touches the sphere in the middle only"
        return Verdict(True, (len(points), -1.0), told, details)
    count = len(points) - _dropped(close, len(points))
    slack = -float((largest - smallest) / largest)
    details |= {"pair": list(pair), "close_pairs": len(close), "valid_part": count}
    told = f"minimum squared distance {smallest} < maximum squared norm {largest}, points {pair[0]} and {pair[1]}"
    return Verdict(False, (count, slack), f"{told}; {len(close)} pairs are too close", details)


def polish_program(program: str, seed: int, seconds: float) -> Polished | str:
    """Let this folder's polisher move the directions in a program's `movable` (or `points`); its `core` stays fixed.

    Returns:
        A program that states the polished set, and the verdict on it; or why there is none.
    """
    ran = run_program(program, ["core", "movable", "points"])
    if isinstance(ran, ProgramFailure):
        return ran.detail
    core = ran.values.get("core", [])
    movable = ran.values.get("movable", ran.values.get("points"))
    reason = (malformed(core) if core else "") or _no_directions(movable, len(core) if core else 0)
    if reason:
        return reason
    try:
        import numpy as np

        polish = import_function(f"{Path(__file__).with_name('polish.py')}:polish", "polisher")
        directions = np.array([[float(v / max(map(abs, x))) for v in x] for x in movable])
        fixed = np.array(core or [], dtype=object).reshape(-1, DIMENSION)  # of integers of any size
        points = polish(fixed, directions, seed=seed, seconds=seconds)
    except (ImportError, ValueError, ArithmeticError, MemoryError) as error:
        return f"the polisher failed: {type(error).__name__}: {error}"
    if points is None:
        return f"the polisher found no valid set of {len(core) + len(movable)} points"
    text = f"points = {[[int(v) for v in point] for point in points]}\n".replace("], [", "],\n    [")
    return Polished(text, verify(text))


def _no_directions(movable: Any, core: int) -> str:
    """Why these are not directions to move; "" if they are."""
    if not isinstance(movable, list) or not movable:
        return f"`movable` must be a list of directions, got {_kind(movable)}"
    if core + len(movable) > MAX_POINTS:
        return f"{core + len(movable)} points: more than {MAX_POINTS} cannot be valid and are not looked at"
    for i, x in enumerate(movable):
        is_numbers = isinstance(x, list) and len(x) == DIMENSION and all(type(v) in (int, float) for v in x)
        if not is_numbers or not all(-1e100 < v < 1e100 for v in x) or not any(x):
            return f"movable[{i}] must be a direction of {DIMENSION} numbers, not all 0, got {_kind(x)}"
    return ""


def constructor() -> Problem:
    """The model writes programs that construct a set."""
    return Problem("kissing_number", TASK, verify, "valid points", HYBRID_TASK, polish_program)


def malformed(points: Any) -> str:
    """Why these are not distinct, non-zero integer points; "" if they are."""
    if not isinstance(points, list) or not points:
        return f"`points` must be a list of points, got {_kind(points)}"
    if len(points) > MAX_POINTS:
        return f"{len(points)} points: more than {MAX_POINTS} cannot be valid and are not looked at"
    seen: dict[tuple[int, ...], int] = {}
    for i, point in enumerate(points):
        if not isinstance(point, list) or len(point) != DIMENSION:
            return f"points[{i}] must be a list of {DIMENSION} integers, got {_kind(point)}"
        for k, value in enumerate(point):
            if type(value) is not int:
                return f"points[{i}][{k}] must be an integer, got {_kind(value)}"
            if abs(value) >= 10**_MAX_DIGITS:
                return f"points[{i}][{k}] has more than {_MAX_DIGITS} digits"
        if not any(point):
            return f"points[{i}] is zero"
        first = seen.setdefault(tuple(point), i)
        if first != i:
            return f"points {first} and {i} are the same"
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"the {type(value).__name__} {str(value)[:40]!r}"


def _closest(
    points: Sequence[Sequence[int]], norms: Sequence[int], least: int
) -> tuple[int | None, tuple[int, int] | None, list[tuple[int, int]]]:
    """The smallest squared distance, its first pair, and all pairs closer than `least`; Python's integers are exact."""
    smallest, pair, close = None, None, []
    for i, x in enumerate(points):
        for j in range(i + 1, len(points)):
            distance = norms[i] + norms[j] - 2 * sum(map(mul, x, points[j]))
            if smallest is None or distance < smallest:
                smallest, pair = distance, (i, j)
            if distance < least:
                close.append((i, j))
    return smallest, pair, close


def _dropped(close: Sequence[tuple[int, int]], count: int) -> int:
    """How many points are dropped until no pair is left, the one in most pairs first."""
    neighbors: list[set[int]] = [set() for _ in range(count)]
    for i, j in close:
        neighbors[i].add(j)
        neighbors[j].add(i)
    dropped = 0
    while any(neighbors):
        worst = max(range(count), key=lambda i: len(neighbors[i]))
        for other in neighbors[worst]:
            neighbors[other].discard(worst)
        neighbors[worst] = set()
        dropped += 1
    return dropped
