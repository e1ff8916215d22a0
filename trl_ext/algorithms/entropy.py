"""`EntropyController`: the coefficient of an entropy bonus that keeps the policy's entropy near a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.algorithms.masking import masked_sum


@dataclass
class EntropyController:
    """Adapts the coefficient after each optimizer step (Skywork-OR1, arXiv:2505.22312, section 4), as TRL does.

    A step's bonus has the coefficient of the step before, and is off while the entropy is above the target. Coefficient
    and entropy are the caller's, so between two steps there is no state to keep here.
    """

    target: float  # nats per trained token
    delta: float
    lowest: float
    highest: float
    _sums: Tensor | None = None  # (2,) sum of the entropies of the step's trained tokens so far, and their number

    @torch.no_grad()
    def add(self, entropy: Tensor, trained: Tensor) -> None:
        """Count the tokens of a micro-batch: (B, T) entropies, and which of them are trained on."""
        sums = torch.stack([masked_sum(entropy, trained), trained.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self, coefficient: float, over_ranks: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """The next step's coefficient and this step's entropy: raised if that is at most the target, else lowered.

        Args:
            over_ranks: sums a tensor over the ranks.
        """
        assert self._sums is not None
        total, tokens = over_ranks(self._sums).tolist()
        entropy, self._sums = total / max(tokens, 1.0), None
        change = self.delta if entropy <= self.target else -self.delta
        return min(max(coefficient + change, self.lowest), self.highest), entropy
