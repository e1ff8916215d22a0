"""Cups: a row of cups, of which two change places again and again; the answer is their order at the end."""

from itertools import combinations
from string import ascii_uppercase

from trl_ext.mini.stepwise import Kind, stepwise
from trl_ext.mini.task import BasePolicyConfig, Task

FEWEST, MOST = 3, 9  # a cup is a digit


def cups(*, longest: int = 12, incorrect: str = "longer", lapses: float = 0.05, cups: int = 5) -> Task:
    """Exchanges of cups; a ValueError unless there are 3 to 9 of them."""
    if not FEWEST <= cups <= MOST:
        raise ValueError(f"cups must be from {FEWEST} to {MOST}, got {cups}")
    digits = [str(n) for n in range(1, cups + 1)]
    exchanges = ["".join(pair) for pair in combinations(ascii_uppercase[:cups], 2)]
    kind = Kind(
        name="cups",
        question="Exchange the cups at the places ${operations}$ in turn. Which order does ${start}$ turn into?",
        state=rf"\d{{{cups}}}",
        draw=lambda rng: "".join(rng.sample(digits, cups)),
        draw_operation=lambda _, rng: rng.choice(exchanges),
        apply=_apply,
        slip=lambda state, rng: _apply(state, rng.choice(exchanges)),
    )
    return stepwise(kind, longest, incorrect, lapses, exchanges, BasePolicyConfig(steps=560, max_length=1024))


def _apply(state: str, operation: str) -> str:
    cups, (a, b) = list(state), map(ascii_uppercase.index, operation)
    cups[a], cups[b] = cups[b], cups[a]
    return "".join(cups)
