"""A rollout's rows -> micro-batches with less padding, for the same gradient.

Zero-advantage rows are skipped, and of equal rows one is computed; the others are sorted by length and packed into
micro-batches of a limited number of tokens, each trimmed to its own longest prompt and completion. On shared prompts
they are computed without padding, and packed as they fit.

Letters: B rows, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_ext.grpo.packing import (
    Row,
    as_on_every_rank,
    pack_by_tokens,
    pack_on_shared_prompts,
    rounded_up,
    sharing_pays,
    shortest,
    unite,
)
from trl_ext.grpo.prompt_sharing import Rows, SharedPrompts

PROMPT_FIELDS = ("prompt_ids", "prompt_mask")  # (B, L), padded on the left

Batch = dict[str, Any]


def rows_of(batch: Batch) -> list[Row]:
    """The batch's rows; without the field `group`, each row is a group of its own."""
    prompts = batch["prompt_mask"].sum(dim=1).tolist()
    completions = batch["completion_mask"].sum(dim=1).tolist()
    groups = batch["group"].tolist() if "group" in batch else range(len(prompts))
    return [Row(i, *sizes) for i, sizes in enumerate(zip(prompts, completions, groups, strict=True))]


def numbers_of_sequences(ids: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """(B,) numbers, equal for rows with the same group and the same tokens, in the order of the groups.

    Of prompts too: a `rollout_func` or an environment may rewrite those of a group.

    Args:
        ids, mask: (B, tokens), all padded on the same side.
        group: (B,)
    """
    return torch.unique(torch.cat([group[:, None], mask, ids * mask], dim=1), dim=0, return_inverse=True)[1]


def with_two_prompt_tokens(batch: Batch) -> Batch:
    """Prompts of one token with padding before it."""
    if batch["prompt_ids"].shape[1] > 1:
        return batch
    return batch | {name: torch.nn.functional.pad(batch[name], (1, 0)) for name in PROMPT_FIELDS}


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


def select_rows(batch: Batch, rows: Sequence[Row], multiple_of: int | None = None, width: Row | None = None) -> Batch:
    """These rows of the batch, without the padding that all of them have.

    Without a `width`, the number `columns` says how many a row needs whose completion begins right after its prompt.
    With copies, which come after the `computed` rows, `copy_of` (B,) says which of these each row equals.

    Args:
        rows: if empty, the result is the batch's shortest row, fully masked: every rank needs a forward pass.
        multiple_of: round the widths up to a multiple, as far as the batch is that wide.
        width: the prompt and completion length to pad to, by default the longest among `rows`.
    """
    if not rows:
        return masked(select_rows(batch, [shortest(rows_of(batch))], multiple_of, width))
    device = batch["prompt_ids"].device
    copy_of = [place for place, row in enumerate(rows) for _ in row.copies]
    index = torch.tensor([*(row.index for row in rows), *(copy for row in rows for copy in row.copies)], device=device)
    measured = [width] if width else rows
    prompt = rounded_up(max(1, *(row.prompt for row in measured)), multiple_of)
    completion = rounded_up(max(1, *(row.completion for row in measured)), multiple_of)
    shape = batch["completion_ids"].shape

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        chosen = value[index]
        if name in PROMPT_FIELDS:
            return chosen[:, -prompt:]
        return chosen[:, :completion] if value.shape[:2] == shape else chosen

    found = {name: part(name, value) for name, value in batch.items()}
    if width is None:
        longest = max(2, *(row.prompt + row.completion for row in rows))
        found["columns"] = rounded_up(longest, multiple_of)
    if copy_of:
        found |= {"computed": len(rows), "copy_of": torch.tensor([*range(len(rows)), *copy_of], device=device)}
    return found


def masked(batch: Batch) -> Batch:
    """The same rows, of which no token is trained on."""
    nothing = {name: torch.zeros_like(batch[name]) for name in ("completion_mask", "advantages")}
    return {name: value for name, value in (batch | nothing).items() if name != "row"}


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
    # The maximum per micro-batch of more than one row, padding included; None: that of `rows` untrimmed rows.
    tokens: int | None = None
    dynamic: bool = True  # unite equal rows, sort by length, pack by tokens, trim; else keep order, padding and `rows`
    skip_zero_advantage: bool = True  # skip rows without gradient
    share_prompts: bool = False  # compute a group's prompt once, where it pays; needs `dynamic`
    attention: float = 0.0  # `attention_cost` of the model
    multiple_of: int | None = None  # round trimmed widths up to a multiple
    checkpointing: bool = False  # of gradients: a prompt that waits for its completions then keeps less
    prompts_apart: bool = False  # as `SharedPrompts.apart`

    def plan(self, batch: Batch, max_over_ranks: Callable[[list[int]], list[int]] = list) -> list[Batch]:
        """The micro-batches of one optimizer step, at least one.

        Args:
            batch: this rank's rows of the step.
            max_over_ranks: maps the numbers of micro-batches in this rank's sets to the maxima over all ranks.
        """
        rows, trained = rows_of(batch), has_gradient(batch)
        kept = [
            row for row, is_trained in zip(rows, trained, strict=True) if is_trained or not self.skip_zero_advantage
        ]
        if self.dynamic and "sequence" in batch:
            kept = unite(kept, batch["sequence"].tolist())
        sets = as_on_every_rank(self._pack(kept, batch), max_over_ranks)
        width = None
        if not self.dynamic:
            width = Row(0, batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1], 0)
        found = [select_rows(batch, run, self.multiple_of, width) for run in sets[0]]
        if sets[1:]:
            batch = with_two_prompt_tokens(batch)
        return found + [shared for runs in sets[1:] for shared in self._on_shared_prompts(batch, runs)]

    def _pack(self, rows: list[Row], batch: Batch) -> list[list[list[Row]]]:
        """This rank's micro-batches in sets: first those of rows with prompts of their own, then of shared ones."""
        if not self.dynamic:
            return [[rows[start : start + self.rows] for start in range(0, len(rows), self.rows)]]
        budget = self.tokens or self.rows * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
        alone, together = self._by_sharing(rows)
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

    def _on_shared_prompts(self, batch: Batch, runs: list[list[Row]]) -> list[Batch]:
        """A set's micro-batches; those without rows have the set's shortest row, or the batch's, fully masked."""
        rows = [row for run in runs for row in run] or [shortest(rows_of(batch))]
        first = {row.group: row for row in rows}
        groups = sorted(first)
        width = Row(0, max(2, *(row.prompt for row in rows)), 1, 0)  # there is a prompt to compute, as on other ranks
        part = select_rows(batch, [first[group] for group in groups], self.multiple_of, width)
        shared = SharedPrompts(part["prompt_ids"], part["prompt_mask"], groups, len(runs), self.prompts_apart)
        found = []
        for run in runs:
            chosen = run or [shortest(rows)]
            lengths = [max(1, row.completion) for row in chosen]
            taken = select_rows(batch, chosen, self.multiple_of, dataclasses.replace(width, completion=max(lengths)))
            taken |= {"prompts": shared, "rows": Rows([row.group for row in chosen], lengths)}
            found.append(taken if run else masked(taken))
        return found
