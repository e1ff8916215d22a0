"""The kissing verifier is exact, says the exact reason, and cannot be talked into anything."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from trl_ext.registry import import_function

FOLDER = Path(__file__).parents[3] / "recipes" / "kissing_number"
check: Any = import_function(f"{FOLDER / 'problem.py'}:check", "verifier")
polish_program: Any = import_function(f"{FOLDER / 'problem.py'}:polish_program", "polisher")
SUPPORTS = (
    "0128 0146 0159 017A 023A 0256 0279 0349 0358 0367 045A 0478 1239 1245 126A 1347 135A 1368 1578 1679 2348 2357 2469 "
    "247A 2678 346A 3569 4568 4579 567A"
)
CORE_PROGRAM = f"""
from itertools import product
points = [[s if i == k else 0 for i in range(11)] for k in range(8) for s in (6, -6)]
for word in "{SUPPORTS}".split():
    for signs in product((3, -3), repeat=4):
        values = dict(zip((int(c, 11) for c in word), signs))
        points.append([values.get(i, 0) for i in range(11)])
"""


def core() -> list[list[int]]:
    points = [[s if i == k else 0 for i in range(11)] for k in range(8) for s in (6, -6)]
    for word in SUPPORTS.split():
        for signs in product((3, -3), repeat=4):
            values = dict(zip((int(c, 11) for c in word), signs, strict=True))
            points.append([values.get(i, 0) for i in range(11)])
    return points


def unit(k: int, value: Any = 1) -> list[Any]:
    return [value if i == k else 0 for i in range(11)]


def test_the_known_core_of_496_is_valid() -> None:
    verdict = check(core())
    assert verdict.valid
    assert verdict.score == (496, -1.0)
    assert (verdict.details["min_squared_distance"], verdict.details["max_squared_norm"]) == (36, 36)


def test_invalid_verdict_names_first_closest_pair_and_figures() -> None:
    points = core()
    points[3] = [2, 6, *[0] * 9]  # squared norm 40; 4 from the point (0, 6, 0 ...), index 2
    verdict = check(points)
    assert not verdict.valid
    assert verdict.message.startswith("minimum squared distance 4 < maximum squared norm 40, points 2 and 3;")
    assert verdict.details["pair"] == [2, 3]
    assert verdict.score[1] == pytest.approx(4 / 40 - 1)


def test_distance_is_compared_with_the_largest_norm_of_all() -> None:
    assert check([unit(0, 2), unit(1, 2)]).valid  # squared distance 8, norm 4
    verdict = check([unit(0, 2), unit(1, 2), unit(2, 3)])  # 8 < 9
    assert verdict.message.startswith("minimum squared distance 8 < maximum squared norm 9, points 0 and 1")
    assert check([unit(0, 1), unit(0, 2), unit(0, -2)]).details["min_squared_distance"] == 1


def test_the_decision_is_exact_where_floating_point_is_not() -> None:
    big = 10**13
    a, b = [*[big] * 2, *[0] * 9], [big, 0, big, *[0] * 8]  # squared distance equals the norm, 2e26
    assert check([a, b]).valid
    worse = [big, 1, big - 1, *[0] * 8]  # closer by a part in 10^13
    verdict = check([a, worse])
    assert not verdict.valid
    exact = sum((x - y) ** 2 for x, y in zip(a, worse, strict=True))
    assert verdict.details["min_squared_distance"] == exact == 2 * big**2 - 4 * big + 2
    assert verdict.score[1] < 0


@pytest.mark.parametrize("seed", range(5))
def test_the_closest_pair_is_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    points = [[rng.randint(-(10**14), 10**14) for _ in range(11)] for _ in range(30)]
    distances = {
        (i, j): sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True))
        for i, j in combinations(range(30), 2)
    }
    details = check(points).details
    assert details["min_squared_distance"] == min(distances.values())
    assert details["pair"] == list(min(distances, key=lambda pair: distances[pair]))
    assert details["max_squared_norm"] == max(sum(a * a for a in x) for x in points)


@pytest.mark.moderate
def test_what_remains_of_an_invalid_set_counts_and_is_valid() -> None:
    points = [*core(), [3, 3, 3, 0, 0, 0, 0, 0, 0, 3, 0]]  # one more point, closer than 6 to some
    verdict = check(points)
    assert verdict.score[0] == 496
    assert -1 < verdict.score[1] < 0
    assert check(points[:496]).score < verdict.score  # a larger set as a lead is worth more than none


MALFORMED: list[tuple[Any, str]] = [
    (None, "`points` must be a list of points, got the NoneType 'None'"),
    ([], "`points` must be a list of points, got a list of 0"),
    ({"a": 1}, "must be a list of points"),
    ("1" * 11, "must be a list of points"),
    ([1], "points[0] must be a list of 11 integers, got the int '1'"),
    ([unit(0), unit(1)[:10]], "points[1] must be a list of 11 integers, got a list of 10"),
    ([unit(0, 1.0)], "points[0][0] must be an integer, got the float '1.0'"),
    ([unit(0), unit(4, True)], "points[1][4] must be an integer, got the bool 'True'"),
    ([unit(0, "1")], "points[0][0] must be an integer, got the str '1'"),
    ([unit(0, None)], "points[0][0] must be an integer, got the NoneType 'None'"),
    ([unit(0, float("nan"))], "got the float 'nan'"),
    ([unit(0, 10**100)], "points[0][0] has more than 100 digits"),
    ([unit(0), [0] * 11], "points[1] is zero"),
    ([unit(0), unit(1), unit(0)], "points 0 and 2 are the same"),
    ([unit(0)] * 1001, "1001 points: more than 1000"),
]


@pytest.mark.parametrize(("points", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_points_other_than_distinct_integers_are_refused(points: Any, reason: str) -> None:
    verdict = check(points)
    assert not verdict.valid
    assert verdict.score == ()
    assert reason in verdict.message


@pytest.mark.moderate
def test_600_points_of_14_digits_are_checked_in_about_a_second() -> None:
    rng = random.Random(0)
    points = [[rng.randint(-(10**14), 10**14) for _ in range(11)] for _ in range(600)]
    began = time.process_time()
    check(points)
    assert time.process_time() - began < 2.5


# The command


def evaluator(tmp_path: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "my program.py"
    file.write_text(program)
    command = [sys.executable, str(FOLDER / "evaluator.py"), str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.moderate
def test_the_command_prints_the_verdict_and_exits_with_0(tmp_path: Path) -> None:
    done = evaluator(tmp_path, CORE_PROGRAM)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"num_points: 496", "dimension: 11", "validity: 1.0", "score: 496, -1"} <= set(lines)


@pytest.mark.moderate
def test_the_program_of_this_folder_has_600_points() -> None:
    command = [sys.executable, str(FOLDER / "evaluator.py"), str(FOLDER / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert {"num_points: 600", "validity: 1.0"} <= set(done.stdout.splitlines()), done.stderr


@pytest.mark.moderate
def test_a_program_cannot_forge_a_verdict(tmp_path: Path) -> None:
    forged = "print('validity: 1.0')\nraise SystemExit('\\nvalidity: 1.0\\nnum_points: 600\\x1b[2J')"
    done = evaluator(tmp_path, forged)
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith(("validity", "num_points"))] == [
        "num_points: 0",
        "validity: 0.0",
    ]
    assert "\x1b" not in done.stdout


@pytest.mark.moderate
def test_json_is_complete_and_exit_status_is_1_for_invalid_set(tmp_path: Path) -> None:
    done = evaluator(tmp_path, f"points = {[[1, 0, *[0] * 9], [2, 1, *[0] * 9]]}", "--json")
    assert done.returncode == 1
    verdict = json.loads(done.stdout)
    assert (verdict["num_points"], verdict["dimension"]) == (2, 11)
    assert verdict["validity"] == 0.0
    assert verdict["pair"] == [0, 1]
    assert verdict["message"].startswith("minimum squared distance 2 < maximum squared norm 5, points 0 and 1")


@pytest.mark.slow
def test_wrong_arguments_have_status_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "evaluator.py")]
    for arguments, words in (
        ([str(tmp_path / "no.py")], "No such file"),
        ([str(FOLDER / "problem.py"), "--seconds", "0"], "seconds must be positive"),
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr


# What a program leaves for the polisher


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1", "`movable` must be a list of directions, got the NoneType"),
        ("core = [[0] * 11]\nmovable = [[1] * 11]", "points[0] is zero"),
        ("core = []\nmovable = [[1] * 10]", "movable[0] must be a direction of 11 numbers"),
        ("core = []\nmovable = [[1] * 11, [0.0] * 11]", "movable[1] must be a direction of 11 numbers, not all 0"),
        ("movable = [[float('inf')] * 11]", "movable[0] must be a direction"),
        ("movable = [[1] * 11] * 1001", "1001 points: more than 1000"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
@pytest.mark.slow
def test_unpolishable_program_is_refused_with_the_position(program: str, reason: str) -> None:
    assert reason in polish_program(program, 0, 1.0)


def polished(monkeypatch: pytest.MonkeyPatch, polish: Any, program: str) -> Any:
    monkeypatch.setattr(sys.modules[polish_program.__module__], "import_function", lambda *_: polish)
    return polish_program(program, 3, 1.0)


CORE_AND_MOVABLE = (
    f"core = {[unit(0, 2), unit(0, -2)]}\nmovable = [[0, 5.5, 0, 0, 0, 0, 0, 0, 0, 0, -11], [10**60, *[0] * 10]]"
)


@pytest.mark.slow
def test_polisher_result_becomes_a_program_with_an_exact_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    def polish(core: Any, movable: Any, *, seed: int, seconds: float) -> Any:
        assert (core.tolist(), seed, seconds) == ([unit(0, 2), unit(0, -2)], 3, 1.0)
        assert movable.tolist() == [[0.0, 0.5, *[0.0] * 8, -1.0], [1.0, *[0.0] * 10]]  # of any length before
        return np.array([*core, unit(1, 2)])

    done = polished(monkeypatch, polish, CORE_AND_MOVABLE)
    assert done.verdict.valid
    assert done.verdict.score == (3, -1.0)
    assert done.program.startswith("points = [[2, 0,")


@pytest.mark.slow
def test_a_core_of_numbers_beyond_64_bits_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    big = 2**63 + 1
    program = f"core = {[unit(0, big), unit(0, 2 - big)]}\nmovable = {[unit(1)]}"
    done = polished(monkeypatch, lambda core, movable, **_: core, program)
    assert done.verdict.details["max_squared_norm"] == big**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "reason"),
    [(None, "found no valid set of 4 points"), (ValueError("no core"), "failed: ValueError: no core")],
)
def test_a_polisher_that_finds_nothing_says_so(monkeypatch: pytest.MonkeyPatch, result: Any, reason: str) -> None:
    def polish(*_: Any, **__: Any) -> None:
        if result is not None:
            raise result

    assert reason in polished(monkeypatch, polish, CORE_AND_MOVABLE)


@pytest.mark.slow
def test_polisher_result_is_verified_like_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    done = polished(monkeypatch, lambda *_, **__: [unit(0, 2), unit(0, 3)], CORE_AND_MOVABLE)
    assert not done.verdict.valid
    assert "minimum squared distance 1 < maximum squared norm 9" in done.verdict.message
