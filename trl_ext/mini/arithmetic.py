"""Chains of arithmetic: a number, to which sums, differences and products are applied in order, modulo 100."""

from random import Random

from trl_ext.mini.stepwise import Kind, stepwise
from trl_ext.mini.task import BasePolicyConfig, Task

MODULUS = 100
FACTORS = (3, 7, 9)  # without a common divisor with the modulus, so that a product is one-to-one
SLIPS = (-10, -2, -1, 1, 2, 10)


def arithmetic(*, longest: int = 20, incorrect: str = "longer", lapses: float = 0.05) -> Task:
    """Arithmetic on numbers below 100."""
    kind = Kind(
        name="arithmetic",
        question=f"Start with ${{start}}$ and apply ${{operations}}$ modulo ${MODULUS}$. What is the result?",
        state=r"\d\d?",
        draw=lambda rng: str(rng.randrange(MODULUS)),
        draw_operation=_draw_operation,
        apply=_apply,
        slip=lambda state, rng: str((int(state) + rng.choice(SLIPS)) % MODULUS),
    )
    numbers = [str(n) for n in range(10, MODULUS)]
    return stepwise(kind, longest, incorrect, lapses, numbers, BasePolicyConfig(steps=550, max_length=1024))


def _draw_operation(rng: Random) -> str:
    sign = rng.choice("+-*")
    return f"{sign}{rng.choice(FACTORS) if sign == '*' else rng.randint(1, 9)}"


def _apply(state: str, operation: str) -> str:
    a, b = int(state), int(operation[1:])
    return str({"+": a + b, "-": a - b, "*": a * b}[operation[0]] % MODULUS)
