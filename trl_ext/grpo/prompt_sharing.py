"""Log-probabilities of completions with each group's prompt computed once, forward and backward.

The prompts, except their last tokens, go through the decoder into a KV cache. Every micro-batch of their completions
runs on this cache, with keys and values indexed by row. In the backward pass, gradients of the cache accumulate until
the last of these micro-batches propagates them through the prompts. Completions attend to their prompts as in a single
pass, so the result is the same up to rounding.

Letters: B rows of a micro-batch, U different prompts, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Context(Protocol):
    """Of `_WithEarlierGradients`."""

    leaf: Tensor


class SharedPrompts:
    """The prompts of some groups, computed for the first of their micro-batches.

    Args:
        ids, mask: (U, L), padded on the left.
        groups: (U,) each prompt's group, ascending.
        micro_batches: the number of micro-batches that use these prompts.
    """

    def __init__(self, ids: Tensor, mask: Tensor, groups: Tensor, micro_batches: int) -> None:
        self.ids, self.mask, self.groups, self.micro_batches = ids, mask, groups, micro_batches
        self._remaining = 0
        self._live: list[tuple[Tensor, Tensor]] = []  # per layer (U, heads, L - 1, head size), with the prompts' graph
        self._leaves: list[tuple[Tensor, Tensor]] = []  # detached copies that accumulate gradients

    def cache(self, decoder: PreTrainedModel, group: Tensor) -> DynamicCache:
        """The prompts' KV cache for these rows. Call once per micro-batch.

        Args:
            decoder: the part of the model that maps tokens to hidden states.
            group: (B,) each row's group.
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

    def _compute(self, decoder: PreTrainedModel) -> None:
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
    """The identity of `live`, whose gradient adds what earlier micro-batches accumulated in `leaf`."""

    @staticmethod
    def forward(ctx: _Context, live: Tensor, leaf: Tensor) -> Tensor:
        ctx.leaf = leaf
        return live.view_as(live)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), earlier = gradients, ctx.leaf.grad
        del ctx.leaf
        return gradient if earlier is None else gradient + earlier, None


def completion_log_probs(
    model: nn.Module,
    cache: DynamicCache,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the completions' tokens, 0 where `completion_mask` is 0.

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        cache: of the rows' prompts without their last tokens.
        prompt_ids, prompt_mask: (B, L), padded on the left to the cache's length plus one.
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
