"""N prompts to N completions with HF `generate`, and where a completion ends."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteria, StopStringCriteria
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from trl_ext.compat.compilation import uncompiled
from trl_ext.compat.hf_sampling import generating_with
from trl_ext.generation.decoding import Decoding, gathers_weights, has_several_ranks, own_loop_unsupported
from trl_ext.generation.interruption import sampling
from trl_ext.generation.policy import overridden
from trl_ext.generation.progress import CountedTokens, advance
from trl_ext.generation.sampling import without_adapter
from trl_ext.generation.token_logprobs import TokenLogProbs

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@contextlib.contextmanager
def recorded(model: PreTrainedModel, config: GenerationConfig, n: int, temperature: float) -> Iterator[TokenLogProbs]:
    """In the block, HF `generate` records what it samples of `n` prompts, counts it for progress, and can be stopped.

    Args:
        model: unwrapped, whose `generate` is called by TRL.
        config: that it is called with.
    """
    recorder, counted = TokenLogProbs(n, temperature), CountedTokens(config)
    with generating_with(model, recorder, counted, recorder.record), sampling(), uncompiled():
        yield recorder
    advance(0, finished=n)


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
        prompt_ids: N prompts as token ids, without padding; the N completions are, too, and keep their EOS.
        generation_config: all of it; nothing is taken from the model's own, see `sampling_config`.
        stop: strings that end a completion; they stay in it.
        logps: records the tokens' log-probabilities.
    """
    if not prompt_ids:
        return []
    ids, mask = _padded(prompt_ids, tokenizer.pad_token_id or 0)
    width, minimum = ids.shape[1], generation_config.min_new_tokens or 0
    config = copy.copy(generation_config)
    config.return_dict_in_generate = False
    if reason := own_loop_unsupported(model, config):
        _log_once(f"completions are generated with the loop of transformers, which is slower: {reason}")
    ends = [_StopStrings(tokenizer, stop, width, minimum)] if stop else []
    with (
        overridden(without_adapter(model), {"generation_config": config}),  # of which fields that are None are filled
        sampling(),
        uncompiled(),
    ):
        sequences = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([*ends, CountedTokens(config)] if reason else ends),
            logits_processor=LogitsProcessorList([logps] if logps else []),
            **({} if reason else {"custom_generate": Decoding(logps)}),
            # Ranks whose weights are whole need not step together, and tell each other of every token.
            synced_gpus=gathers_weights(model) and has_several_ranks(),
        )
    if not reason:
        return sequences
    if logps:
        logps.record(sequences)
    advance(0, finished=len(sequences))
    eos_ids = set(eos_ids_of(generation_config))
    return [cut_completion(row, tokenizer, eos_ids, stop, minimum) for row in sequences[:, width:].tolist()]


def _padded(rows: Sequence[Sequence[int]], pad_token: int) -> tuple[Tensor, Tensor]:
    """What `tokenizer.pad` does, which takes as long as several tokens."""
    ids = pad_sequence([torch.tensor(row) for row in rows], True, pad_token, "left")
    return ids, pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True, 0, "left")


@functools.cache
def _log_once(line: str) -> None:
    log.info(line)


def eos_ids_of(config: GenerationConfig, *more: int | None) -> list[int]:
    """The tokens that end a completion: `more`, such as the tokenizer's, then the config's one, several or none."""
    listed = config.eos_token_id if isinstance(config.eos_token_id, (list, tuple)) else [config.eos_token_id]
    return [token for token in dict.fromkeys([*more, *listed]) if token is not None]


@functools.lru_cache(maxsize=4)
def _stop_criteria(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], _vocabulary: int) -> StopStringCriteria:
    """Its tables take as long as ten tokens, and transformers looks for them under an order of the vocabulary."""
    return StopStringCriteria(tokenizer, list(stop))


class _StopStrings(StoppingCriteria):
    """Which rows complete a stop string, in their completion and after its minimum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int, minimum: int) -> None:
        self.start, self.minimum = start, minimum
        self.complete = _stop_criteria(tokenizer, tuple(stop), len(tokenizer))
        of_ends = slice(self.complete.num_stop_strings * self.complete.max_valid_positions, -1)
        self.may_end = (self.complete.embedding_vec[:, of_ends] > 0).any(dim=1)  # per token, those unknown last

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """(rows,) bool, called after every token; looks at rows whose last token may end a stop string."""
        completion = input_ids[:, self.start :]  # transformers looks at the prompt too, and has a minimum for EOS only
        ended = torch.zeros(len(completion), dtype=torch.bool, device=completion.device)
        if completion.shape[1] > self.minimum:
            self.may_end = self.may_end.to(completion.device)
            rows = self.may_end[completion[:, -1].clamp(max=len(self.may_end) - 1)].nonzero()[:, 0]
            if len(rows):
                ended[rows] = self.complete(completion[rows], scores, **kwargs)
        return ended


def cut_completion(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, eos_ids: set[int], stop: Sequence[str] | None, minimum: int = 0
) -> list[int]:
    """`ids` up to and including the first EOS, or the token that completes a stop string after `minimum` tokens.

    The padding that `generate` appends to rows that ended early goes with it, also where pad and EOS are one token.
    """
    ids = ids[: next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))]
    stops_at = first_stop(ids, tokenizer, stop, minimum)
    if stops_at is None:
        return ids

    def reached(tokens: int) -> int:
        return len(tokenizer.decode(ids[:tokens]))

    return ids[: bisect_left(range(len(ids)), stops_at, lo=minimum + 1, key=reached)]  # the shortest that reaches it


def first_stop(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] | None, minimum: int = 0
) -> int | None:
    """Where in the text of all tokens, special ones too, the first stop string ends after `minimum` tokens, or None."""
    text = tokenizer.decode(ids)
    passed = len(tokenizer.decode(ids[:minimum])) if minimum else 0
    starts = ((text.find(s, max(0, passed - len(s) + 1)), len(s)) for s in stop or ())
    return min((start + length for start, length in starts if start >= 0), default=None)


def is_finished(
    completion_ids: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    stop: Sequence[str] | None,
    minimum: int = 0,
) -> Tensor:
    """(N,) bool: the completion ended by itself, at EOS or at a stop string, and was not cut by the length limit.

    Of several turns the last one decides: its last token has to complete a stop string, wherever others stand.
    """
    ends = {*eos_ids, tokenizer.pad_token_id}
    finished = torch.tensor([bool(ids) and ids[-1] in ends for ids in completion_ids], dtype=torch.bool)
    longest = max(len(string.encode()) for string in stop or [""])  # in tokens, which have a byte of it at least
    for i, ids in enumerate(completion_ids):
        if stop and len(ids) > minimum and not finished[i]:
            text, before = (tokenizer.decode(ids[-longest - 1 : end]) for end in (None, -1))
            finished[i] = any(text.rfind(string) > before.rfind(string) for string in stop)
    return finished
