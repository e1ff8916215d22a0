"""transformers' layers: the KV cache that they keep under gradient checkpointing, and the attention that they call.

`GradientCheckpointingLayer` drops the cache while training, because a cache that grows would grow again when the layer
is recomputed. Layers of a cache that stays as it is may say so, with a flag that transformers has for its own models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from trl_ext.compat.compilation import not_traced

Attention = Callable[..., tuple[Tensor, Tensor | None]]  # in transformers' signature
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


def attend_by(function: Attention) -> None:
    """Have models with sdpa attention use a function in its place, which compiled layers do not look into."""
    ALL_ATTENTION_FUNCTIONS.register("sdpa", not_traced(function))
