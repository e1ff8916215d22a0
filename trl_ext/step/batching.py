"""A rollout's rows -> micro-batches with less padding, for the same gradient.

Zero-advantage rows are skipped, and of equal rows one is computed; the others are sorted by length and packed into
micro-batches of a limited number of tokens, each trimmed to its own longest prompt and completion. On shared prompts
they are computed without padding, and packed as they fit.

Letters: B rows, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from trl_ext.step.micro_batch import Contiguous, Copies, MicroBatch, OnPrompts
from trl_ext.step.packing import (
    Row,
    as_on_every_rank,
    pack_by_tokens,
    pack_on_shared_prompts,
    rounded_up,
    sharing_pays,
    shortest,
    unite,
)
from trl_ext.step.prompt_sharing import Completions, SharedPrompts
from trl_ext.step.rows import Rows


def lengths_of(rows: Rows) -> list[Row]:
    """Each row's lengths; without `group`, each row is a group of its own."""
    prompts = rows.prompt_mask.sum(dim=1).tolist()
    completions = rows.completion_mask.sum(dim=1).tolist()
    groups = range(len(rows)) if rows.group is None else rows.group.tolist()
    return [Row(i, *sizes) for i, sizes in enumerate(zip(prompts, completions, groups, strict=True))]


def select_rows(
    rows: Rows, chosen: Sequence[Row], multiple_of: int | None = None, width: Row | None = None
) -> MicroBatch:
    """These rows, without the padding that all of them have, and their copies behind them.

    Without a `width` they are for a pass over contiguous rows; with one, for TRL's or for one that the caller names.

    Args:
        chosen: if empty, the result is the shortest row, fully masked: every rank needs a forward pass.
        multiple_of: round the widths up to a multiple, as far as the rows are that wide.
        width: the prompt and completion length to pad to, by default the longest among `chosen`.
    """
    if not chosen:
        return select_rows(rows, [shortest(lengths_of(rows))], multiple_of, width).untrained()
    device = rows.prompt_ids.device
    index = [*(row.index for row in chosen), *(copy for row in chosen for copy in row.copies)]
    measured = [width] if width else chosen
    prompt = rounded_up(max(1, *(row.prompt for row in measured)), multiple_of)
    completion = rounded_up(max(1, *(row.completion for row in measured)), multiple_of)
    micro_batch = MicroBatch(rows.taken(torch.tensor(index, device=device), prompt, completion))
    if width is None:
        longest = max(2, *(row.prompt + row.completion for row in chosen))
        micro_batch = replace(micro_batch, forward=Contiguous(rounded_up(longest, multiple_of)))
    if copies := [place for place, row in enumerate(chosen) for _ in row.copies]:
        source = torch.tensor([*range(len(chosen)), *copies], device=device)
        micro_batch = replace(micro_batch, copies=Copies(len(chosen), source))
    return micro_batch


@dataclass(frozen=True)
class Batching:
    """How the rows of an optimizer step are divided into micro-batches."""

    rows: int  # per micro-batch, as configured
    # The maximum per micro-batch of more than one row, padding included; None: that of `rows` untrimmed rows.
    tokens: int | None = None
    dynamic: bool = True  # unite equal rows, sort by length, pack by tokens, trim; else keep order, padding and `rows`
    skip_zero_advantage: bool = True  # skip rows without gradient
    share_prompts: bool = False  # compute a group's prompt once, where it pays; needs `dynamic`
    attention: float = 0.0  # `attention_cost` of the model
    multiple_of: int | None = None  # round trimmed widths up to a multiple
    checkpointing: bool = False  # of gradients: a prompt that waits for its completions then keeps less
    separate_prompt_backward: bool = False  # as `SharedPrompts.separate_backward`

    def plan(self, rows: Rows, max_over_ranks: Callable[[list[int]], list[int]] = list) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, at least one.

        Args:
            rows: this rank's of the step.
            max_over_ranks: maps the numbers of micro-batches in this rank's sets to the maxima over all ranks.
        """
        kept = [
            row
            for row, is_trained in zip(lengths_of(rows), rows.has_gradient(), strict=True)
            if is_trained or not self.skip_zero_advantage
        ]
        if self.dynamic and rows.sequence is not None:
            kept = unite(kept, rows.sequence.tolist())
        sets = as_on_every_rank(self._pack(kept, rows), max_over_ranks)
        width = None
        if not self.dynamic:
            width = Row(0, rows.prompt_ids.shape[1], rows.completion_ids.shape[1], 0)
        micro_batches = [select_rows(rows, run, self.multiple_of, width) for run in sets[0]]
        if sets[1:]:
            rows = rows.with_two_prompt_tokens()
        return micro_batches + [shared for runs in sets[1:] for shared in self._on_shared_prompts(rows, runs)]

    def _pack(self, kept: list[Row], rows: Rows) -> list[list[list[Row]]]:
        """This rank's micro-batches in sets: first those of rows with prompts of their own, then of shared ones."""
        if not self.dynamic:
            return [[kept[start : start + self.rows] for start in range(0, len(kept), self.rows)]]
        budget = self.tokens or self.rows * (rows.prompt_ids.shape[1] + rows.completion_ids.shape[1])
        alone, together = self._by_sharing(kept)
        waiting = 0.5 if self.checkpointing else 1.0
        on_shared = pack_on_shared_prompts(together, budget, waiting, self.multiple_of)
        return [pack_by_tokens(alone, budget, self.multiple_of), *on_shared]

    def _by_sharing(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Rows that are computed with their prompts, and those on shared ones."""
        groups: dict[int, list[Row]] = {}
        for row in rows if self.share_prompts else ():
            groups.setdefault(row.group, []).append(row)
        pays = {
            number
            for number, group in groups.items()
            if sharing_pays(group[0].prompt, [row.completion for row in group], self.attention)
        }
        return [row for row in rows if row.group not in pays], [row for row in rows if row.group in pays]

    def _on_shared_prompts(self, rows: Rows, runs: list[list[Row]]) -> list[MicroBatch]:
        """A set's micro-batches; those without rows have the set's shortest row, or the batch's, fully masked."""
        kept = [row for run in runs for row in run] or [shortest(lengths_of(rows))]
        first = {row.group: row for row in kept}
        groups = sorted(first)
        width = Row(0, max(2, *(row.prompt for row in kept)), 1, 0)  # there is a prompt to compute, as on other ranks
        part = select_rows(rows, [first[group] for group in groups], self.multiple_of, width).rows
        shared = SharedPrompts(part.prompt_ids, part.prompt_mask, groups, len(runs), self.separate_prompt_backward)
        micro_batches = []
        for run in runs:
            chosen = run or [shortest(kept)]
            lengths = [max(1, row.completion) for row in chosen]
            taken = select_rows(rows, chosen, self.multiple_of, replace(width, completion=max(lengths)))
            taken = replace(taken, forward=OnPrompts(shared, Completions([row.group for row in chosen], lengths)))
            micro_batches.append(taken if run else taken.untrained())
        return micro_batches
