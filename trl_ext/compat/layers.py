"""transformers' layers: the KV cache that they keep under gradient checkpointing, and attention within rows in one.

`GradientCheckpointingLayer` drops the cache while training, because a cache that grows would grow again when the layer
is recomputed. Layers of a cache that stays as it is may say so, with a flag that transformers has for its own models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLAG = "_can_checkpoint_with_cache"
# transformers has renamed it in all models at once, and drops the earlier name in 5.40.
CACHE = "cache" if "cache" in inspect.signature(Qwen3Model.forward).parameters else "past_key_values"


@contextmanager
def caches_kept() -> Iterator[None]:
    """Within, a checkpointed layer gets the cache. The cache must be the same before and after a forward pass."""
    with patch.object(GradientCheckpointingLayer, _FLAG, True):
        yield


def can_keep_caches(model: nn.Module) -> bool:
    """Whether `caches_kept` has an effect on this model's layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return bool(layers) and hasattr(GradientCheckpointingLayer, _FLAG)


class Lengths:
    """Of the rows that stand in one: a row's queries are its last tokens, and attend to earlier ones and themselves.

    Args:
        queries: of each row.
        keys: of each row, at least as many.
    """

    def __init__(self, queries: list[int], keys: list[int], device: torch.device) -> None:
        self.queries, self.keys = queries, keys
        self.seen = 0  # layers and their recomputations
        self.masks = [
            torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)[None, None]
            for n, m in zip(queries, keys, strict=True)
        ]
        self._added: dict[torch.dtype, list[Tensor]] = {}

    def added(self, dtype: torch.dtype) -> list[Tensor]:
        """The masks as what is added to scores: 0, or minus infinity."""
        if dtype not in self._added:
            self._added[dtype] = [torch.zeros_like(m, dtype=dtype).masked_fill_(~m, -torch.inf) for m in self.masks]
        return self._added[dtype]


def keys_with(lengths: Lengths, keys: Tensor) -> Tensor:
    """The same (1, heads, tokens, head size) keys, to which `by_row` attends by these lengths."""
    keys._row_lengths = lengths  # type: ignore[attr-defined]
    return keys


def by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' sdpa, but for keys of `keys_with` row by row."""
    lengths: Lengths | None = getattr(key, "_row_lengths", None)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    lengths.seen += 1
    if query.is_cpu and query.dtype == key.dtype == value.dtype and not kwargs.get("dropout"):
        return _ByRowOnCPU.apply(query, key, value, lengths, kwargs.get("scaling")).transpose(1, 2), None
    parts = query.split(lengths.queries, 2), key.split(lengths.keys, 2), value.split(lengths.keys, 2), lengths.masks
    rows = zip(*parts, strict=True)
    return torch.cat([sdpa_attention_forward(module, *row, **kwargs)[0] for row in rows], dim=1), None


class _ByRowOnCPU(torch.autograd.Function):
    """Attention row by row as one operation, that keeps five tensors and not six of each row.

    The rows go through PyTorch's kernel for CPUs, to which keys of fewer heads than the queries need not be repeated.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float | None
    ) -> Tensor:
        """(1, heads, tokens, head size), like the queries."""
        parts = query.split(lengths.queries, 2), key.split(lengths.keys, 2), value.split(lengths.keys, 2)
        rows = zip(*parts, lengths.added(query.dtype), strict=True)
        found = [_FORWARD(*row, attn_mask=mask, scale=scale) for *row, mask in rows]
        output, logsumexp = (torch.cat(part, dim=2) for part in zip(*found, strict=True))
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.lengths, ctx.scale = lengths, scale  # type: ignore[attr-defined]
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of queries, keys and values."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        n, m = ctx.lengths.queries, ctx.lengths.keys
        parts = zip((gradients[0], query, key, value, output, logsumexp), (n, n, m, m, n, n), strict=True)
        rows = zip(*(part.split(size, 2) for part, size in parts), ctx.lengths.added(query.dtype), strict=True)
        found = [_BACKWARD(*row, 0.0, False, attn_mask=mask, scale=ctx.scale) for *row, mask in rows]
        return *(torch.cat(part, dim=2) for part in zip(*found, strict=True)), None, None


def attend_by_row() -> None:
    """Have models with sdpa attention use `by_row`; for other keys nothing changes."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", by_row)
