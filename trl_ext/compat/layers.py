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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

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
    parts = query.split(lengths.queries, 2), key.split(lengths.keys, 2), value.split(lengths.keys, 2), lengths.masks
    rows = zip(*parts, strict=True)
    return torch.cat([sdpa_attention_forward(module, *row, **kwargs)[0] for row in rows], dim=1), None


def attend_by_row() -> None:
    """Have models with sdpa attention use `by_row`; for other keys nothing changes."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", by_row)
