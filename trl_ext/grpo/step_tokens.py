"""The tokens of a whole optimizer step, for a policy loss that asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl_ext.algorithms.types import StepTokens
from trl_ext.grpo.batching import Batch, loss_mask

if TYPE_CHECKING:
    from accelerate import Accelerator


_LONGEST = 2**32  # more tokens than a completion has


@torch.no_grad()
def tokens_of_step(
    batches: Sequence[Batch], log_probs: Callable[[Batch], Tensor], accelerator: Accelerator
) -> list[StepTokens]:
    """The step as each of this rank's micro-batches sees it, in their order. A collective operation.

    Args:
        batches: this rank's micro-batches of the step, as many as on any rank.
        log_probs: computes a micro-batch's (B, T) log-probabilities under the current policy.
    """
    masks, parts, keys = [loss_mask(batch) for batch in batches], [], []
    for batch, mask in zip(batches, masks, strict=True):
        logp = log_probs(batch)
        values = (logp, batch.get("old_per_token_logps", logp), batch["advantages"].view(len(mask), -1).expand_as(mask))
        parts.append(torch.stack([value[mask].to(logp.dtype) for value in values], dim=1))
        row = batch["row"] if "row" in batch else torch.zeros(len(mask), dtype=torch.long, device=mask.device)
        keys.append((row[:, None] * _LONGEST + torch.arange(mask.shape[1], device=mask.device))[mask])
    order = torch.cat(keys).argsort()  # by row of the rollout
    own = torch.cat(parts)[order]  # (tokens of this rank, 3)
    counts = accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
    padded = accelerator.gather(torch.nn.functional.pad(own, (0, 0, 0, max(counts) - len(own))))
    every = torch.cat([rows[:n] for rows, n in zip(padded.split(max(*counts, 1)), counts, strict=False)])
    logp, old_logp, advantage = every.unbind(dim=1)
    places, found = order.argsort() + sum(counts[: accelerator.process_index]), []
    for mask, own_places in zip(masks, places.split([len(part) for part in parts]), strict=True):
        place = torch.full(mask.shape, -1, device=mask.device)
        place[mask] = own_places
        found.append(StepTokens(logp, old_logp, advantage, place))
    return found
