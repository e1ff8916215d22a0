"""Metrics of an optimizer step from per-token quantities of its micro-batches, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


# Metrics that are no mean over tokens, from the means that are accumulated under their names. The effective sample size
# is a fraction of the tokens, Kong 1992; chi-square is the divergence of the trainer's tokens from the sampler's.
_OF_MEANS: dict[str, Callable[[dict[str, float]], float]] = {
    "sampling/perplexity_trainer": lambda means: math.exp(means["sampling/perplexity_trainer"]),
    "sampling/perplexity_sampler": lambda means: math.exp(means["sampling/perplexity_sampler"]),
    "sampling/chi_square": lambda means: means["sampling/chi_square"] - 1,
    "sampling/effective_sample_size": lambda means: (
        means["sampling/weight_mean"] ** 2 / max(means["sampling/effective_sample_size"], 1e-30)
    ),
}


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
    def add_logp_difference(self, old_logp: Tensor, sampled: Tensor, mask: Tensor) -> None:
        """Accumulate the distance of the engine's log-probabilities from the trainer's, under TRL's names."""
        difference, known = (old_logp - sampled).abs(), mask & ~sampled.isnan()
        self.add({"sampling/sampling_logp_difference/mean": difference}, known)
        self.add_max("sampling/sampling_logp_difference/max", difference[known])

    @torch.no_grad()
    def add_mismatch(self, old_logp: Tensor, sampled: Tensor, mask: Tensor, weight: Tensor, max_tokens: int) -> None:
        """Accumulate how far the engine is from the trainer, and what the correction leaves of the tokens.

        Args:
            weight: (B, T) of the policy loss, 0 where a token is left out.
            max_tokens: the maximum completion length, in whose quarters the tokens left out are counted.
        """
        known, ratio = mask & ~sampled.isnan(), (old_logp - sampled).double().exp()
        per_token = {"perplexity_trainer": -old_logp, "perplexity_sampler": -sampled, "chi_square": ratio.square()}
        self.add({f"sampling/{name}": value for name, value in per_token.items()}, known)
        self.add({"sampling/weight_mean": weight, "sampling/effective_sample_size": weight.square()}, mask)
        length = mask.sum(dim=1, keepdim=True)
        for quarter in range(4):
            inside = (4 * (length - 1) // max_tokens).clamp(0, 3) == quarter
            self.add({f"sampling/masked_frac_length_{quarter + 1}": (weight == 0).float()}, mask & inside)

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
        found |= {name: of_mean(found) for name, of_mean in _OF_MEANS.items() if name in found}
        if self._maxima:
            largest = accelerator.gather(torch.stack(list(self._maxima.values()))[None]).amax(dim=0).tolist()
            found |= {name: value for name, value in zip(self._maxima, largest, strict=True) if value > -torch.inf}
        self._sums, self._maxima = {}, {}
        return found
