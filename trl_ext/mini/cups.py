"""Cups: a row of cups, of which two change places again and again; the answer is their order at the end."""

from random import Random

from trl_ext.mini.stepwise import Kind, stepwise
from trl_ext.mini.task import BasePolicyConfig, Task

FEWEST, MOST = 3, 9  # a cup is a digit


def cups(*, longest: int = 12, incorrect: str = "longer", lapses: float = 0.05, cups: int = 4) -> Task:
    """Exchanges of cups; a ValueError unless there are 3 to 9 of them."""
    if not FEWEST <= cups <= MOST:
        raise ValueError(f"cups must be from {FEWEST} to {MOST}, got {cups}")
    digits = [str(n) for n in range(1, cups + 1)]
    kind = Kind(
        name="cups",
        question="Cups stand in the order ${start}$. Exchange the places ${operations}$ in turn. What is their order?",
        state=rf"\d{{{cups}}}",
        draw=lambda rng: "".join(rng.sample(digits, cups)),
        draw_operation=lambda _, rng: _places(digits, rng),
        apply=_apply,
        slip=lambda state, rng: _apply(state, _places(digits, rng)),
    )
    return stepwise(kind, longest, incorrect, lapses, (), BasePolicyConfig(steps=500, max_length=1024))


def _places(digits: list[str], rng: Random) -> str:
    return "".join(sorted(rng.sample(digits, 2)))


def _apply(state: str, operation: str) -> str:
    cups, (a, b) = list(state), (int(place) - 1 for place in operation)
    cups[a], cups[b] = cups[b], cups[a]
    return "".join(cups)
