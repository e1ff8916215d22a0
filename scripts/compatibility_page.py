"""`docs/reference/compatibility.md`: what goes together, asked of the checks that a run begins with."""

from __future__ import annotations

import itertools

from trl_ext.io import markdown_table
from trl_ext.recipes.compatibility import AXES, TRIED, Choice, Outcome, outcome

INTRODUCTION = """\
# What goes together

Adapters, quantized weights, engines, kinds of parallelism and savings of a step, each pair of them: yes, or the number
of the line with which it is refused before a model loads, or of the reason why a saving switches itself off, which the
log has. Not tried is what needs several GPUs. More than two choices go together where each pair of them does. A whole
model, without an adapter, goes with everything but quantized weights.

Written by `python -m scripts.docs_pages`, which asks the checks of a run about each pair
(`trl_ext/recipes/compatibility.py`).
"""


def compatibility_page() -> str:
    """The page."""
    lines: list[str] = []
    said: dict[str, int] = {}  # what is said, by its number
    for first, second in itertools.combinations(AXES, 2):
        rows = [[one.name, *(_cell(one, other, said) for other in AXES[second])] for one in AXES[first]]
        lines += [f"## {first.capitalize()} and {second}", ""]
        lines += [*markdown_table(["", *(other.name for other in AXES[second])], rows), ""]
        lines += [f"Tried by {TRIED[first, second]}.", ""]
    lines += ["## What is said", "", *(f"{number}. {text}" for text, number in said.items())]
    return "\n".join([INTRODUCTION, *lines]) + "\n"


def _cell(one: Choice, other: Choice, said: dict[str, int]) -> str:
    found, on_cpu = outcome(one, other), outcome(one, other, on_cpu=True)
    untried = one.needs_gpus or other.needs_gpus
    cell = "not tried" if untried and found == Outcome() else _verdict(found, said)
    return cell if found == on_cpu else f"{cell}; on a CPU {_verdict(on_cpu, said)}"


def _verdict(found: Outcome, said: dict[str, int]) -> str:
    if (text := found.refused or found.off) is None:
        return "yes"
    number = said.setdefault(text if found.refused else f"Off: {text}.", len(said) + 1)
    return f"refused: {number}" if found.refused else f"off: {number}"
