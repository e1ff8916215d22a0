"""Arithmetic in many steps: a number, to which sums, differences and products are applied in order."""

from random import Random

from trl_ext.mini.stepwise import Kind, stepwise
from trl_ext.mini.task import BasePolicyConfig, Task

SLIPS = (-2, -1, 1, 2)


def arithmetic(*, longest: int = 12, incorrect: str = "longer", lapses: float = 0.05, largest: int = 30) -> Task:
    """Arithmetic on numbers from 1 to `largest`; a ValueError if that is not 10 to 99."""
    if not 10 <= largest <= 99:
        raise ValueError(f"largest must be from 10 to 99, got {largest}")
    kind = Kind(
        name="arithmetic",
        question="Start with ${start}$ and apply ${operations}$ in turn. What is the result?",
        state=r"-?\d{1,100}",  # after an error also one that no problem leads to
        draw=lambda rng: str(rng.randint(1, largest)),
        draw_operation=lambda state, rng: _draw_operation(int(state), largest, rng),
        apply=_apply,
        slip=lambda state, rng: str(int(state) + rng.choice(SLIPS)),
    )
    numbers = [str(n) for n in range(10, largest + 1)]
    return stepwise(kind, longest, incorrect, lapses, numbers, BasePolicyConfig(steps=560, max_length=1024))


def _draw_operation(state: int, largest: int, rng: Random) -> str:
    """One whose result is in the range; every sign that has one is equally likely."""
    upward = [f"+{n}" for n in range(1, min(9, largest - state) + 1)]
    downward = [f"-{n}" for n in range(1, min(9, state - 1) + 1)]
    products = [f"*{n}" for n in range(2, min(9, largest // state) + 1)]
    return rng.choice(rng.choice([listed for listed in (upward, downward, products) if listed]))


def _apply(state: str, operation: str) -> str:
    a, b = int(state), int(operation[1:])
    return str({"+": a + b, "-": a - b, "*": a * b}[operation[0]])
