"""The table of embedded tasks, each with a base policy of its own that has read it."""

import re
from operator import add, mul, sub
from random import Random

from trl_ext.mini.arithmetic import arithmetic
from trl_ext.mini.cups import cups
from trl_ext.mini.game import countdown_game
from trl_ext.mini.problems import problems
from trl_ext.mini.sums import sums
from trl_ext.mini.task import Row, Step, Task
from trl_ext.registry import Registry

TASKS = Registry("embedded task")
_EQUATION = re.compile(r"(?<!\d)(\d{1,100})([+*-])(\d{1,100})=(\d{1,100})\b")
_OPERATORS = {"+": add, "-": sub, "*": mul}


@TASKS.register
def mini_math() -> Task:
    """Short problems in the shape of MATH."""
    return Task(problems, _solution, _equations, tuple(map(str, range(10, 100))))


TASKS.register(arithmetic)
TASKS.register(cups)
TASKS.register(sums)
TASKS.register(countdown_game)


def _solution(row: Row, rng: Random) -> tuple[str, str]:
    return row["solution"], row["answer"]


def _equations(problem: str, response: str) -> list[Step]:
    """Sums, differences and products; whether they are what the problem needs is not known."""
    steps = []
    for match in _EQUATION.finditer(response):
        left, sign, right, result = match.groups()
        is_true = _OPERATORS[sign](int(left), int(right)) == int(result)
        steps.append(Step(match.start(), match.end(), is_true, is_true))
    return steps
