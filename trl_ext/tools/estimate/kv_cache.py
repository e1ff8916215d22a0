"""What the layers of a model cache: by kind of attention, as HF generate holds it and as vLLM groups it in blocks.

vLLM 0.31 (`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`) deals out blocks of one size. Layers of one kind of
attention are in groups of about as many layers each, a block has some tokens of one group, and every group of a
sequence has blocks of its own. A group with a window gives back the blocks behind it; at its start vLLM demands room
for the tokens in flight too.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_ext.tools.estimate.planned import NoEstimateError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK = 16  # tokens of a block, vLLM's default on a GPU
IN_FLIGHT = 2 * 4096  # tokens of the two batches that vLLM schedules ahead, each as large as TRL allows
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MERGED = 1.5  # groups are as large as the larger kind where it has less than so many times the smaller one's layers


def windows_of(network: PretrainedConfig) -> list[int | None]:
    """The window of each layer that has a cache of its own, in tokens; None attends to all of them.

    Raises:
        NoEstimateError: a layer caches something other than keys and values of equally many heads.
    """
    config: Any = network.get_text_config()
    if getattr(config, "is_heterogeneous", False):
        raise NoEstimateError("the KV cache of layers with different heads is not modeled")
    if getattr(config, "kv_lora_rank", None):
        raise NoEstimateError("the KV cache of latent attention (MLA) is not modeled")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [_SLIDING if window else _FULL] * config.num_hidden_layers
    others = {*kinds} - {_FULL, _SLIDING} or {*(getattr(config, "block_types", None) or ())}
    if others or not getattr(config, "num_attention_heads", None):
        said = ", ".join(sorted(others)) or "no attention"
        raise NoEstimateError(f"what layers with {said} cache is not modeled, only full and sliding attention's")
    if _SLIDING in kinds and not window:
        raise NoEstimateError("the model's configuration has layers of sliding attention and no sliding_window")
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)  # the last ones read those of earlier ones
    return [window if kind == _SLIDING else None for kind in kinds[:own]]


def token_bytes(network: PretrainedConfig, itemsize: int, parallel: int = 1) -> int:
    """Keys and values of a token in one layer; without grouped queries, of all heads."""
    config: Any = network.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return 2 * max(1, heads // parallel) * head * itemsize


def layer_tokens(network: PretrainedConfig, tokens: float) -> float:
    """Tokens that a sequence of so many has in the caches of all layers together."""
    return sum(tokens if window is None else min(tokens, window) for window in windows_of(network))


@dataclass(frozen=True)
class Blocks:
    """How vLLM divides its KV cache."""

    size: int  # bytes
    tokens: int  # of a group's layers that a block has
    groups: tuple[tuple[int | None, int], ...]  # window, and groups that have it

    @classmethod
    def of(cls, network: PretrainedConfig, per_layer: int, tokens: int = BLOCK) -> Blocks:
        """By the layers of a model.

        Args:
            per_layer: bytes of a token in one layer.
        """
        layers = Counter(windows_of(network))
        fewest, most = min(layers.values()), max(layers.values())
        size = most if most < _MERGED * fewest else fewest
        groups = {window: math.ceil(count / size) for window, count in layers.items()}
        widest = max(math.ceil(count / groups[window]) for window, count in layers.items())
        return cls(widest * tokens * per_layer, tokens, tuple(groups.items()))

    def needed(self, tokens: float, in_flight: int = 0) -> int:
        """Blocks of a sequence of so many tokens, of which some more than the window are kept while in flight."""
        return sum(
            count * self._blocks_of_group(tokens if window is None else min(tokens, window - 1 + in_flight), window)
            for window, count in self.groups
        )

    def _blocks_of_group(self, held: float, window: int | None) -> int:
        return math.ceil(held / self.tokens) + (window is not None)  # a window may begin within a block
