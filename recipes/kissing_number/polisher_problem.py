"""The reversed kissing problem: the model writes the numeric method, and the directions are given.

Its function runs on the 496 points of a known core and on random directions, and its result is judged like any other
configuration.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_ext.registry import import_function
from trl_ext.sandbox.limits import ProgramResult
from trl_ext.tools.discovery.problem import Problem, Verdict, global_of, with_run

_FOLDER = Path(__file__).parent
_MOVABLE = 98
_check: Callable[[Any], Verdict] = import_function(f"{_FOLDER / 'problem.py'}:check", "verifier")

# The core is the one of arXiv 2606.10402: norm 6, so that no two points are closer than 6.
DRIVER = f"""

# Not written by the model: the core, directions to move, and the function's result.
from itertools import product as _product
import numpy as _numpy
_core = [[s if i == k else 0 for i in range(11)] for k in range(8) for s in (6, -6)]
for _word in ("0128 0146 0159 017A 023A 0256 0279 0349 0358 0367 045A 0478 1239 1245 126A 1347 135A 1368 1578 1679 "
              "2348 2357 2469 247A 2678 346A 3569 4568 4579 567A").split():
    for _signs in _product((3, -3), repeat=4):
        _values = dict(zip((int(_c, 11) for _c in _word), _signs))
        _core.append([_values.get(_i, 0) for _i in range(11)])
_movable = _numpy.random.default_rng(0).standard_normal(({_MOVABLE}, 11))
_found = polish(_numpy.array(_core), _movable, seed=0, seconds=30.0)
polished = ["MARK", _core if _found is None else _found]
"""

TASK = f"""Write a numeric method that finds kissing configurations in 11 dimensions.

Write a complete Python program with a function `polish(core, movable, *, seed, seconds)`. `core` is an integer array of
496 points of squared norm 36, no two of which are closer than 6. `movable` is a float array of {_MOVABLE} directions in
random positions. The function returns a list of integer points: the core, scaled by an integer if you like, and as many
of the movable ones as it can place, moved as far as it likes and rounded at a large radius such as 10**12; Python's
integers do not overflow where numpy's do. The set is valid if no point is zero, no two are equal, and the smallest
squared distance of two is at least the largest squared norm. It has 30 seconds on one core, with numpy and scipy.
Returning None counts as the core alone. The score is the number of points. Answer with one block that begins with
```python.
"""


def verify(program: str) -> Verdict:
    """Run the model's function on the core and the directions, and judge only what it returns."""
    mark = secrets.token_hex(8)
    polished, failure, ran = global_of(program + DRIVER.replace("MARK", mark), "polished")
    if isinstance(ran, ProgramResult) and not (isinstance(polished, list) and polished[:1] == [mark]):
        failure = Verdict(False, (), "the program ended before `polish` was called; it must define it and not exit")
    return with_run(failure or _check(polished[1]), ran, {"num_points": 0, "dimension": 11})


def polisher() -> Problem:
    """The model improves the polishing code; it is shown the polisher of this folder."""
    source = _FOLDER / "polish.py"
    shown = (
        f"\nA polisher to begin with:\n```python\n{source.read_text(encoding='utf-8')}```\n" if source.exists() else ""
    )
    return Problem("kissing_number_polisher", TASK + shown, verify, "valid points")
