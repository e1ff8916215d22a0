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

A micro-batch's completions stand in one row without padding, which attention takes apart.

Letters: B rows of a micro-batch, N tokens of theirs, U different prompts, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from trl_ext.compat.layers import CACHE, attend_by, caches_kept
from trl_ext.compat.weight_casts import casts_made_again
from trl_ext.step.attention import Lengths, by_row, keys_with
from trl_ext.step.contiguous import VALUES


@dataclass(frozen=True)
class Completions:
    """Completions of a micro-batch, in its order."""

    groups: list[int]
    lengths: list[int]  # tokens, at least 1


class SharedPrompts:
    """The prompts of some groups, computed for the first of their micro-batches.

    Args:
        ids, mask: (U, L), at least two wide, padded on the left.
        groups: each prompt's group.
        micro_batches: the number of micro-batches that use these prompts.
        separate_backward: the prompts' backward pass is `backward`, not a part of the last micro-batch's.
    """

    def __init__(
        self, ids: Tensor, mask: Tensor, groups: list[int], micro_batches: int, separate_backward: bool = False
    ) -> None:
        self.ids, self.mask, self.micro_batches, self.separate_backward = ids, mask, micro_batches, separate_backward
        self.groups = groups
        self.lengths = mask[:, :-1].sum(dim=1).tolist()
        self._remaining = 0
        self._parts: list[tuple[_Shared, _Shared]] = []  # keys and values of each layer

    def cache(self, decoder: PreTrainedModel, completions: Completions) -> Cache:
        """The prompts' keys and values for these rows. Call once per micro-batch.

        Args:
            decoder: the part of the model that maps tokens to hidden states.
            completions: of the micro-batch.
        """
        if not self._remaining:
            self._compute(decoder)
        self._remaining -= 1
        last = not self._remaining
        joined = last and not self.separate_backward
        prompts = [self.groups.index(group) for group in completions.groups]
        before = [self.lengths[prompt] for prompt in prompts]
        keys = [n + m for n, m in zip(before, completions.lengths, strict=True)]
        layout = _PromptLayout(prompts, before, Lengths(completions.lengths, keys, self.ids.device))
        cache = Cache(layers=[_AfterPrompts(*parts, layout, joined) for parts in self._parts])
        if joined or (last and not torch.is_grad_enabled()):
            self._parts = []
        return cache

    def backward(self) -> None:
        """Call after each micro-batch's backward pass; after the last, if `separate_backward`, prompts have theirs."""
        if self._parts and not self._remaining:
            parts = [part for layer in self._parts for part in layer if part.live.requires_grad]  # not below an adapter
            self._parts = []
            if parts:
                torch.autograd.backward([part.live for part in parts], [part.of_live() for part in parts])

    def _compute(self, decoder: PreTrainedModel) -> None:
        layers = [_Recorder() for _ in range(decoder.config.get_text_config().num_hidden_layers)]
        # The prompts' graph outlives several micro-batches, each of which has copies of the weights as well.
        with caches_kept(), casts_made_again():
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

    def add(self, prompts: Sequence[int], gradients: Iterable[Tensor]) -> None:
        """Add the gradients of the rows of a micro-batch to the sum, in float32 or float64.

        Args:
            prompts: each row's.
            gradients: each row's, (1, heads, tokens of its prompt, head size).
        """
        if self.gradient is None:
            dtype = torch.promote_types(self.live.dtype, torch.float32)
            self.gradient = torch.zeros_like(self.live, dtype=dtype)
        for prompt, gradient in zip(prompts, gradients, strict=True):
            if n := gradient.shape[2]:
                self.gradient[prompt : prompt + 1, :, -n:] += gradient


@dataclass(frozen=True)
class _PromptLayout:
    """Rows of a micro-batch on their prompts: each one's, the number of its tokens in the cache, and all lengths."""

    prompts: list[int]
    before: list[int]
    lengths: Lengths

    def cut(self, gradient: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """(1, heads, keys, head size) of all rows -> each row's, of its prompt and of its own."""
        sizes = [n for pair in zip(self.before, self.lengths.queries, strict=True) for n in pair]
        parts = gradient.split(sizes, 2)
        return list(parts[::2]), list(parts[1::2])


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

    def __init__(self, keys: _Shared, values: _Shared, layout: _PromptLayout, joined: bool) -> None:
        super().__init__()
        self._shared, self.layout, self._joined = (keys, values), layout, joined

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """(1, heads, N and the rows' prompt tokens, head size) keys and values."""
        keys, values = (
            _Concatenated.apply(own, shared.live if self._joined else shared.live.detach(), self.layout, shared)
            for own, shared in zip((key_states, value_states), self._shared, strict=True)
        )
        return keys_with(self.layout.lengths, keys), values

    def get_seq_length(self) -> int:
        """As if there were nothing before, so that the model makes no mask."""
        return 0


class _Concatenated(torch.autograd.Function):
    """Each row's prompt, then its own keys or values; the prompts get the gradient of all their micro-batches."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, prompts: Tensor, layout: _PromptLayout, shared: _Shared) -> Tensor:
        ctx.layout, ctx.shared = layout, shared
        width, parts = prompts.shape[2], []
        for prompt, n, row in zip(layout.prompts, layout.before, own.split(layout.lengths.queries, 2), strict=True):
            parts += [prompts[prompt : prompt + 1, :, width - n :], row]
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        of_prompts, own = ctx.layout.cut(gradients[0])
        ctx.shared.add(ctx.layout.prompts, of_prompts)
        return torch.cat(own, dim=2), ctx.shared.of_live() if ctx.needs_input_grad[1] else None, None, None


def completion_log_probs(
    model: Callable[..., Any],
    cache: Cache,
    prompt_ids: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    completions: Completions,
    values: Sequence[str] = VALUES,
) -> tuple[Tensor, ...]:
    """(B, T, ...) values of the completions' tokens, 0 where `completion_mask` is 0.

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        cache: of the rows' prompts without their last tokens.
        prompt_ids: (B, L), padded on the left.
        completion_ids, completion_mask: (B, T), padded on the right.
        completions: of the micro-batch.
        values: of the model's output, which has one for each position.

    Raises:
        ValueError: the model's attention is not told of the rows.
    """
    width = prompt_ids.shape[1] - 1
    ids = torch.cat([prompt_ids[:, -1:], completion_ids[:, :-1]], dim=1)
    positions = torch.arange(width, width + ids.shape[1], device=ids.device).expand_as(ids)
    labels = completion_ids.masked_fill(completion_mask == 0, -100)

    def in_one(values: Tensor) -> Tensor:  # (1, N)
        return torch.cat([row[:n] for row, n in zip(values, completions.lengths, strict=True)])[None]

    attend_by(by_row)
    with caches_kept():
        outputs = model(
            input_ids=in_one(ids),
            position_ids=in_one(positions),
            attention_mask=None,
            shift_labels=in_one(labels),
            fused_lm_head=True,
            **{CACHE: cache},
        )
    lengths = cache.layers[0].layout.lengths
    if lengths.seen < len(cache.layers):
        raise ValueError(
            f"share_prompt_prefix=True: {len(cache.layers) - lengths.seen} of {len(cache.layers)} layers do not call "
            "transformers' sdpa attention with the keys of their cache; set share_prompt_prefix: false"
        )
    missing = ids.shape[1] - max(completions.lengths)

    def in_rows(found: Tensor) -> Tensor:  # (1, N, ...) -> (B, T, ...)
        rows = pad_sequence(found[0].split(completions.lengths), batch_first=True)
        return nn.functional.pad(rows, (0, 0) * (rows.ndim - 2) + (0, missing))

    return tuple(in_rows(getattr(outputs, name)) for name in values)
