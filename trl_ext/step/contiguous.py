"""Log-probabilities of completions in rows that begin with the prompt and have all padding at their end.

TRL pads prompts on the left, for generation. A token then needs a mask of queries by keys to not attend to the padding,
which takes memory with the square of the length and keeps attention from its causal kernel. Padding at the end comes
after every token that counts, so causal attention alone leaves it out: there is no mask, and no more columns than the
longest row has tokens. With FlashAttention, whose kernels take rows of any lengths, that padding is left out as well.

Letters: B rows, L prompt tokens, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_OF_ANY_LENGTHS = ("flash_attention_2", "flash_attention_3")  # which transformers gives rows by their positions
VALUES = ("log_probs", "entropy")  # of TRL's fused head
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
    model: Callable[..., Any],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    columns: int,
    packed: bool = False,
    values: Sequence[str] = VALUES,
) -> tuple[Tensor, ...]:
    """(B, T, ...) values of the completions' tokens, 0 where `completion_mask` is 0.

    Only for a model whose tokens attend to earlier ones and know their distance alone (rotary positions).

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        prompt_ids, prompt_mask: (B, L), padded on the left.
        completion_ids, completion_mask: (B, T), padded on the right.
        columns: of the rows, as in `contiguous_rows`.
        packed: give the model one row of all tokens without padding, and their positions; see `can_pack`.
        values: of the model's output, which has one for each position.
    """
    ids, places = contiguous_rows(prompt_ids, prompt_mask, completion_ids, columns)
    scored = torch.zeros_like(ids).scatter_add_(1, places, completion_mask.to(ids.dtype)) > 0
    predicted = torch.roll(ids.masked_fill(~scored, -100), -1, dims=1)  # column 0 has a prompt's first token: -100
    if packed:
        lengths = prompt_mask.sum(dim=1, keepdim=True) + completion_mask.sum(dim=1, keepdim=True)
        found = _packed(model, ids, predicted, lengths, values)
    else:
        outputs = model(input_ids=ids, attention_mask=None, shift_labels=predicted, fused_lm_head=True)
        found = [getattr(outputs, name) for name in values]
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    return tuple(x[rows, places - 1].masked_fill(_as_deep_as(x, completion_mask == 0), 0) for x in found)


def _packed(
    model: Callable[..., Any], ids: Tensor, predicted: Tensor, lengths: Tensor, values: Sequence[str]
) -> list[Tensor]:
    """(B, columns, ...) values of the predicted tokens, 0 behind a row's (B, 1) length."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    real = positions < lengths
    outputs = model(
        input_ids=ids[real][None],
        position_ids=positions[real][None],
        attention_mask=None,
        shift_labels=predicted[real][None],
        fused_lm_head=True,
    )
    found = [getattr(outputs, name)[0] for name in values]
    return [x.new_zeros(*ids.shape, *x.shape[1:]).masked_scatter(_as_deep_as(x[None], real), x) for x in found]


def _as_deep_as(values: Tensor, mask: Tensor) -> Tensor:
    """A (B, columns) mask for values of each position that are themselves vectors."""
    return mask if values.ndim == 2 else mask[..., None]
