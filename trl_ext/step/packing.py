"""Rows of different length -> sets of micro-batches within a budget of tokens; no tensors.

A set is of whole groups: its micro-batches share the groups' prompts, where that is less work than it costs. On a
shared prompt, every completion token is compared to every token of its row, through a mask; in a row of its own it is
compared to the earlier ones only, half of them, by attention's causal kernel. So sharing saves the prompt's matrix
products, which grow with its length, and adds comparisons, which grow with the square of a completion's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Row:
    """A row of a batch, with its lengths in tokens without padding."""

    index: int
    prompt: int
    completion: int
    group: int  # rows of one group have the same prompt
    copies: tuple[int, ...] = ()  # other rows with the same prompt and completion, which are not computed


def unite(rows: Iterable[Row], sequence: Sequence[int]) -> list[Row]:
    """The first of equal rows, with the others as its copies.

    Args:
        sequence: of a row of the batch, by its index, a number that equal rows have in common.
    """
    equal: dict[int, list[Row]] = {}
    for row in rows:
        equal.setdefault(sequence[row.index], []).append(row)
    return [replace(first, copies=tuple(row.index for row in others)) for first, *others in equal.values()]


def shortest(rows: Iterable[Row]) -> Row:
    """The row with the fewest tokens."""
    return min(rows, key=lambda row: row.prompt + row.completion)


def rounded_up(n: int, multiple: int | None) -> int:
    """The next multiple, or `n` where there is none."""
    return n if multiple is None else -(-n // multiple) * multiple


def cost(rows: Sequence[Row], multiple: int | None = None) -> int:
    """Number of tokens in a forward pass over these rows, padding included, whose width is such a multiple."""
    return len(rows) * rounded_up(max(row.prompt + row.completion for row in rows), multiple)


def pack_by_tokens(rows: Iterable[Row], budget: int, multiple: int | None = None) -> list[list[Row]]:
    """All rows, the longest first, in micro-batches of at most `budget` tokens (or of one longer row)."""
    runs: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.prompt + row.completion, reverse=True):
        if runs and cost([*runs[-1], row], multiple) <= budget:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def pack_without_padding(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """All rows, in micro-batches of at most `budget` completion tokens (or of one longer row): first-fit decreasing."""
    runs: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: row.completion, reverse=True):
        place = next((place for place, tokens in enumerate(room) if row.completion <= tokens), len(runs))
        if place == len(runs):
            runs.append([])
            room.append(budget)
        runs[place].append(row)
        room[place] -= row.completion
    return runs


def group_by_prompt(rows: Iterable[Row], budget: int, multiple: int | None = None) -> list[list[Row]]:
    """All rows, in sets of whole groups of similar length with at most `budget` prompt tokens (or one prompt)."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    sets: list[list[list[Row]]] = []
    for group in sorted(groups.values(), key=lambda group: max(row.completion for row in group), reverse=True):
        if sets and cost([Row(0, one[0].prompt, 0, 0) for one in [*sets[-1], group]], multiple) <= budget:
            sets[-1].append(group)
        else:
            sets.append([group])
    return [[row for group in chosen for row in group] for chosen in sets]


def pack_on_shared_prompts(
    rows: Iterable[Row], budget: int, waiting: float = 1.0, multiple: int | None = None
) -> list[list[list[Row]]]:
    """All rows, in sets of micro-batches; the prompts of a set and any one of its micro-batches fit into the budget.

    Args:
        waiting: what a prompt's token counts while a micro-batch is computed.
        multiple: of which the prompts' width is one.
    """
    sets = []
    for chosen in group_by_prompt(rows, budget // 2, multiple):
        prompts = {row.group: Row(0, row.prompt, 0, 0) for row in chosen}
        sets.append(pack_without_padding(chosen, budget - int(waiting * cost(list(prompts.values()), multiple))))
    return sets


def split_into(runs: Sequence[Sequence[Row]], n: int) -> list[list[Row]]:
    """The same rows in exactly `n` micro-batches: the largest is halved while there are too few, then empty ones."""
    if len(runs) > n:
        raise ValueError(f"{len(runs)} micro-batches do not fit into {n}")
    parts = [list(run) for run in runs]
    while len(parts) < n and any(len(run) > 1 for run in parts):
        place = max((i for i, run in enumerate(parts) if len(run) > 1), key=lambda i: cost(parts[i]))
        middle = len(parts[place]) // 2
        parts[place : place + 1] = [parts[place][:middle], parts[place][middle:]]
    return parts + [[] for _ in range(n - len(parts))]


def as_on_every_rank(
    sets: Sequence[Sequence[Sequence[Row]]], max_over_ranks: Callable[[list[int]], list[int]]
) -> list[list[list[Row]]]:
    """The same rows in at least one micro-batch, and in as many sets and micro-batches of each as any rank has at most.

    What ranks exchange after every micro-batch (ZeRO-2: gradients, in the order in which they are ready; ZeRO-3: also
    parameters) then comes in the same order on all of them: every rank computes prompts when any does.
    """
    counts = max_over_ranks([len(runs) for runs in sets])
    padded = [*sets, *([] for _ in counts[len(sets) :])]
    aligned = [split_into(runs, count) for runs, count in zip(padded, counts, strict=True)]
    return aligned if any(aligned) else [[[]]]


def sharing_pays(prompt: int, completions: Sequence[int], attention: float) -> bool:
    """Whether one pass over the prompt of a group is no more work than one for each of its completions.

    In rows of their own, G completions of T tokens after a prompt of L take G L + sum(T) tokens and
    sum((L + T)^2) / 2 comparisons; on a shared prompt L + sum(T), and L^2 / 2 + sum(T (L + T)).

    Args:
        prompt: L.
        completions: each one's T.
        attention: `attention_cost` of the model; 0 if comparisons are free.
    """
    others = len(completions) - 1
    return others * prompt + attention / 2 * (others * prompt**2 - sum(n**2 for n in completions)) >= 0
