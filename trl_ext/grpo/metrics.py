"""Per-token quantities of an optimizer step's micro-batches -> one figure each, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StepMetrics:
    """Sums and maxima that grow with the micro-batches of a step, and are reduced over the ranks once at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> (sum, count)
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], mask: Tensor) -> None:
        """Take the unmasked entries of (B, T) quantities in."""
        count = mask.sum().double()
        for name, value in values.items():
            pair = torch.stack([value[mask].double().sum(), count])
            self._sums[name] = self._sums.get(name, 0) + pair

    @torch.no_grad()
    def add_max(self, name: str, values: Tensor) -> None:
        """Take values in whose largest is asked for."""
        largest = values.max() if values.numel() else values.new_full((), -torch.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def finish(self, accelerator: Any, counts: dict[str, float]) -> dict[str, float]:
        """Means and maxima over all ranks, which must all have the same names; starts anew.

        What was measured on no token has no mean and no maximum, and is not among them.

        Args:
            counts: what to divide by instead of the tokens taken in, such as those of all rows of the step.
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
