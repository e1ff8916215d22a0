"""(B, T) losses -> this micro-batch's part of the optimizer step's loss.

Every member divides by totals of the whole step, so the parts of all micro-batches of all ranks add up to the same
number, independently of the division into micro-batches and of the padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.algorithms.masking import masked_sum
from trl_ext.algorithms.types import StepTotals
from trl_ext.registry import Registry


def _fault(aggregation: Callable[[Tensor, Tensor, StepTotals], Tensor], rows: int) -> str | None:
    mask = torch.ones(rows, 3, dtype=torch.bool)  # (B, T)
    loss = aggregation(torch.ones(rows, 3), mask, StepTotals(rows, 3 * rows, 3))
    return None if isinstance(loss, Tensor) and loss.ndim == 0 else "must return a tensor of one number"


AGGREGATIONS = Registry("aggregation", _fault)


@AGGREGATIONS.register
def sequence_mean(loss: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Mean over the tokens of a sequence, then over sequences: the handout's `masked_mean`, GRPO's 1/|o_i|.

    A sequence without unmasked tokens adds 0 and still counts as a sequence.
    """
    per_sequence = masked_sum(loss, mask, dim=1) / mask.sum(dim=1).clamp(min=1)  # (B,)
    return per_sequence.sum() / totals.sequences


@AGGREGATIONS.register
def constant(loss: Tensor, mask: Tensor, totals: StepTotals, *, normalize_constant: float | None = None) -> Tensor:
    """Sum over tokens divided by a constant, mean over sequences: the handout's `masked_normalize`.

    Dr. GRPO (arXiv:2503.20783). The constant is the sampler's maximum number of tokens unless given.
    """
    divisor = totals.max_tokens if normalize_constant is None else normalize_constant
    return masked_sum(loss, mask) / (divisor * totals.sequences)


@AGGREGATIONS.register
def token_mean(loss: Tensor, mask: Tensor, totals: StepTotals) -> Tensor:
    """Mean over all unmasked tokens of the optimizer step. DAPO (arXiv:2503.14476, section 3.3)."""
    return masked_sum(loss, mask) / max(totals.tokens, 1.0)
