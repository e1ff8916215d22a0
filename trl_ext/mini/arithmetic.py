"""Arithmetic in many steps: a number, to which sums, differences and products are applied in order, modulo another."""

from math import gcd
from random import Random

from trl_ext.mini.stepwise import Kind, stepwise
from trl_ext.mini.task import BasePolicyConfig, Task

FACTORS = (3, 7, 9)
SLIPS = (-2, -1, 1, 2)


def arithmetic(*, longest: int = 15, incorrect: str = "longer", lapses: float = 0.05, modulus: int = 20) -> Task:
    """Arithmetic on numbers below `modulus`; a ValueError if that is not 10 to 100, or a product is not one-to-one."""
    if not 10 <= modulus <= 100 or any(gcd(factor, modulus) > 1 for factor in FACTORS):
        raise ValueError(f"modulus must be from 10 to 100 and not divisible by 3 or 7, got {modulus}")
    kind = Kind(
        name="arithmetic",
        question=f"Start with ${{start}}$ and apply ${{operations}}$ modulo ${modulus}$. What is the result?",
        state=r"\d\d?",
        draw=lambda rng: str(rng.randrange(modulus)),
        draw_operation=_draw_operation,
        apply=lambda state, operation: _apply(int(state), operation, modulus),
        slip=lambda state, rng: str((int(state) + rng.choice(SLIPS)) % modulus),
    )
    numbers = [str(n) for n in range(10, modulus)]
    return stepwise(kind, longest, incorrect, lapses, numbers, BasePolicyConfig(steps=360, max_length=1024))


def _draw_operation(rng: Random) -> str:
    sign = rng.choice("+-*")
    return f"{sign}{rng.choice(FACTORS) if sign == '*' else rng.randint(1, 9)}"


def _apply(state: int, operation: str, modulus: int) -> str:
    number = int(operation[1:])
    return str({"+": state + number, "-": state - number, "*": state * number}[operation[0]] % modulus)
