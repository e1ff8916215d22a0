"""Log-probabilities of completions with each group's prompt computed once, forward and backward.

The prompts, except their last tokens, go through the decoder, and every layer's keys and values are recorded. Each
micro-batch of their completions attends to these, selected by row. In the backward pass, their gradients are summed up
until the last of these micro-batches has added its own; then the sum is propagated through the prompts. Completions
attend to their prompts as in a single pass, so the result is the same up to rounding.

Where a backend reduces gradients, it is told of a parameter's once per micro-batch, so the last one's backward pass
continues through the prompts. Until it gets there, autograd keeps the completions' gradients of all parameters apart:
another copy of the gradients. In a single process the prompts have a backward pass of their own, without that copy.

Both passes give the decoder a cache that no forward pass changes, so gradient checkpointing can recompute any layer:
a prompt's once per set of groups, a completion's once.

Letters: B rows of a micro-batch, U different prompts, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from trl_ext.compat.checkpointing import CACHE, caches_kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SharedPrompts:
    """The prompts of some groups, computed for the first of their micro-batches.

    Args:
        ids, mask: (U, L), at least two wide, padded on the left.
        groups: (U,) each prompt's group, ascending.
        micro_batches: the number of micro-batches that use these prompts.
        apart: the prompts' backward pass is `backward`, not a part of the last micro-batch's.
    """

    def __init__(self, ids: Tensor, mask: Tensor, groups: Tensor, micro_batches: int, apart: bool = False) -> None:
        self.ids, self.mask, self.groups, self.micro_batches, self.apart = ids, mask, groups, micro_batches, apart
        self._remaining = 0
        self._parts: list[tuple[_Shared, _Shared]] = []  # keys and values of each layer

    def cache(self, decoder: PreTrainedModel, group: Tensor) -> Cache:
        """The prompts' keys and values for these rows. Call once per micro-batch.

        Args:
            decoder: the part of the model that maps tokens to hidden states.
            group: (B,) each row's group.
        """
        if not self._remaining:
            self._compute(decoder)
        self._remaining -= 1
        last = not self._remaining
        which = torch.searchsorted(self.groups, group)
        joined = last and not self.apart
        cache = Cache(layers=[_AfterPrompts(keys, values, which, joined) for keys, values in self._parts])
        if joined or (last and not torch.is_grad_enabled()):
            self._parts = []
        return cache

    def backward(self) -> None:
        """Call after each micro-batch's backward pass; after the last one, if `apart`, the prompts have theirs."""
        if self._parts and not self._remaining:
            parts = [part for layer in self._parts for part in layer if part.live.requires_grad]  # not below an adapter
            self._parts = []
            if parts:
                torch.autograd.backward([part.live for part in parts], [part.of_live() for part in parts])

    def _compute(self, decoder: PreTrainedModel) -> None:
        layers = [_Recorder() for _ in range(decoder.config.get_text_config().num_hidden_layers)]
        with caches_kept():
            decoder(
                input_ids=self.ids[:, :-1],
                attention_mask=self.mask[:, :-1],
                use_cache=False,  # the layers use it all the same
                **{CACHE: Cache(layers=layers)},
            )
        recorded = [layer.recorded for layer in layers if layer.recorded]
        if len(recorded) < len(layers):
            raise ValueError(
                f"share_prompt_prefix=True: {len(layers) - len(recorded)} of {len(layers)} layers of "
                f"{type(decoder).__name__} do not use the cache that they get; set share_prompt_prefix: false"
            )
        # Autograd runs later operations first: casts that completions took over from here would be differentiated at
        # the end of their backward pass, and until then another copy of the gradients would be kept.
        torch.clear_autocast_cache()
        self._parts = [(_Shared(keys), _Shared(values)) for keys, values in recorded]
        self._remaining = self.micro_batches


class _Shared:
    """Keys or values of a layer, and the gradient that its micro-batches have added so far.

    Args:
        live: (U, heads, L - 1, head size), with the prompts' graph.
    """

    def __init__(self, live: Tensor) -> None:
        self.live = live
        self.gradient: Tensor | None = None

    def of_live(self) -> Tensor:
        """The sum so far, in the dtype of `live`."""
        assert self.gradient is not None
        return self.gradient.to(self.live.dtype)

    def add(self, which: Tensor, gradient: Tensor) -> None:
        """Add the gradient of the rows of a micro-batch to the sum, in float32 or float64.

        Args:
            which: (B,) each row's prompt.
            gradient: (B, heads, L - 1, head size).
        """
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.live, dtype=dtype)
        if self.gradient.device.type == "cpu":  # where `index_put_` adds rows in an arbitrary order
            self.gradient.index_add_(0, which, gradient.to(dtype))
        else:
            self.gradient.index_put_((which,), gradient.to(dtype), accumulate=True)


class _Recorder(DynamicLayer):
    """A layer's cache that stays empty, and keeps a reference to the first keys and values that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The same keys and values; a recomputation's are not recorded."""
        self.recorded = self.recorded or (key_states, value_states)
        return key_states, value_states


class _AfterPrompts(DynamicLayer):
    """A layer's cache that puts the rows' prompts before what it is given, and stays as it is."""

    def __init__(self, keys: _Shared, values: _Shared, which: Tensor, joined: bool) -> None:
        super().__init__()
        self._shared, self._which, self._joined = (keys, values), which, joined

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """(B, heads, L - 1 + T, head size) keys and values."""
        keys, values = (
            _Concatenated.apply(own, shared.live if self._joined else shared.live.detach(), self._which, shared)
            for own, shared in zip((key_states, value_states), self._shared, strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        """L - 1."""
        return self._shared[0].live.shape[-2]


class _Context(Protocol):
    """Of `_Concatenated`."""

    shared: _Shared
    saved_tensors: tuple[Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward pass."""


class _Concatenated(torch.autograd.Function):
    """Each row's prompt, then its own keys or values; the prompts get the gradient of all their micro-batches."""

    @staticmethod
    def forward(ctx: _Context, own: Tensor, prompts: Tensor, which: Tensor, shared: _Shared) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(which)
        return torch.cat([prompts.index_select(0, which), own], dim=-2)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (gradient,), (which,), shared = gradients, ctx.saved_tensors, ctx.shared
        length = shared.live.shape[-2]
        shared.add(which, gradient[..., :length, :])
        return gradient[..., length:, :], shared.of_live() if ctx.needs_input_grad[1] else None, None, None


def completion_log_probs(
    model: nn.Module,
    cache: Cache,
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
    with caches_kept():
        outputs = model(
            input_ids=torch.cat([prompt_ids[:, -1:], completion_ids[:, :-1]], dim=1),
            attention_mask=torch.cat([prompt_mask, completion_mask[:, :-1]], dim=1),
            shift_labels=completion_ids.masked_fill(completion_mask == 0, -100),
            fused_lm_head=True,
            **{CACHE: cache},
        )
    return outputs.log_probs, outputs.entropy
