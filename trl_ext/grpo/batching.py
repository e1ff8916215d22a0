"""A rollout's rows -> micro-batches without waste, for the same gradient.

Rows that cannot move the weights are left out; the others are ordered by length, cut so that no micro-batch computes
more tokens than a budget, and each micro-batch is trimmed to its own longest prompt and completion.

Letters: B rows, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext.grpo.prompt_sharing import SharedPrompts

_PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # (B, L), padded on the left

Batch = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a batch and what it costs, in tokens without padding."""

    index: int
    prompt: int
    completion: int
    group: int  # rows of one number have one prompt


def rows_of(batch: Batch) -> list[Row]:
    """The batch's rows; each is a group of its own where the batch does not say."""
    prompts = batch["prompt_mask"].sum(dim=1).tolist()
    completions = batch["completion_mask"].sum(dim=1).tolist()
    groups = batch["group"].tolist() if "group" in batch else range(len(prompts))
    return [Row(i, *sizes) for i, sizes in enumerate(zip(prompts, completions, groups, strict=True))]


def groups_of_prompts(ids: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """(B,) a number for each set of rows that have both group and prompt in common, in the order of the groups.

    The prompts of a group may differ: a `rollout_func` or an environment writes its own.

    Args:
        ids, mask: (B, L), padded on the left.
        group: (B,)
    """
    return torch.unique(torch.cat([group[:, None], mask, ids * mask], dim=1), dim=0, return_inverse=True)[1]


def moves_weights(batch: Batch) -> list[bool]:
    """Per row: whether it has an advantage other than 0 and a token that trains."""
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    advantages = batch["advantages"].view(len(mask), -1)
    return ((advantages != 0).any(dim=1) & mask.bool().any(dim=1)).tolist()


def cost(rows: Sequence[Row]) -> int:
    """Tokens that one forward pass over these rows computes, padding included."""
    return len(rows) * (max(row.prompt for row in rows) + max(row.completion for row in rows))


def cut(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """All rows, the longest first, in micro-batches of at most `budget` tokens (or one larger row)."""
    runs: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.prompt + row.completion, reverse=True):
        if runs and cost([*runs[-1], row]) <= budget:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def by_prompts(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """All rows, in sets of whole groups of like length whose prompts have at most `budget` tokens, or one longer."""
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    sets: list[list[list[Row]]] = []
    for group in sorted(groups.values(), key=lambda group: max(row.completion for row in group), reverse=True):
        if sets and cost([Row(0, one[0].prompt, 0, 0) for one in [*sets[-1], group]]) <= budget:
            sets[-1].append(group)
        else:
            sets.append([group])
    return [[row for group in chosen for row in group] for chosen in sets]


def cut_on_shared_prompts(rows: Iterable[Row], budget: int) -> list[list[list[Row]]]:
    """All rows, in sets of micro-batches: the prompts of a set and any one of its micro-batches fit into the budget."""
    sets = []
    for chosen in by_prompts(rows, budget // 2):
        prompts = {row.group: Row(0, row.prompt, 0, 0) for row in chosen}
        place = {row.index: row for row in chosen}
        completions = [Row(row.index, 0, row.completion, row.group) for row in chosen]
        runs = cut(completions, budget - cost(list(prompts.values())))
        sets.append([[place[row.index] for row in run] for run in runs])
    return sets


def into(runs: Sequence[Sequence[Row]], n: int) -> list[list[Row]]:
    """The same rows in exactly `n` micro-batches: the largest is halved until there are enough, then empty ones follow.

    Raises:
        ValueError: there are more than n.
    """
    if len(runs) > n:
        raise ValueError(f"{len(runs)} micro-batches do not fit into {n}")
    found = [list(run) for run in runs]
    while len(found) < n and any(len(run) > 1 for run in found):
        place = max((i for i, run in enumerate(found) if len(run) > 1), key=lambda i: cost(found[i]))
        middle = len(found[place]) // 2
        found[place : place + 1] = [found[place][:middle], found[place][middle:]]
    return found + [[] for _ in range(n - len(found))]


def take(batch: Batch, rows: Sequence[Row], multiple_of: int | None = None, width: Row | None = None) -> Batch:
    """These rows of the batch, without the padding that all of them have.

    Args:
        rows: with none, the batch's shortest row comes with nothing in it that trains, for the collectives' sake.
        multiple_of: of which the widths stay a multiple, as far as the batch is that wide.
        width: as wide as this row's prompt and completion, instead of the longest among `rows`.
    """
    if not rows:
        filler = take(batch, [min(rows_of(batch), key=lambda row: row.prompt + row.completion)], multiple_of, width)
        nothing = {name: torch.zeros_like(filler[name]) for name in ("completion_mask", "advantages")}
        return {name: value for name, value in (filler | nothing).items() if name != "row"}
    index = torch.tensor([row.index for row in rows], device=batch["prompt_ids"].device)
    measured = [width] if width else rows
    prompt = _rounded_up(max(1, *(row.prompt for row in measured)), multiple_of)
    completion = _rounded_up(max(1, *(row.completion for row in measured)), multiple_of)
    shape = batch["completion_ids"].shape

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        chosen = value[index]
        if name in _PROMPT_FIELDS:
            return chosen[:, -prompt:]
        return chosen[:, :completion] if value.shape[:2] == shape else chosen

    return {name: part(name, value) for name, value in batch.items()}


def _rounded_up(n: int, multiple_of: int | None) -> int:
    return n if multiple_of is None else -(-n // multiple_of) * multiple_of


def joined(batches: Sequence[Batch]) -> Batch:
    """Micro-batches of one rollout, padded alike, as one batch; what is no tensor of rows is the first's."""
    first = batches[0]
    return {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in first.items()
    }


@dataclass(frozen=True)
class Batching:
    """How the rows of an optimizer step become its micro-batches.

    Attributes:
        rows: of a micro-batch, as the user asked for.
        tokens: most that a micro-batch computes, padding included; None: what `rows` of the widest rows have.
        compact: order by length, cut by tokens and trim; else `rows` at a time, as they come and as wide as they are.
        skip_idle: leave out rows that cannot move the weights.
        shared: compute a group's prompt once; needs `compact`.
        multiple_of: of which the trimmed widths are a multiple.
    """

    rows: int
    tokens: int | None = None
    compact: bool = True
    skip_idle: bool = True
    shared: bool = False
    multiple_of: int | None = None

    def plan(self, batch: Batch, agree: Callable[[int], int] = int) -> list[Batch]:
        """The micro-batches of one optimizer step, at least one and at most len(batch) / `rows`.

        Args:
            batch: this rank's rows of the step.
            agree: this rank's number of micro-batches to the largest over all ranks, which each of them then has.
        """
        rows = rows_of(batch)
        kept = [row for row, moves in zip(rows, moves_weights(batch), strict=True) if moves or not self.skip_idle]
        sets = self._cut(kept, batch, most=-(-len(rows) // self.rows))
        runs = [run for chosen in sets for run in chosen]
        runs = into(runs, max(agree(len(runs)), 1))
        if self.shared:
            return self._on_shared_prompts(batch, runs, sets)
        width = None
        if not self.compact:
            width = Row(0, batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1], 0)
        return [take(batch, run, self.multiple_of, width) for run in runs]

    def _cut(self, rows: list[Row], batch: Batch, most: int) -> list[list[list[Row]]]:
        """At most `most` micro-batches, in sets whose rows have their prompts in common (without sharing, in one)."""
        if not self.compact:
            return [[rows[start : start + self.rows] for start in range(0, len(rows), self.rows)]]
        budget = self.tokens or self.rows * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
        while True:
            sets = cut_on_shared_prompts(rows, budget) if self.shared else [cut(rows, budget)]
            if sum(map(len, sets)) <= most:
                return sets
            budget += budget // 4 + 1  # it was too small for the optimizer's turns

    def _on_shared_prompts(self, batch: Batch, runs: list[list[Row]], sets: list[list[list[Row]]]) -> list[Batch]:
        set_of = {row.group: number for number, chosen in enumerate(sets) for run in chosen for row in run}
        users = Counter(set_of[run[0].group] for run in runs if run)
        prompts: dict[int, tuple[SharedPrompts, Row]] = {}
        for number, chosen in enumerate(sets):
            one_each = {row.group: row for run in chosen for row in run}
            first = [one_each[group] for group in sorted(one_each)]
            width = Row(0, max(row.prompt for row in first), 1, 0)
            part = take(batch, first, self.multiple_of, width)
            groups = torch.tensor(sorted(one_each), device=part["prompt_ids"].device)
            shared = SharedPrompts(part["prompt_ids"], part["prompt_mask"], groups, users[number])
            prompts[number] = shared, width
        found = []
        for run in runs:
            if not run:
                found.append(take(batch, run, self.multiple_of))
                continue
            shared, width = prompts[set_of[run[0].group]]
            width = dataclasses.replace(width, completion=max(row.completion for row in run))
            found.append({**take(batch, run, self.multiple_of, width), "prompts": shared})
        return found
