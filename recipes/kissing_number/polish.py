"""From approximate directions to an exact kissing configuration: remove the overlap, then round to integers.

Unit vectors kiss without overlap where every inner product is at most 1/2. The *excess* of a pair is what its inner
product has above that. Three stages, each of use on its own:

1. `descend` minimizes the sum of the squared positive excesses (a hinge) by L-BFGS: cheap, repairs large overlaps;
2. `tighten` minimizes the largest excess by linear programs in a trust region: sharp where the hinge is flat;
3. `to_integers` rounds, and returns only what an exact check in Python integers accepts.

Letters: C vectors of a core that stays where it is, M movable ones, dimension n. The smallest |x - y|^2 of integer
vectors has to be at least the largest |x|^2; moving all out to the longest one's sphere then only separates them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, minimize
from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Integers = NDArray[np.object_]  # Python ints: products of numbers of 14 digits stay exact
Blocks = list[tuple[NDArray[np.intp], NDArray[np.intp], Floats]]

ROOM = 1e-8  # what the hinge asks for beyond touching: enough to round at 10 digits and more
HOPELESS = 0.02  # a largest excess that is left by the hinge and that no linear programs will remove
SMALL = 24  # radii up to this many core norms are tried first: they catch exactly touching points of simple coordinates
FEW = 500  # sums of two points that are tried as axes


def polish(
    core: NDArray[np.int64] | Integers,
    movable: Floats,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    radius: int = 10**13,
) -> Integers | None:
    """(C, n) integers, (M, n) directions -> (C+M, n) integers that pass `valid`, the core's first and scaled, or None.

    The first attempt starts at the directions, later ones at disturbed copies; a seed gives the same result each time
    unless the time ends it. An empty core is (0, n).

    Raises:
        ValueError: the shapes do not fit, there is no direction or a zero one, or the core itself does not pass.
    """
    core = as_integers(core)
    if core.ndim != 2 or movable.ndim != 2 or core.shape[1] != movable.shape[1]:
        raise ValueError(f"core {core.shape} and movable {movable.shape} must be (C, n) and (M, n)")
    if not len(movable) or not np.isfinite(movable).all() or not movable.any(axis=1).all():
        raise ValueError("there must be directions, finite and not zero")
    if len(core) and not valid(core):
        raise ValueError("the core overlaps, so no directions can complete it")
    fixed, draw, end = directions(core), np.random.default_rng(seed), time.monotonic() + seconds
    moved, noise = directions(movable), 0.0
    while True:
        start = directions(moved + noise * draw.standard_normal(moved.shape))
        minimum = descend(fixed, start, end)
        points = to_integers(core, minimum, radius)
        if points is None and largest_excess(fixed, minimum) < HOPELESS:
            points = to_integers(core, tighten(fixed, minimum, end), radius)
        if points is not None or time.monotonic() >= end:
            return points
        noise = draw.choice([0.003, 0.03, 0.1])


def directions(vectors: Floats | Integers) -> Floats:
    """(K, n) -> (K, n) of length 1."""
    values = np.asarray(vectors, np.float64)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def excesses(fixed: Floats, moved: Floats) -> tuple[Floats, Floats]:
    """(C, n), (M, n) -> (M, C) and (M, M): inner products less 1/2, the diagonal of the second -1.5."""
    among = moved @ moved.T - 0.5
    np.fill_diagonal(among, -1.5)
    return moved @ fixed.T - 0.5, among


def largest_excess(fixed: Floats, moved: Floats) -> float:
    """Of all pairs with a movable vector; at most 0 where they are a kissing configuration with the core."""
    return float(max(part.max(initial=-1.5) for part in excesses(fixed, moved)))


def hinge(flat: Floats, fixed: Floats, room: float = ROOM) -> tuple[float, Floats]:
    """(M*n,) -> half the sum over pairs of max(0, excess + room)^2 of the vectors' directions, and its gradient."""
    vectors = flat.reshape(-1, fixed.shape[1])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    moved = vectors / lengths
    outer, among = (np.maximum(part + room, 0.0) for part in excesses(fixed, moved))
    slope = outer @ fixed + among @ moved
    slope -= (slope * moved).sum(axis=1, keepdims=True) * moved  # a change of length changes nothing
    return float((outer**2).sum() / 2 + (among**2).sum() / 4), (slope / lengths).ravel()


def descend(fixed: Floats, start: Floats, end: float = math.inf) -> Floats:
    """(C, n), (M, n) -> (M, n): a local minimum of the hinge, or where `end` of time.monotonic() found it."""

    def stop(flat: Floats) -> None:
        if time.monotonic() >= end:
            raise StopIteration

    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": 1e-12, "maxcor": 30}
    solution = minimize(hinge, start.ravel(), (fixed,), "L-BFGS-B", jac=True, callback=stop, options=options)
    return directions(solution.x.reshape(start.shape))


def tighten(fixed: Floats, moved: Floats, end: float = math.inf, *, trust: float = 0.01, steps: int = 60) -> Floats:
    """(C, n), (M, n) -> (M, n): steps of `linear_step` while they lower the largest excess, the region adapted."""
    lowest = largest_excess(fixed, moved)
    for _ in range(steps):
        if trust < 1e-13 or time.monotonic() >= end:
            break
        tried = linear_step(fixed, moved, trust, end)
        reached = largest_excess(fixed, tried)
        if reached < lowest:
            slow = lowest - reached < 1e-3 * abs(lowest)
            moved, lowest, trust = tried, reached, trust * (0.5 if slow else 2.0)
        else:
            trust /= 4
    return moved


def linear_step(fixed: Floats, moved: Floats, trust: float, end: float = math.inf) -> Floats:
    """(C, n), (M, n) -> (M, n): the step that lowers the largest excess most to first order, and back to the sphere.

    Variables are the tangential steps d_i, no entry above `trust`, and t: minimize t subject to
    u_i.v_j + d_i.v_j (+ u_i.d_j if j can move) - 1/2 <= t for the pairs near the largest excess, and u_i.d_i = 0.
    In units of `trust`, and t from the present value, so that the solver's tolerances shrink with the region.
    """
    (M, n), (outer, among) = moved.shape, excesses(fixed, moved)
    largest = max(outer.max(initial=-1.5), among.max())
    near = largest - 4 * math.sqrt(n) * trust  # a step changes no inner product by more than half of this
    i, k = np.nonzero(outer > near)
    a, b = np.nonzero(np.triu(among > near, 1))
    blocks = [(np.arange(len(i)), i, fixed[k]), (len(i) + np.arange(len(a)), a, moved[b])]
    blocks += [(len(i) + np.arange(len(a)), b, moved[a])]
    rows = len(i) + len(a)
    less = _place(blocks, n, (rows, M * n + 1), last=-1.0)
    tangent = _place([(np.arange(M), np.arange(M), moved)], n, (M, M * n + 1))
    bound = (largest - np.concatenate([outer[i, k], among[a, b]])) / trust
    goal = np.append(np.zeros(M * n), 1.0)
    limits = [(-1, 1)] * (M * n) + [(None, None)]
    limit = {"time_limit": max(end - time.monotonic(), 0.01)}
    solved = linprog(goal, less, bound, tangent, np.zeros(M), limits, method="highs", options=limit)
    return directions(moved + trust * solved.x[:-1].reshape(M, n)) if solved.status == 0 else moved


def _place(blocks: Blocks, n: int, shape: tuple[int, int], last: float | None = None) -> csr_array:
    """Sparse matrix with, for each (rows, vectors, values), values[r] in row rows[r], at the n columns of vectors[r].

    Every row has `last` in the last column, if that is given.
    """
    rows = [np.repeat(r, n) for r, _, _ in blocks]
    columns = [(n * v[:, None] + np.arange(n)).ravel() for _, v, _ in blocks]
    entries = [values.ravel() for _, _, values in blocks]
    if last is not None:
        rows.append(np.arange(shape[0]))
        columns.append(np.full(shape[0], shape[1] - 1))
        entries.append(np.full(shape[0], last))
    return csr_array((np.concatenate(entries), (np.concatenate(rows), np.concatenate(columns))), shape=shape)


def as_integers(vectors: NDArray[np.int64] | Integers) -> Integers:
    """The same values as Python ints.

    Raises:
        ValueError: one of them is not an integer.
    """
    whole = np.array([[int(value) for value in row] for row in vectors], object).reshape(vectors.shape)
    if not (whole == vectors).all():
        raise ValueError("the core must be of integers")
    return whole


def valid(points: Integers) -> bool:
    """(K, n) Python ints: whether none is zero and the smallest |x - y|^2 is at least the largest |x|^2; exact."""
    products = points @ points.T
    norms = products.diagonal()
    squared_distances = norms[:, None] + norms[None] - 2 * products
    np.fill_diagonal(squared_distances, norms.max())
    return bool(norms.min() > 0 and squared_distances.min() >= norms.max())


def to_integers(core: Integers, moved: Floats, radius: int = 10**13) -> Integers | None:
    """(C, n), (M, n) -> (C+M, n) with C a multiple of the core and M near the directions, if that is valid.

    Points that touch exactly survive rounding only if they are integers at some small radius, which is tried first;
    without a core, in a frame made of the points. At a large radius, rounding needs room of a few times 1 / radius, and
    rounds a slightly shorter vector: one longer than the core's would raise the bar for the pairs that touch exactly.
    """
    longest = math.sqrt((core**2).sum(axis=1).max()) if len(core) else 1.0
    frames = [np.eye(moved.shape[1])] if len(core) else orthogonal_frames(moved)
    multiples = [float(k) for k in range(1, SMALL + 1)] if len(core) else [math.sqrt(k) for k in range(1, SMALL**2 + 1)]
    for frame in frames:
        for multiple in multiples:
            exact = moved @ frame.T * multiple * longest
            if np.abs(exact - exact.round()).max() < 1e-4:
                points = np.vstack([core * round(multiple), _whole(exact)])
                if valid(points):
                    return points
    multiple = max(1, int(radius / longest))
    points = np.vstack([core * multiple, _whole(moved * (multiple * longest - math.sqrt(moved.shape[1])))])
    return points if valid(points) else None


def _whole(values: Floats) -> Integers:
    return np.array([[round(value) for value in row] for row in values.tolist()], object)


def orthogonal_frames(moved: Floats) -> Iterator[Floats]:
    """(M, n) -> up to three (n, n) orthonormal frames: the present one, points at right angles, sums of two such.

    In one of them, the points of a lattice such as D_n have coordinates that are integers at a small radius.
    """
    yield np.eye(moved.shape[1])
    i, k = np.nonzero(np.triu(np.abs(moved @ moved.T) < 1e-6, 1))
    if len(i):
        for candidates in (moved, directions(moved[i] + moved[k])[:FEW]):
            frame = _orthogonal(candidates)
            if frame is not None:
                yield frame


def _orthogonal(candidates: Floats) -> Floats | None:
    """(K, n) -> (n, n): the first of them at right angles to each other, greedily from each in turn."""
    at_right_angles = np.abs(candidates @ candidates.T) < 1e-6
    for first in range(len(candidates)):
        chosen, left = [first], np.flatnonzero(at_right_angles[first])
        while len(left):
            chosen.append(left[0])
            left = left[at_right_angles[left[0]][left]]
        if len(chosen) == candidates.shape[1]:
            return candidates[chosen]
    return None
