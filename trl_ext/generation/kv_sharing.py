"""Which models can compute a shared prompt once for several completions."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from trl_ext.compat.checkpointing import can_keep_caches

_EXACT_WITH = ("eager", "sdpa")  # attention implementations that the tests hold to the plain path


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this unwrapped model cannot share prompts, or None."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation not in _EXACT_WITH:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_EXACT_WITH)}"
    if layers != {"full_attention"} or getattr(config, "sliding_window", None):
        return "not all layers have full attention"
    return None if has_rotary_positions(model) else "its positions are not rotary"


def unsupported_checkpointing(model: nn.Module, reentrant: bool) -> str | None:
    """Why this unwrapped model cannot share prompts under gradient checkpointing, or None."""
    if reentrant:
        return "reentrant gradient checkpointing has no gradient for the cache (use_reentrant: false has)"
    return None if can_keep_caches(model) else "its layers drop the cache under gradient checkpointing"


def has_rotary_positions(model: PreTrainedModel) -> bool:
    """Whether only distances between tokens count; learned positions move with the padding before a prompt."""
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))
