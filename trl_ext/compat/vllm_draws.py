"""Drawing a token on a CPU: one random number for each request, where vLLM draws one for each word of the vocabulary.

vLLM 0.31 divides the probabilities by exponential numbers and takes the largest quotient, since a GPU is quick at that.
A CPU draws them one after the other, and twice where requests have seeds: for 64 requests and 151,936 words 0.6 s on
two cores, which is what a pass of a model of 0.5 billion parameters takes there.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1024  # words that are summed before any of them is looked at


def draw_by_cumulative_sums() -> None:
    """Let the engines that this process starts on its CPU draw so where every request of a batch has a seed."""
    module: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    theirs = module.TopKTopPSampler.forward_cpu
    if theirs.__name__ == "seeded_or_theirs":
        return

    def seeded_or_theirs(
        self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if len(generators) < len(logits):
            unseeded: tuple[Tensor, Tensor | None] = theirs(self, logits, generators, k, p)
            return unseeded
        logits = module.apply_top_k_top_p(logits, k, p)
        shown = {"processed_logits": logits.clone, "processed_logprobs": lambda: logits.log_softmax(-1, torch.float32)}
        uniform = [torch.rand(1, generator=generators[i], dtype=torch.float64) for i in range(len(logits))]
        drawn = inverse_of_cumulative(logits.softmax(-1, torch.float32), torch.cat(uniform))
        return drawn, shown[self.logprobs_mode]() if self.logprobs_mode in shown else None

    module.TopKTopPSampler.forward_cpu = seeded_or_theirs


def inverse_of_cumulative(weights: Tensor, uniform: Tensor) -> Tensor:
    """For each row the first entry at which the cumulative sum, over its total, is above a number of [0, 1).

    A uniform number makes it a sample; an entry of weight 0 is none.

    Args:
        weights: (rows, entries), at least 0, and above it somewhere in each row.
        uniform: (rows,), float64.

    Returns:
        (rows,), int64.
    """
    blocks = torch.nn.functional.pad(weights, (0, -weights.size(1) % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _first_above(sums, uniform * sums.sum(-1))
    entries = blocks[torch.arange(len(blocks)), block].double()
    return block * _BLOCK + _first_above(entries, rest)[0]


def _first_above(weights: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sums (rows, n) first exceed limits (rows,), and what of a limit is left there."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    limit = limit.minimum(total.nextafter(torch.zeros_like(total)))  # rounding must not lead beyond the last weight
    place = torch.searchsorted(cumulative, limit[:, None], right=True)
    before = (cumulative - weights).gather(1, place)[:, 0]
    return place[:, 0], (limit - before).clamp(min=0)
