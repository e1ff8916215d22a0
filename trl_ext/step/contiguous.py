"""Log-probabilities of completions in rows that begin with the prompt and have all padding at their end.

TRL pads prompts on the left, for generation. A token then needs a mask of queries by keys to not attend to the padding,
which takes memory with the square of the length and keeps attention from its causal kernel. Padding at the end comes
after every token that counts, so causal attention alone leaves it out: there is no mask, and no more columns than the
longest row has tokens. With FlashAttention, whose kernels take rows of any lengths, that padding is left out as well.

Letters: B rows, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_OF_ANY_LENGTHS = ("flash_attention_2", "flash_attention_3")  # which transformers gives rows by their positions
_PACKED_LAYERS = {"full_attention", "sliding_attention"}  # others carry a state from one row into the next


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the attention of this unwrapped model keeps rows apart that stand in one, by their positions."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config._attn_implementation in _OF_ANY_LENGTHS and layers <= _PACKED_LAYERS


def contiguous_rows(
    prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, columns: int
) -> tuple[Tensor, Tensor]:
    """(B, S) tokens, prompts from column 0 on and completions right after them; (B, T) each completion token's column.

    What is masked keeps its tokens, at the end of a row.

    Args:
        prompt_ids, prompt_mask: (B, L), padded on the left.
        completion_ids: (B, T), padded on the right.
        columns: S, at least 2 and as many as the longest row has tokens.
    """
    padding = prompt_mask.shape[1] - prompt_mask.sum(dim=1, keepdim=True)  # (B, 1)
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    sources = torch.arange(columns, device=ids.device) + padding
    places = torch.arange(completion_ids.shape[1], device=ids.device) + prompt_mask.shape[1] - padding
    return ids.gather(1, sources % ids.shape[1]), places.clamp(max=columns - 1)


def contiguous_log_probs(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    columns: int,
    packed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(B, T) log-probabilities and entropies of the completions' tokens, 0 where `completion_mask` is 0.

    Only for a model whose tokens attend to earlier ones and know their distance alone (rotary positions).

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        prompt_ids, prompt_mask: (B, L), padded on the left.
        completion_ids, completion_mask: (B, T), padded on the right.
        columns: of the rows, as in `contiguous_rows`.
        packed: give the model one row of all tokens without padding, and their positions; see `can_pack`.
    """
    ids, places = contiguous_rows(prompt_ids, prompt_mask, completion_ids, columns)
    scored = torch.zeros_like(ids).scatter_add_(1, places, completion_mask.to(ids.dtype)) > 0
    predicted = torch.roll(ids.masked_fill(~scored, -100), -1, dims=1)  # column 0 has a prompt's first token: -100
    if packed:
        lengths = prompt_mask.sum(dim=1, keepdim=True) + completion_mask.sum(dim=1, keepdim=True)
        logp, entropy = _packed_log_probs(model, ids, predicted, lengths)
    else:
        outputs = model(input_ids=ids, attention_mask=None, shift_labels=predicted, fused_lm_head=True)
        logp, entropy = outputs.log_probs, outputs.entropy
    logp, entropy = (x.gather(1, places - 1).masked_fill(completion_mask == 0, 0) for x in (logp, entropy))
    return logp, entropy


def _packed_log_probs(model: nn.Module, ids: Tensor, predicted: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(B, columns) log-probabilities and entropies of the predicted tokens, 0 behind a row's (B, 1) length."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    real = positions < lengths
    outputs = model(
        input_ids=ids[real][None],
        position_ids=positions[real][None],
        attention_mask=None,
        shift_labels=predicted[real][None],
        fused_lm_head=True,
    )
    logp, entropy = (x.new_zeros(ids.shape).masked_scatter(real, x) for x in (outputs.log_probs, outputs.entropy))
    return logp, entropy
