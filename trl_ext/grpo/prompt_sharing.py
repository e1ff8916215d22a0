"""Log-probabilities of completions, with the prompt that a group has in common computed once, and with its gradient.

The prompts, less their last token, go through the decoder into a cache. Every micro-batch of their completions runs on
it, its keys and values indexed by row, behind the prompts' last tokens. Backward, the gradients of the cache add up
until the last of these micro-batches takes them through the prompts. Attention of a completion to its prompt is what it
is in one pass, so the result is the same but for rounding.

Letters: B rows of a micro-batch, U different prompts, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class SharedPrompts:
    """The prompts of some groups, computed when the first of their micro-batches needs them.

    Args:
        ids, mask: (U, L), padded on the left.
        groups: (U,), which group each prompt is of.
        micro_batches: how many will run on the prompts.
    """

    def __init__(self, ids: Tensor, mask: Tensor, groups: Tensor, micro_batches: int) -> None:
        self.ids, self.mask, self.groups, self.micro_batches = ids, mask, groups, micro_batches
        self._remaining = 0
        self._live: list[tuple[Tensor, Tensor]] = []  # per layer (U, heads, L - 1, head size), with the prompts' graph
        self._leaves: list[tuple[Tensor, Tensor]] = []  # the same numbers, where gradients add up

    def cache(self, decoder: Any, group: Tensor) -> DynamicCache:
        """What the decoder has to know of the rows' prompts; to be asked for once per micro-batch.

        Args:
            decoder: what in the model maps tokens to hidden states.
            group: (B,), of each row.
        """
        cache = DynamicCache(config=decoder.config)
        if self.ids.shape[1] == 1:
            return cache
        if not self._remaining:
            self._compute(decoder)
        self._remaining -= 1
        last = not self._remaining
        which = torch.searchsorted(self.groups, group)
        for layer, (live, leaf) in enumerate(zip(self._live, self._leaves, strict=True)):
            pairs = zip(live, leaf, strict=True)
            keys, values = (_WithEarlierGradients.apply(a, b) if last else b for a, b in pairs)
            cache.update(keys[which], values[which], layer)
        if last:
            self._live, self._leaves = [], []
        return cache

    def _compute(self, decoder: Any) -> None:
        cache = DynamicCache(config=decoder.config)
        decoder(input_ids=self.ids[:, :-1], attention_mask=self.mask[:, :-1], past_key_values=cache, use_cache=True)
        self._live = [(layer.keys, layer.values) for layer in cache.layers]
        training = torch.is_grad_enabled()
        self._leaves = [
            (keys.detach().requires_grad_(training), values.detach().requires_grad_(training))
            for keys, values in self._live
        ]
        self._remaining = self.micro_batches


class _WithEarlierGradients(torch.autograd.Function):
    """`live` as it is; backward, with the gradient that earlier micro-batches left in `leaf`."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return live.view_as(live)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), earlier = gradients, ctx.leaf.grad
        ctx.leaf = None
        return gradient if earlier is None else gradient + earlier, None


def completion_log_probs(
    model: Any,
    cache: DynamicCache,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the completions' tokens, 0 where `completion_mask` is 0.

    Args:
        model: with TRL's fused head, in the wrapper of its backend.
        cache: of the rows' prompts but for the last token.
        prompt_ids, prompt_mask: (B, L), padded on the left, as wide as the cache's and its last token.
        completion_ids, completion_mask: (B, T), padded on the right.
    """
    outputs = model(
        input_ids=torch.cat([prompt_ids[:, -1:], completion_ids[:, :-1]], dim=1),
        attention_mask=torch.cat([prompt_mask, completion_mask[:, :-1]], dim=1),
        past_key_values=cache,
        shift_labels=completion_ids.masked_fill(completion_mask == 0, -100),
        fused_lm_head=True,
    )
    return outputs.log_probs, outputs.entropy
