"""Log-probabilities of completions, with the prompt that a group has in common computed once, and with its gradient.

The prompts, less their last token, go through the decoder into a cache; its keys and values are indexed by row, which
adds up the rows' gradients, and the completions run on it behind the prompt's last token. Attention of a completion to
its prompt is what it is in one pass, so the result is the same but for rounding.

Letters: B rows, U different prompts, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

_EXACT_WITH = ("eager", "sdpa")  # attention implementations that the tests hold to the plain path


def why_not(model: Any, gradient_checkpointing: bool, sharded: bool) -> str | None:
    """Why this model cannot share prompts, or None where it can.

    Args:
        model: unwrapped.
        sharded: parameters live on several ranks (ZeRO-3, FSDP).
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if gradient_checkpointing:
        return "gradient checkpointing computes without a cache"
    if sharded:
        return "the parameters are sharded over the ranks"
    if config._attn_implementation not in _EXACT_WITH:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_EXACT_WITH)}"
    if layers != {"full_attention"} or getattr(config, "sliding_window", None):
        return "not all layers have full attention"
    if not getattr(config, "rope_parameters", None):
        return "its positions are not rotary"
    return None


def completion_log_probs(
    model: Any,
    decoder: Any,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    group: Tensor,
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the completions' tokens, 0 where `completion_mask` is 0.

    Args:
        model: with TRL's fused head, in the wrapper of its backend.
        decoder: what in `model` maps tokens to hidden states.
        prompt_ids, prompt_mask: (B, L), padded on the left.
        completion_ids, completion_mask: (B, T), padded on the right.
        group: (B,), equal for rows of the same prompt.
    """
    _, first, prompt_of = _first_of_each(group)
    cache = DynamicCache(config=decoder.config)
    if prompt_ids.shape[1] > 1:
        decoder(
            input_ids=prompt_ids[first, :-1],
            attention_mask=prompt_mask[first, :-1],
            past_key_values=cache,
            use_cache=True,
        )
        cache.batch_select_indices(prompt_of)
    outputs = model(
        input_ids=torch.cat([prompt_ids[:, -1:], completion_ids[:, :-1]], dim=1),
        attention_mask=torch.cat([prompt_mask, completion_mask[:, :-1]], dim=1),
        past_key_values=cache,
        shift_labels=completion_ids.masked_fill(completion_mask == 0, -100),
        fused_lm_head=True,
    )
    return outputs.log_probs, outputs.entropy


def _first_of_each(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct groups (U,), the first row of each (U,), and each row's place among them (B,)."""
    distinct, place = torch.unique(group, return_inverse=True)
    first = torch.full((len(distinct),), len(group), device=group.device)
    rows = torch.arange(len(group), device=group.device)
    return distinct, first.scatter_reduce(0, place, rows, "amin"), place
