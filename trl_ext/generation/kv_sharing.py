"""Which models can compute a shared prompt once for several completions."""

from __future__ import annotations

from transformers import PreTrainedModel

_EXACT_WITH = ("eager", "sdpa")  # attention implementations that the tests hold to the plain path


def unsupported_reason(model: PreTrainedModel, gradient_checkpointing: bool, sharded: bool) -> str | None:
    """Why this unwrapped model cannot share prompts, or None; `sharded` gradients are those of ZeRO-2, ZeRO-3, FSDP."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if gradient_checkpointing:
        return "gradient checkpointing computes without a cache"
    if sharded:
        return "the gradients are sharded over the ranks"
    if config._attn_implementation not in _EXACT_WITH:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_EXACT_WITH)}"
    if layers != {"full_attention"} or getattr(config, "sliding_window", None):
        return "not all layers have full attention"
    return None if has_rotary_positions(model) else "its positions are not rotary"


def has_rotary_positions(model: PreTrainedModel) -> bool:
    """Whether only distances between tokens count; learned positions move with the padding before a prompt."""
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))
