"""Prompts to completions with HF `generate`, and where a completion ends.

Letters: N completions, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria

from trl_ext.shared_prompts import why_not

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def hf_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    stop: Sequence[str] | None = None,
    logps: TokenLogProbs | None = None,
) -> list[list[int]]:
    """One completion per prompt, cut after the first EOS or after the token that completes a stop string.

    Args:
        prompt_ids: N prompts as token ids, without padding.
        stop: strings that end a completion; they stay in it.
        logps: takes down the tokens' log-probabilities.

    Returns:
        N lists of token ids, padding removed, EOS kept.
    """
    padded = tokenizer.pad({"input_ids": list(prompt_ids)}, padding_side="left", return_tensors="pt").to(model.device)
    width = padded["input_ids"].shape[1]
    known = _prompts_once(model, prompt_ids, padded)
    minimum = generation_config.min_new_tokens or 0
    output = model.generate(
        input_ids=padded["input_ids"],
        attention_mask=padded["attention_mask"],
        generation_config=generation_config,
        **({"past_key_values": known} if known else {}),
        stopping_criteria=StoppingCriteriaList([_Stop(tokenizer, stop, width + minimum)] if stop else []),
        logits_processor=LogitsProcessorList([logps] if logps else []),
    )
    if logps:
        logps.take(output)
    eos = generation_config.eos_token_id
    eos_ids = {eos} if isinstance(eos, int) else set(eos or [])
    return [cut_completion(row, tokenizer, eos_ids, stop, minimum) for row in output[:, width:].tolist()]


def _prompts_once(
    model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], padded: Mapping[str, Tensor]
) -> DynamicCache | None:
    """A cache of all rows' prompts but for the last token, each different prompt computed once; None if all differ."""
    first: dict[tuple[int, ...], int] = {}
    for row, ids in enumerate(map(tuple, prompt_ids)):
        first.setdefault(ids, row)
    too_short = padded["input_ids"].shape[1] == 1
    if len(first) == len(prompt_ids) or too_short or why_not(model, False, False) is not None:
        return None
    rows, place = list(first.values()), {ids: i for i, ids in enumerate(first)}
    positions = (padded["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
    cache = DynamicCache(config=model.config)
    model(
        input_ids=padded["input_ids"][rows, :-1],
        attention_mask=padded["attention_mask"][rows, :-1],
        position_ids=positions[rows, :-1],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.batch_select_indices(torch.tensor([place[tuple(ids)] for ids in prompt_ids], device=model.device))
    return cache


class TokenLogProbs(LogitsProcessor):
    """Takes down the log-probability of every sampled token under the model itself, before temperature and top-p.

    It keeps one number per token: of a step's (N, V) distribution only what the next step needs.
    """

    def __init__(self) -> None:
        self._previous: Tensor | None = None  # (N, V) of the step whose token is not known yet
        self._taken: list[Tensor] = []  # (N,) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by `generate` with the tokens so far and the logits of the next."""
        self.take(input_ids)
        self._previous = scores.float().log_softmax(dim=-1)
        return scores

    def take(self, input_ids: Tensor) -> None:
        """Take down the last token's."""
        if self._previous is not None:
            self._taken.append(self._previous.gather(1, input_ids[:, -1:])[:, 0])
            self._previous = None

    def rows(self) -> list[list[float]]:
        """N lists, one number per token; what comes after a row's end means nothing."""
        return torch.stack(self._taken, dim=1).tolist()


class _Stop(StopStringCriteria):
    """A stop string ends a row once the row is longer than `shortest`; transformers has that rule for EOS only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], shortest: int) -> None:
        super().__init__(tokenizer, list(stop))
        self.shortest = shortest

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended: Tensor = super().__call__(input_ids, scores, **kwargs)
        return ended if input_ids.shape[1] > self.shortest else torch.zeros_like(ended)


def cut_completion(
    ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: set[int],
    stop: Sequence[str] | None,
    minimum: int = 0,
) -> list[int]:
    """`ids` up to and including the first EOS, or the token that completes a stop string after `minimum` tokens.

    The padding that `generate` appends to rows that ended early goes with it, also where pad and EOS are one token.
    """
    end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
    ids = ids[:end]
    stops_at = first_stop(ids, tokenizer, stop, minimum)
    if stops_at is None:
        return ids
    low, high = minimum + 1, len(ids)  # the shortest prefix whose text reaches that far
    while low < high:
        middle = (low + high) // 2
        reaches = len(tokenizer.decode(ids[:middle], skip_special_tokens=True)) >= stops_at
        low, high = (low, middle) if reaches else (middle + 1, high)
    return ids[:low]


def first_stop(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] | None, minimum: int = 0
) -> int | None:
    """Where in the decoded text the first stop string ends that is completed after `minimum` tokens, or None."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    passed = len(tokenizer.decode(ids[:minimum], skip_special_tokens=True)) if minimum else 0
    starts = ((text.find(s, max(0, passed - len(s) + 1)), len(s)) for s in stop or ())
    return min((start + length for start, length in starts if start >= 0), default=None)


def is_finished(
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    stop: Sequence[str] | None,
    minimum: int = 0,
) -> Tensor:
    """(N,) bool: the completion ended by itself, at EOS or at a stop string, and was not cut by the length limit."""
    ends = {*eos_ids, tokenizer.pad_token_id}
    finished = [
        bool(ids) and (ids[-1] in ends or first_stop(ids, tokenizer, stop, minimum) is not None)
        for ids in completion_ids
    ]
    return torch.tensor(finished, dtype=torch.bool)
