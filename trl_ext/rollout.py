"""Prompts to completions with HF `generate`, and where a completion ends.

Letters: N completions, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()  # type: ignore[untyped-decorator]
def hf_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    stop: Sequence[str] | None = None,
) -> list[list[int]]:
    """One completion per prompt, cut after the first EOS or after the token that completes a stop string.

    Args:
        prompt_ids: N prompts as token ids, without padding.
        stop: strings that end a completion; they stay in it.

    Returns:
        N lists of token ids, padding removed, EOS kept.
    """
    padded = tokenizer.pad({"input_ids": list(prompt_ids)}, padding_side="left", return_tensors="pt").to(model.device)
    stopping = {"stop_strings": list(stop), "tokenizer": tokenizer} if stop else {}
    output = model.generate(
        input_ids=padded["input_ids"],
        attention_mask=padded["attention_mask"],
        generation_config=generation_config,
        **stopping,
    )
    eos = generation_config.eos_token_id
    eos_ids = {eos} if isinstance(eos, int) else set(eos or [])
    width = padded["input_ids"].shape[1]
    return [cut_completion(row, tokenizer, eos_ids, stop) for row in output[:, width:].tolist()]


def cut_completion(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, eos_ids: set[int], stop: Sequence[str] | None
) -> list[int]:
    """`ids` up to and including the first EOS, or the token with which the text first holds a stop string.

    The padding that `generate` appends to rows that ended early goes with it, also where pad and EOS are one token.
    """
    end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
    ids = ids[:end]
    if not stop or not holds_stop(ids, tokenizer, stop):
        return ids
    low, high = 1, len(ids)  # the shortest prefix that holds a stop string: holding one is monotone in the length
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds_stop(ids[:middle], tokenizer, stop) else (middle + 1, high)
    return ids[:low]


def holds_stop(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> bool:
    """Whether the decoded text holds any of the stop strings."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return any(s in text for s in stop)


def is_finished(
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    stop: Sequence[str] | None,
) -> Tensor:
    """(N,) bool: the completion ended by itself, at EOS or at a stop string, and was not cut by the length limit."""
    ends = {*eos_ids, tokenizer.pad_token_id}
    finished = [
        bool(ids) and (ids[-1] in ends or bool(stop and holds_stop(ids, tokenizer, stop))) for ids in completion_ids
    ]
    return torch.tensor(finished, dtype=torch.bool)
