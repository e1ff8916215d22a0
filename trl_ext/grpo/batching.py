"""A rollout's rows -> micro-batches with less padding, for the same gradient.

Zero-advantage rows are skipped; the others are sorted by length and packed into micro-batches of a limited number of
tokens, each trimmed to its own longest prompt and completion.

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

PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # (B, L), padded on the left

Batch = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a batch, with its lengths in tokens without padding."""

    index: int
    prompt: int
    completion: int
    group: int  # rows of one group have the same prompt


def rows_of(batch: Batch) -> list[Row]:
    """The batch's rows; without the field `group`, each row is a group of its own."""
    prompts = batch["prompt_mask"].sum(dim=1).tolist()
    completions = batch["completion_mask"].sum(dim=1).tolist()
    groups = batch["group"].tolist() if "group" in batch else range(len(prompts))
    return [Row(i, *sizes) for i, sizes in enumerate(zip(prompts, completions, groups, strict=True))]


def groups_of_prompts(ids: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """(B,) numbers, equal for rows with the same group and the same prompt, in the order of the groups.

    The prompts of a group may differ, because a `rollout_func` or an environment may rewrite them.

    Args:
        ids, mask: (B, L), padded on the left.
        group: (B,)
    """
    return torch.unique(torch.cat([group[:, None], mask, ids * mask], dim=1), dim=0, return_inverse=True)[1]


def loss_mask(batch: Batch) -> Tensor:
    """(B, T) bool: the completion tokens that the model generated and that are trained on."""
    mask = batch["completion_mask"]
    return (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()


def as_wide_as(completions: Tensor, values: Tensor) -> Tensor:
    """(B,) values as they are; (B, any) values per token cut or padded with 0 to the width of (B, T) completions."""
    if values.ndim == 1:
        return values
    return torch.nn.functional.pad(values, (0, completions.shape[1] - values.shape[1]))


def has_gradient(batch: Batch) -> list[bool]:
    """For each row, whether it has a nonzero advantage and a token that is trained on."""
    mask = loss_mask(batch)
    return ((batch["advantages"].view(len(mask), -1) != 0).any(dim=1) & mask.any(dim=1)).tolist()


def cost(rows: Sequence[Row]) -> int:
    """Number of tokens in a forward pass over these rows, padding included."""
    return len(rows) * (max(row.prompt for row in rows) + max(row.completion for row in rows))


def pack_by_tokens(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """All rows, the longest first, in micro-batches of at most `budget` tokens (or of one longer row)."""
    runs: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.prompt + row.completion, reverse=True):
        if runs and cost([*runs[-1], row]) <= budget:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def group_by_prompt(rows: Iterable[Row], budget: int) -> list[list[Row]]:
    """All rows, in sets of whole groups of similar length with at most `budget` prompt tokens (or one prompt)."""
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


def pack_on_shared_prompts(rows: Iterable[Row], budget: int) -> list[list[list[Row]]]:
    """All rows, in sets of micro-batches; the prompts of a set and any one of its micro-batches fit into the budget."""
    sets = []
    for chosen in group_by_prompt(rows, budget // 2):
        prompts = {row.group: Row(0, row.prompt, 0, 0) for row in chosen}
        place = {row.index: row for row in chosen}
        completions = [Row(row.index, 0, row.completion, row.group) for row in chosen]
        runs = pack_by_tokens(completions, budget - cost(list(prompts.values())))
        sets.append([[place[row.index] for row in run] for run in runs])
    return sets


def split_into(runs: Sequence[Sequence[Row]], n: int) -> list[list[Row]]:
    """The same rows in exactly `n` micro-batches: the largest is halved while there are too few, then empty ones."""
    if len(runs) > n:
        raise ValueError(f"{len(runs)} micro-batches do not fit into {n}")
    found = [list(run) for run in runs]
    while len(found) < n and any(len(run) > 1 for run in found):
        place = max((i for i, run in enumerate(found) if len(run) > 1), key=lambda i: cost(found[i]))
        middle = len(found[place]) // 2
        found[place : place + 1] = [found[place][:middle], found[place][middle:]]
    return found + [[] for _ in range(n - len(found))]


def select_rows(batch: Batch, rows: Sequence[Row], multiple_of: int | None = None, width: Row | None = None) -> Batch:
    """These rows of the batch, without the padding that all of them have.

    Args:
        rows: if empty, the result is the batch's shortest row, fully masked: every rank needs a forward pass.
        multiple_of: round the widths up to a multiple, as far as the batch is that wide.
        width: the prompt and completion length to pad to, by default the longest among `rows`.
    """
    if not rows:
        filler = select_rows(
            batch, [min(rows_of(batch), key=lambda row: row.prompt + row.completion)], multiple_of, width
        )
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
        if name in PROMPT_FIELDS:
            return chosen[:, -prompt:]
        return chosen[:, :completion] if value.shape[:2] == shape else chosen

    return {name: part(name, value) for name, value in batch.items()}


def _rounded_up(n: int, multiple_of: int | None) -> int:
    return n if multiple_of is None else -(-n // multiple_of) * multiple_of


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Equally padded slices of one rollout as one batch; a value that is not a tensor of rows is the first slice's."""
    first = batches[0]
    return {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(value, Tensor) and value.ndim else value
        for name, value in first.items()
    }


@dataclass(frozen=True)
class Batching:
    """How the rows of an optimizer step are divided into micro-batches."""

    rows: int  # per micro-batch, as configured
    tokens: int | None = None  # the maximum per micro-batch, padding included; None: that of `rows` untrimmed rows
    dynamic: bool = True  # sort by length, pack by tokens and trim; else keep order, padding and `rows` at a time
    skip_zero_advantage: bool = True  # skip rows without gradient
    share_prompts: bool = False  # compute a group's prompt once; needs `dynamic`
    multiple_of: int | None = None  # round trimmed widths up to a multiple

    def plan(self, batch: Batch, max_over_ranks: Callable[[int], int] = int) -> list[Batch]:
        """The micro-batches of one optimizer step, at least one and at most len(batch) / `rows`.

        Args:
            batch: this rank's rows of the step.
            max_over_ranks: maps this rank's number of micro-batches to the maximum, which every rank then has.
        """
        rows, trained = rows_of(batch), has_gradient(batch)
        kept = [
            row for row, is_trained in zip(rows, trained, strict=True) if is_trained or not self.skip_zero_advantage
        ]
        sets = self._pack(kept, batch, most=-(-len(rows) // self.rows))
        runs = [run for chosen in sets for run in chosen]
        runs = split_into(runs, max(max_over_ranks(len(runs)), 1))
        if self.share_prompts:
            return self._on_shared_prompts(batch, runs, sets)
        width = None
        if not self.dynamic:
            width = Row(0, batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1], 0)
        return [select_rows(batch, run, self.multiple_of, width) for run in runs]

    def _pack(self, rows: list[Row], batch: Batch, most: int) -> list[list[list[Row]]]:
        """At most `most` micro-batches, in sets that share their prompts; one set if prompts are not shared."""
        if not self.dynamic:
            return [[rows[start : start + self.rows] for start in range(0, len(rows), self.rows)]]
        budget = self.tokens or self.rows * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
        while True:
            sets = pack_on_shared_prompts(rows, budget) if self.share_prompts else [pack_by_tokens(rows, budget)]
            if sum(map(len, sets)) <= most:
                return sets
            budget += budget // 4 + 1  # too small: there would be more micro-batches than calls of the step

    def _on_shared_prompts(self, batch: Batch, runs: list[list[Row]], sets: list[list[list[Row]]]) -> list[Batch]:
        set_of = {row.group: number for number, chosen in enumerate(sets) for run in chosen for row in run}
        users = Counter(set_of[run[0].group] for run in runs if run)
        prompts: dict[int, tuple[SharedPrompts, Row]] = {}
        for number, chosen in enumerate(sets):
            one_each = {row.group: row for run in chosen for row in run}
            first = [one_each[group] for group in sorted(one_each)]
            width = Row(0, max(row.prompt for row in first), 1, 0)
            part = select_rows(batch, first, self.multiple_of, width)
            groups = torch.tensor(sorted(one_each), device=part["prompt_ids"].device)
            shared = SharedPrompts(part["prompt_ids"], part["prompt_mask"], groups, users[number])
            prompts[number] = shared, width
        found = []
        for run in runs:
            if not run:
                found.append(select_rows(batch, run, self.multiple_of))
                continue
            shared, width = prompts[set_of[run[0].group]]
            width = dataclasses.replace(width, completion=max(row.completion for row in run))
            found.append({**select_rows(batch, run, self.multiple_of, width), "prompts": shared})
        return found
