"""The polisher in dimensions where the answer is known, and the points of program.py, counted again by a plain check."""

from __future__ import annotations

import importlib
import itertools
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[3] / "recipes" / "kissing_number"

pytest.importorskip("scipy", reason="the polisher needs scipy")
polish = importlib.import_module("recipes.kissing_number.polish")


def plain_check(points: list[list[int]]) -> bool:
    """The verifier's rule once more, pair by pair in Python ints."""
    assert all(type(value) is int for point in points for value in point)
    longest = max(sum(value * value for value in point) for point in points)
    pairs = itertools.combinations(points, 2)
    return all(map(any, points)) and all(
        sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) >= longest for x, y in pairs
    )


def roots(n: int) -> np.ndarray:
    """Of D_n: 12, 24, 40 points in dimensions 3, 4, 5; all their neighbors touch."""
    found = []
    for i, j in itertools.combinations(range(n), 2):
        for first, second in itertools.product((1, -1), repeat=2):
            found.append([first if k == i else second if k == j else 0 for k in range(n)])
    return np.array(found)


def disturbed(points: np.ndarray, noise: float = 0.03, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(points.shape)
    return polish.directions(polish.directions(points) + noise * drawn)


def nothing(n: int) -> np.ndarray:
    return np.zeros((0, n), np.int64)


def at_most(rational: int, root: int, bound: int) -> bool:
    """Whether rational + root * sqrt(2) <= bound, exactly."""
    room = bound - rational
    return (room >= 0 and 2 * root**2 <= room**2) or (root < 0 and (room >= 0 or 2 * root**2 >= room**2))


@pytest.fixture(scope="module")
def program() -> list[list[int]]:
    return runpy.run_path(str(FOLDER / "program.py"))["points"]


def test_the_hinges_gradient_is_that_of_finite_differences() -> None:
    fixed = polish.directions(roots(4)[:5])
    at = 1.7 * disturbed(roots(4)[5:12], 0.3).ravel()  # not of length 1: the gradient has to see through it
    value, gradient = polish.hinge(at, fixed, 0.1)
    assert value > 0.01
    steps = 1e-6 * np.eye(len(at))
    slopes = [(polish.hinge(at + s, fixed, 0.1)[0] - polish.hinge(at - s, fixed, 0.1)[0]) / 2e-6 for s in steps]
    np.testing.assert_allclose(gradient, slopes, atol=1e-8)


def test_the_hinge_counts_every_pair_once_and_none_of_the_core() -> None:
    fixed = np.array([[1.0, 0.0], [0.9, np.sqrt(0.19)]])  # overlap each other, which is not the movable vector's doing
    apart, near = np.array([[-1.0, 0.0]]), np.array([[0.0, -1.0], [-0.6, -0.8]])
    assert polish.hinge(apart.ravel(), fixed, 0.0)[0] == 0
    assert polish.hinge(near.ravel(), fixed, 0.0)[0] == pytest.approx(0.3**2 / 2)


@pytest.mark.moderate
@pytest.mark.parametrize("held", [0, 6])
def test_linear_step_lowers_largest_excess_within_its_region(held: int) -> None:
    fixed, moved = polish.directions(roots(3)[:held]).reshape(-1, 3), disturbed(roots(3)[held:], 0.1)
    tried = polish.linear_step(fixed, moved, 0.02)
    before, after = polish.largest_excess(fixed, moved), polish.largest_excess(fixed, tried)
    assert after < before - 0.005
    np.testing.assert_allclose(np.linalg.norm(tried, axis=1), 1)
    assert np.abs(tried - moved).max() < 0.021
    assert polish.largest_excess(fixed, polish.tighten(fixed, moved)) < after


@pytest.mark.parametrize(("n", "count"), [(3, 12), (4, 24), (5, 40), (6, 60)])
def test_the_known_configurations_are_found_from_near_them(n: int, count: int) -> None:
    found = polish.polish(nothing(n), disturbed(roots(n)), seconds=120)
    assert found is not None
    assert found.shape == (count, n)
    assert plain_check(found.tolist())


def test_core_stays_fixed_and_the_rest_is_placed_around_it() -> None:
    core = 3 * roots(4)[:10]
    found = polish.polish(core, disturbed(roots(4)[10:]), seconds=120)
    assert found is not None
    assert plain_check(found.tolist())
    multiple = found[0, 0] // core[0, 0]
    assert (found[:10] == multiple * core).all()


def test_rounding_at_a_large_radius_keeps_what_has_room() -> None:
    golden = (1 + 5**0.5) / 2
    icosahedron = [np.roll([0, a, b * golden], k) for k in range(3) for a in (1, -1) for b in (1, -1)]
    turned = (
        polish.directions(np.array(icosahedron)) @ np.linalg.qr(np.random.default_rng(1).standard_normal((3, 3)))[0]
    )
    found = polish.to_integers(polish.as_integers(nothing(3)), turned, 10**13)
    assert found is not None
    assert plain_check(found.tolist())
    assert 9 * 10**12 < max(map(abs, found.ravel())) < 10**13
    np.testing.assert_allclose(polish.directions(found), turned, atol=1e-12)


def test_rounding_lengthens_no_vector_beyond_a_touching_core() -> None:
    core = polish.as_integers(np.array([[1, 1, 0], [1, 0, 1]]))
    for seed in range(10):
        away = disturbed(np.array([[-2, -1, -1], [-1, 2, -2]]), 0.1, seed)
        found = polish.to_integers(core, away, 10**6)
        assert found is not None
        assert plain_check(found.tolist())


def test_core_longer_than_the_radius_keeps_its_length_rounded() -> None:
    core = polish.as_integers(np.array([[10**9, 10**9, 0], [10**9, 0, 10**9]]))
    away = polish.directions(np.array([[-2.1, -1, -1], [-1, 2, -2.2]]))
    found = polish.to_integers(core, away, 10**6)
    assert found is not None
    assert (found[:2] == core).all()
    assert plain_check(found.tolist())


def test_points_touching_a_core_are_found_at_a_multiple_of_it() -> None:
    axes = np.vstack([np.eye(4, dtype=np.int64), -np.eye(4, dtype=np.int64)])
    halves = np.array(list(itertools.product((1, -1), repeat=4)))
    found = polish.polish(axes, disturbed(halves), seconds=120)  # the 24-cell again, in another position
    assert found is not None
    assert (found == np.vstack([2 * axes, halves])).all()


@pytest.mark.parametrize(("points", "passes"), [([[0, 10**14], [1, 0]], True), ([[1, 10**14], [1, 0]], False)])
def test_the_exact_check_sees_a_difference_of_one_in_28_digits(points: list[list[int]], passes: bool) -> None:
    assert polish.valid(polish.as_integers(np.array(points))) == plain_check(points) == passes


@pytest.mark.parametrize(
    "points",
    [
        [[2, 0], [1, 1], [-1, 1], [-2, 0], [-1, -1], [1, -1]],  # two lengths: not the hexagon that it looks like
        [[1, 0], [0, 0]],
        [[1, 2], [1, 2]],
    ],
)
def test_the_exact_check_refuses(points: list[list[int]]) -> None:
    assert not polish.valid(polish.as_integers(np.array(points)))
    assert not plain_check(points)


@pytest.mark.moderate
def test_impossible_set_is_none_within_the_time_limit() -> None:
    start = time.monotonic()
    assert polish.polish(nothing(2), np.random.default_rng(0).standard_normal((7, 2)), seconds=0.5) is None
    assert time.monotonic() - start < 10  # one attempt more than the time, on a busy machine


def test_polished_points_are_reproducible_by_seed() -> None:
    start = np.ones((9, 3))  # nine times the same is as flat as a minimum: only a disturbed attempt gets away
    first, second, other = (polish.polish(nothing(3), start, seed=seed, seconds=120) for seed in (2, 2, 3))
    assert first is not None
    assert plain_check(first.tolist())
    assert (first == second).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("core", "movable", "words"),
    [
        (nothing(3), np.ones((2, 4)), "must be"),
        (nothing(3), np.zeros((2, 3)), "not zero"),
        (nothing(3), np.zeros((0, 3)), "there must be directions"),
        (nothing(2), np.array([[np.nan, 1.0]]), "finite"),
        (np.array([[3, 0], [3, 1]]), np.ones((1, 2)), "core overlaps"),
        (np.array([[0.5, 1.0]]), np.ones((1, 2)), "integers"),
    ],
)
def test_invalid_polisher_input_is_refused(core: np.ndarray, movable: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        polish.polish(core, movable)


@pytest.mark.moderate
def test_program_points_are_valid_and_as_many_as_its_page_says(program: list[list[int]]) -> None:
    assert plain_check(program)
    assert polish.valid(polish.as_integers(np.array(program)))
    assert {len(point) for point in program} == {11}
    assert f"**{len(program)} points**" in (FOLDER / "construction.md").read_text()
    assert len(program) == 600


@pytest.mark.parametrize(("point", "coordinate", "change"), [(20, 1, 1), (500, 8, 30_000), (599, 10, -30_000)])
def test_one_corrupted_coordinate_fails(program: list[list[int]], point: int, coordinate: int, change: int) -> None:
    spoilt = [list(p) for p in program]
    spoilt[point][coordinate] += change
    assert not plain_check(spoilt)


@pytest.mark.moderate
def test_604_points_with_a_root_of_2_keep_their_distances(program: list[list[int]]) -> None:
    """The page's exact statement: coordinates are a + b sqrt(2) with integers a, b, in units of a sixth of the radius."""
    whole = [[value * 6 // 200_000_000 for value in point] + [0] * 3 for point in program[:496]]
    frame = np.array([[2, 2, -1], [-1, 2, 2], [2, -1, 2]])  # of norm 3; times sqrt(2) it is half of 6^2, squared
    pairs = [point[:8] for point in (np.sign(program[496:592:6]) * 3).tolist()]
    rows = [[*p, 0, 0, 0, *(sign * w)] for p in pairs for w in frame for sign in (1, -1)]
    edges = [
        (s * v + t * w) for v, w in itertools.combinations(frame, 2) for s, t in itertools.product((1, -1), repeat=2)
    ]
    points = np.array([p[:11] + [0] * 3 for p in whole] + rows + [[0] * 11 + list(e) for e in edges], object)
    plain, root = points[:, :11], np.hstack([0 * points[:, :8], points[:, 11:]])
    rational, irrational = plain @ plain.T + 2 * root @ root.T, plain @ root.T + root @ plain.T
    assert len(points) == 604
    assert (rational.diagonal() == 36).all()
    assert not irrational.diagonal().any()
    for i, j in itertools.combinations(range(604), 2):
        assert at_most(rational[i, j], irrational[i, j], 18)


@pytest.mark.moderate
def test_polisher_completes_the_core_from_overlapping_directions(program: list[list[int]]) -> None:
    core = np.array(program[:496]) * 6 // 200_000_000
    start = disturbed(np.array(program[496:]), 0.02)
    assert polish.largest_excess(polish.directions(core), start) > 0.03
    found = polish.polish(core, start, seconds=60)
    assert found is not None
    assert len(found) == 600
    assert plain_check(found.tolist())


@pytest.mark.slow
def test_linear_programs_widen_the_room_that_the_hinge_leaves(program: list[list[int]]) -> None:
    fixed = polish.directions(np.array(program[:496]))
    moved = polish.descend(fixed, disturbed(np.array(program[496:]), 0.02))
    assert polish.largest_excess(fixed, moved) > -1e-7
    assert polish.largest_excess(fixed, polish.tighten(fixed, moved, trust=0.0002, steps=2)) < -2e-7
