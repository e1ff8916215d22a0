"""Attention within rows of different lengths that stand in one, by one kernel for all of them where there is one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ON_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# What torch.nn.attention.varlen calls; that module's own functions take keys of fewer heads only since torch 2.12.
_ON_GPU = torch.ops.aten._flash_attention_forward
_ON_GPU_BACKWARD = torch.ops.aten._flash_attention_backward
_HEAD_SIZES = range(8, 257, 8)  # that FlashAttention has kernels for
_as_on_gpu = False  # whether a CPU stands in for a GPU, see `attention_as_on_gpu`


class Lengths:
    """Of the rows that stand in one: a row's queries are its last tokens, and attend to earlier ones and themselves.

    Args:
        queries: of each row.
        keys: of each row, at least as many.
    """

    def __init__(self, queries: list[int], keys: list[int], device: torch.device) -> None:
        self.queries, self.keys, self.device = queries, keys, device
        self.seen = 0  # layers and their recomputations
        self._added: dict[torch.dtype, list[Tensor]] = {}

    @functools.cached_property
    def masks(self) -> list[Tensor]:
        """Of each row, (1, 1, queries, keys): whether a query attends to a key."""
        pairs = zip(self.queries, self.keys, strict=True)
        return [torch.ones(n, m, dtype=torch.bool, device=self.device).tril(m - n)[None, None] for n, m in pairs]

    @functools.cached_property
    def starts(self) -> tuple[Tensor, Tensor]:
        """(rows + 1,) each row's first query and first key, and how many there are."""
        sums = ([0, *itertools.accumulate(sizes)] for sizes in (self.queries, self.keys))
        queries, keys = (torch.tensor(places, dtype=torch.int32, device=self.device) for places in sums)
        return queries, keys

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
    query, key, value = in_autocast_dtype(query, key, value)
    if (one := kernel_of_rows(query, key, value)) and not kwargs.get("dropout"):
        return one.apply(query, key, value, lengths, kwargs.get("scaling")).transpose(1, 2), None
    parts = query.split(lengths.queries, 2), key.split(lengths.keys, 2), value.split(lengths.keys, 2), lengths.masks
    rows = zip(*parts, strict=True)
    return torch.cat([sdpa_attention_forward(module, *row, **kwargs)[0] for row in rows], dim=1), None


def in_autocast_dtype(*parts: Tensor) -> list[Tensor]:
    """In autocast's dtype, as it casts what sdpa is given."""
    kind = parts[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(parts)
    dtype = torch.get_autocast_dtype(kind)
    return [part if part.dtype == torch.float64 else part.to(dtype) for part in parts]


def kernel_of_rows(query: Tensor, key: Tensor, value: Tensor) -> type[_ByRowOnCPU] | type[_ByRowOnGPU] | None:
    """What attends within all rows by one operation for such tensors, or None."""
    if not query.dtype == key.dtype == value.dtype:
        return None
    if query.is_cpu and not _as_on_gpu:
        return _ByRowOnCPU
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return (
        _ByRowOnGPU
        if is_half and query.shape[-1] in _HEAD_SIZES and (_as_on_gpu or _has_flash_attention(query.device))
        else None
    )


@contextmanager
def attention_as_on_gpu() -> Iterator[None]:
    """In the block rows in one are attended to as on a GPU with these kernels: for tensors without values."""
    global _as_on_gpu
    _as_on_gpu = True
    try:
        yield
    finally:
        _as_on_gpu = False


@functools.cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether this GPU has the kernels for rows of any lengths that come with PyTorch."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


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
        outputs_of_rows = [_ON_CPU(*row, attn_mask=mask, scale=scale) for *row, mask in rows]
        output, logsumexp = (torch.cat(part, dim=2) for part in zip(*outputs_of_rows, strict=True))
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
        gradients_of_rows = [_ON_CPU_BACKWARD(*row, 0.0, False, attn_mask=mask, scale=ctx.scale) for *row, mask in rows]
        return *(torch.cat(part, dim=2) for part in zip(*gradients_of_rows, strict=True)), None, None


class _ByRowOnGPU(torch.autograd.Function):
    """The same by FlashAttention's kernel for rows of any lengths, all of them at once and without masks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, scale: float | None
    ) -> Tensor:
        """(1, heads, tokens, head size), like the queries."""
        given = [part[0].transpose(0, 1) for part in (query, key, value)]  # (tokens, heads, head size)
        # A query's last key is as far from the row's end as itself: FlashAttention's causal mask, at the lower right.
        output, logsumexp, *_ = _ON_GPU(*given, *_places(lengths), 0.0, True, False, scale=scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.lengths, ctx.scale = lengths, scale  # type: ignore[attr-defined]
        return output.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of queries, keys and values."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        given = [part[0].transpose(0, 1) for part in (gradients[0], query, key, value)]
        of_dropout = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)  # its random state, without effect
        places = _places(ctx.lengths)
        of_inputs = _ON_GPU_BACKWARD(*given, output, logsumexp, *places, 0.0, True, *of_dropout, scale=ctx.scale)
        return *(part.transpose(0, 1)[None] for part in of_inputs), None, None


def _places(lengths: Lengths) -> tuple[Tensor, Tensor, int, int]:
    """Rows as FlashAttention takes them: where each starts, and the most queries and keys of one."""
    return *lengths.starts, max(lengths.queries), max(lengths.keys)
