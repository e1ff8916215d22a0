"""Metrics of an optimizer step from per-token quantities of its micro-batches, over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


class StepMetrics:
    """Sums and maxima, accumulated over the micro-batches of a step and reduced over the ranks once at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> (sum, count)
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], mask: Tensor) -> None:
        """Accumulate the unmasked entries of (B, T) quantities."""
        count = mask.sum().double()
        for name, value in values.items():
            pair = torch.stack([value[mask].double().sum(), count])
            self._sums[name] = self._sums.get(name, 0) + pair

    @torch.no_grad()
    def add_mismatch(self, old_logp: Tensor, sampled: Tensor, mask: Tensor) -> None:
        """Accumulate the distance of the engine's log-probabilities from the trainer's, under TRL's names."""
        difference, known = (old_logp - sampled).abs(), mask & ~sampled.isnan()
        self.add({"sampling/sampling_logp_difference/mean": difference}, known)
        self.add_max("sampling/sampling_logp_difference/max", difference[known])

    @torch.no_grad()
    def add_max(self, name: str, values: Tensor) -> None:
        """Accumulate the maximum of values."""
        largest = values.max() if values.numel() else values.new_full((), -torch.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def finish(self, accelerator: Accelerator, counts: dict[str, float]) -> dict[str, float]:
        """Means and maxima over all ranks, which must have the same names; then reset for the next step.

        A quantity without any unmasked token is left out.

        Args:
            counts: divisors by name in place of the number of accumulated tokens, such as the tokens of the whole step.
        """
        found: dict[str, float] = {}
        if self._sums:
            totals = accelerator.reduce(torch.stack(list(self._sums.values())), reduction="sum").tolist()
            for name, (total, count) in zip(self._sums, totals, strict=True):
                if counts.get(name, count):
                    found[name] = total / counts.get(name, count)
        if self._maxima:
            largest = accelerator.gather(torch.stack(list(self._maxima.values()))[None]).amax(dim=0).tolist()
            found |= {name: value for name, value in zip(self._maxima, largest, strict=True) if value > -torch.inf}
        self._sums, self._maxima = {}, {}
        return found
