"""Tasks in which operations change a state one after the other, so that a response grows with the number of steps.

A working is one line, a step after the other: `+5=17, *3=51`. The base policy has also read lapses: it does a step
again (`wait, +5=17`), or jumps to the end (`so 51`), and what it then writes is often wrong. What a lapse is decides
whether incorrect responses are longer or shorter than correct ones, and training can do away with it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from trl_ext.mini.problems import LEVELS, SPLITS, split_of
from trl_ext.mini.task import BasePolicyConfig, Row, Step, Task

INCORRECT = ("longer", "shorter", "equal")  # than correct responses
AGAIN, JUMP = "wait, ", "so "
GOES_WRONG = 0.5  # of the steps done again, of which a wrong one stays wrong
REPEATS = 0.7  # how often a step done again is done once more
_STEP = re.compile(rf"({AGAIN})?([^\s,=]{{1,100}})=(-?\w+)|\b{JUMP}(-?\w+)")


@dataclass(frozen=True)
class Kind:
    """States and operations, both written as texts. Operations are one-to-one, so that no later step heals an error."""

    name: str
    question: str  # with `{start}` and `{operations}` as its first two formulas, in any order
    state: str  # a regular expression for how it is written
    draw: Callable[[Random], str]  # a state
    draw_operation: Callable[[str, Random], str]  # one that a state allows
    apply: Callable[[str, str], str]  # the state after an operation
    slip: Callable[[str, Random], str]  # another state, such as one arrives at by mistake

    def read(self, problem: str) -> tuple[str, list[str]]:
        """The start and the operations of a problem."""
        names, formulas = re.findall(r"\{(\w+)\}", self.question), re.findall(r"\$([^$]+)\$", problem)
        parts = dict(zip(names, formulas, strict=False))
        return parts["start"], parts["operations"].split(", ")

    def states(self, start: str, operations: Sequence[str]) -> list[str]:
        """The start, and the state after each operation."""
        reached = [start]
        for operation in operations:
            reached.append(self.apply(reached[-1], operation))
        return reached


def stepwise(
    kind: Kind, longest: int, incorrect: str, lapses: float, tokens: Sequence[str], policy: BasePolicyConfig
) -> Task:
    """The task of a kind of steps.

    Args:
        longest: the number of steps, which is drawn uniformly, is at most this; a level is a fifth of the range.
        incorrect: whether incorrect responses of the base policy tend to be `longer`, `shorter` or `equal`.
        lapses: the chance of a lapse at a step, in what the base policy has read.

    Raises:
        ValueError: an option is out of its range.
    """
    if longest < len(LEVELS):
        raise ValueError(f"longest must be at least {len(LEVELS)}, a step for each level, got {longest}")
    if incorrect not in INCORRECT:
        raise ValueError(f"incorrect must be one of {', '.join(INCORRECT)}, got {incorrect!r}")
    if not 0 <= lapses < 1:
        raise ValueError(f"lapses must be at least 0 and below 1, got {lapses}")
    return Task(
        partial(problems, kind, longest),
        partial(work, kind, incorrect, lapses),
        partial(check_steps, kind),
        tuple(tokens),
        policy,
    )


def problems(kind: Kind, longest: int, split: str, seed: int = 0) -> Iterator[Row]:
    """Endless rows, uniform over the number of steps; a ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}. Known: {', '.join(SPLITS)}")
    return _draw(kind, longest, split, Random(f"{kind.name} {split} {seed}"))


def _draw(kind: Kind, longest: int, split: str, rng: Random) -> Iterator[Row]:
    while True:
        n = rng.randint(1, longest)
        state = start = kind.draw(rng)
        operations = []
        for _ in range(n):
            operations.append(kind.draw_operation(state, rng))
            state = kind.apply(state, operations[-1])
        problem = kind.question.format(start=start, operations=", ".join(operations))
        if split_of(problem) == split:
            _, *states = kind.states(start, operations)
            solution = ", ".join(map("{}={}".format, operations, states))
            level = -(-n * len(LEVELS) // longest)
            yield {
                "problem": problem, "solution": solution, "answer": states[-1], "level": level, "subject": kind.name,
            }  # fmt: skip


def work(kind: Kind, incorrect: str, lapses: float, row: Row, rng: Random) -> tuple[str, str]:
    """A working with lapses, and the answer that it arrives at."""
    state, operations = kind.read(row["problem"])
    written: list[str] = []
    for operation in operations:
        lapse = rng.random() < lapses
        if lapse and incorrect == "shorter":
            state = kind.draw(rng)
            return ", ".join([*written, f"{JUMP}{state}"]), state
        state = kind.apply(state, operation)
        if lapse and incorrect == "equal":
            state = kind.slip(state, rng)
        written.append(f"{operation}={state}")
        if lapse and incorrect == "longer":
            again = _done_again(kind, state, rng)
            written += (f"{AGAIN}{operation}={redone}" for redone in again)
            state = again[-1]
    return ", ".join(written), state


def _done_again(kind: Kind, state: str, rng: Random) -> list[str]:
    """The results of doing a step again and again, of which a wrong one stays."""
    results = [state]
    while len(results) == 1 or rng.random() < REPEATS:
        slips = results[-1] == state and rng.random() < GOES_WRONG
        results.append(kind.slip(state, rng) if slips else results[-1])
    return results[1:]


def check_steps(kind: Kind, problem: str, response: str) -> list[Step]:
    """The steps of a response up to its first tag.

    A step is valid if its operation is the problem's next one, or the last one done again, and its result follows
    from the state that is written before it.
    """
    start, operations = kind.read(problem)
    truth = kind.states(start, operations)
    before = state = start  # of the last step, and after it
    done, steps = 0, []
    for match in _STEP.finditer(response.partition("<")[0]):
        again, operation, result, end = match.groups()
        if not (again and done):
            before, first, done = state, done, len(operations) if end else done + 1
        follows = done <= len(operations) and (bool(end) or operation == operations[done - 1])
        is_valid = follows and bool(re.fullmatch(kind.state, before))
        state = end or result
        is_valid = is_valid and kind.states(before, operations[first:done])[-1] == state
        steps.append(Step(match.start(), match.end(), is_valid, follows and state == truth[done]))
    return steps
