"""transformers: decoder layers keep the KV cache that they get under gradient checkpointing.

`GradientCheckpointingLayer` drops it while training, because a cache that grows would grow again when the layer is
recomputed. Layers of a cache that stays as it is may say so, with a flag that transformers has for its own models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_FLAG = "_can_checkpoint_with_cache"


@contextmanager
def caches_kept() -> Iterator[None]:
    """Within, a checkpointed layer gets the cache. The cache must be the same before and after a forward pass."""
    with patch.object(GradientCheckpointingLayer, _FLAG, True):
        yield


def can_keep_caches(model: nn.Module) -> bool:
    """Whether `caches_kept` has an effect on this model's layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return bool(layers) and hasattr(GradientCheckpointingLayer, _FLAG)
