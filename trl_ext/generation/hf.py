"""N prompts to N completions with HF `generate`, and where a completion ends."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StopStringCriteria
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from trl_ext.generation.kv_sharing import unsupported_reason

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


_MIN_ROWS_TO_SHRINK = 8


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

    Finished rows leave the batch as soon as they are half of it; `generate` alone would compute them to the end.

    Args:
        prompt_ids: N prompts as token ids, without padding; the N completions are, too, and keep their EOS.
        stop: strings that end a completion; they stay in it.
        logps: records the tokens' log-probabilities.
    """
    eos_ids, minimum = set(eos_ids_of(generation_config)), generation_config.min_new_tokens or 0
    batch = _ShrinkingBatch(model, tokenizer, prompt_ids, generation_config, logps)
    stops = StopStringCriteria(tokenizer, list(stop)) if stop else None
    can_shrink = _can_shrink(model, generation_config)
    while len(batch.rows):
        batch.step(_Ends(stops, batch.width, minimum, eos_ids, can_shrink))
    return [cut_completion(row, tokenizer, eos_ids, stop, minimum) for row in batch.completions]


def samples_whole_distribution(config: GenerationConfig) -> bool:
    """Whether tokens are drawn from the model's distribution at the temperature, without leaving any token out."""
    cuts = (config.top_k or 0, config.min_p or 0.0, 1 - (config.top_p or 1.0), 1 - (config.typical_p or 1.0))
    return bool(config.do_sample) and (config.num_beams or 1) == 1 and not any(cuts)


def eos_ids_of(config: GenerationConfig, *more: int | None) -> list[int]:
    """The tokens that end a completion: `more`, such as the tokenizer's, then the config's one, several or none."""
    listed = config.eos_token_id if isinstance(config.eos_token_id, (list, tuple)) else [config.eos_token_id]
    return [token for token in dict.fromkeys([*more, *listed]) if token is not None]


class _ShrinkingBatch:
    """Rows that are still generated: each `step` generates until enough have ended, and drops those.

    Attributes:
        rows: (rows,) their places among the N prompts.
        width: of the padded prompts, in tokens.
        completions: N lists of token ids, padding included, of those that have ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[Sequence[int]],
        config: GenerationConfig,
        logps: TokenLogProbs | None,
    ) -> None:
        padded = tokenizer.pad({"input_ids": list(prompt_ids)}, padding_side="left", return_tensors="pt")
        padded = padded.to(model.device)
        self.model, self.config, self.logps = model, config, logps
        self.ids, self.mask = padded["input_ids"], padded["attention_mask"]
        # A forward pass gathers weights that are sharded, so that all ranks have to run it or none.
        runs_alone = _makes_plain_cache(config) and not (_has_several_ranks() and _gathers_weights(model))
        self.cache = _prompts_once(model, prompt_ids, padded) if runs_alone else None
        # Ranks whose weights are whole need not step together, and tell each other of every token.
        self.in_step = {} if _gathers_weights(model) else {"synced_gpus": False}
        self.width = self.ids.shape[1]
        self.rows = torch.arange(len(self.ids), device=self.ids.device)
        self.completions: list[list[int]] = [[] for _ in prompt_ids]

    def step(self, ends: _Ends) -> None:
        """Generate until `ends` stops all rows, and keep those that have not ended themselves."""
        output = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.mask,
            generation_config=self._remaining(),
            **({"past_key_values": self.cache} if self.cache else {}),
            **self.in_step,
            stopping_criteria=StoppingCriteriaList([ends]),
            logits_processor=LogitsProcessorList([self.logps] if self.logps else []),
        )
        ids, cache = output.sequences, output.past_key_values
        if self.logps:
            self.logps.record(ids)
        at_limit = ids.shape[1] - self.width >= self.config.max_new_tokens
        unfinished = torch.zeros_like(ends.ended) if at_limit else ~ends.ended
        finished = zip(self.rows[~unfinished].tolist(), ids[~unfinished, self.width :].tolist(), strict=True)
        for row, tokens in finished:
            self.completions[row] = tokens
        kept = unfinished.nonzero()[:, 0]
        new = ids.shape[1] - self.mask.shape[1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), new)], dim=1)[kept]
        self.ids, self.rows, self.cache = ids[kept], self.rows[kept], cache
        if len(kept):
            cache.batch_select_indices(kept)
        if self.logps:
            self.logps.select_rows(kept)

    def _remaining(self) -> GenerationConfig:
        """The limits less the tokens that were generated already."""
        so_far = self.ids.shape[1] - self.width
        config = copy.copy(self.config)
        config.max_new_tokens = self.config.max_new_tokens - so_far
        config.min_new_tokens = max((self.config.min_new_tokens or 0) - so_far, 0) or None
        config.return_dict_in_generate = True
        return config


def _can_shrink(model: PreTrainedModel, config: GenerationConfig) -> bool:
    """Whether a batch may lose rows while it is generated: not if ranks step together, or with another cache."""
    in_step = _has_several_ranks() and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    plain = (config.num_beams or 1) == 1 and _makes_plain_cache(config)
    return plain and not in_step and unsupported_reason(model, False, False) is None


def _gathers_weights(model: PreTrainedModel) -> bool:
    """Whether a forward pass gathers weights from other ranks."""
    return is_fsdp_managed_module(model) or any(is_partitioned(param) for param in model.parameters())


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 shards this parameter and has not gathered it."""
    return param.numel() == 0 and getattr(param, "ds_numel", 0) > 0


def _makes_plain_cache(config: GenerationConfig) -> bool:
    return config.cache_implementation is None and config.use_cache is not False


def _has_several_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class _Ends(StoppingCriteria):
    """Which rows have ended. Once half of them have, all are told to, and the others continue in a smaller batch."""

    def __init__(
        self, stop: StopStringCriteria | None, start: int, minimum: int, eos_ids: set[int], may_shrink: bool
    ) -> None:
        self.stop, self.start, self.minimum = stop, start, minimum
        self.eos_ids, self.may_shrink = sorted(eos_ids), may_shrink
        self.ended = torch.zeros(0, dtype=torch.bool)  # (rows of the batch,)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """(rows,) bool, called by `generate` after every token."""
        last = input_ids[:, -1]
        ended = torch.isin(last, torch.tensor(self.eos_ids, device=last.device, dtype=last.dtype))
        completion = input_ids[:, self.start :]  # transformers looks at the prompt too, and has a minimum for EOS only
        if self.stop is not None and completion.shape[1] > self.minimum:
            ended |= self.stop(completion, scores, **kwargs)
        self.ended = ended | self.ended if len(self.ended) else ended
        enough = self.may_shrink and len(last) >= _MIN_ROWS_TO_SHRINK and self.ended.sum() >= len(last) / 2
        return torch.ones_like(self.ended) if enough else self.ended


def _prompts_once(
    model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], padded: Mapping[str, Tensor]
) -> DynamicCache | None:
    """A cache of all rows' prompts but for the last token, each different prompt computed once; None if all differ."""
    first: dict[tuple[int, ...], int] = {}
    for row, ids in enumerate(map(tuple, prompt_ids)):
        first.setdefault(ids, row)
    too_short = padded["input_ids"].shape[1] == 1
    if len(first) == len(prompt_ids) or too_short or unsupported_reason(model, False, False) is not None:
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
    """Records the log-probability of every sampled token at a temperature (1: the model's own), before top-p.

    It keeps one number per token: of a step's (N, V) distribution only what the next step needs.
    """

    def __init__(self, n: int, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._rows: list[list[float]] = [[] for _ in range(n)]
        self._which = list(range(n))  # rows still in the batch
        self._previous: tuple[Tensor, Tensor] | None = None  # logits (rows, V) whose token is not known yet, their sum
        self._taken: list[Tensor] = []  # (rows,) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by `generate` with the tokens so far and the logits of the next."""
        self.record(input_ids)
        logits = scores.float() if self.temperature == 1 else scores.float() / self.temperature
        self._previous = logits, logits.logsumexp(dim=-1)
        return scores

    def record(self, input_ids: Tensor) -> None:
        """Record the last token's log-probability."""
        if self._previous is not None:
            logits, normalizer = self._previous
            self._taken.append(logits.gather(1, input_ids[:, -1:])[:, 0] - normalizer)
            self._previous = None

    def select_rows(self, kept: Tensor) -> None:
        """Continue with these rows of the batch only."""
        self._flush()
        self._which = [self._which[i] for i in kept.tolist()]

    def rows(self) -> list[list[float]]:
        """N lists, one number per token; what comes after a row's end means nothing."""
        self._flush()
        return self._rows

    def _flush(self) -> None:
        if self._taken:
            for row, values in zip(self._which, torch.stack(self._taken, dim=1).tolist(), strict=True):
                self._rows[row] += values
        self._taken = []


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
        return len(tokenizer.decode(ids[:tokens], skip_special_tokens=True))

    return ids[: bisect_left(range(len(ids)), stops_at, lo=minimum + 1, key=reached)]  # the shortest that reaches it


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
    """(N,) bool: the completion ended by itself, at EOS or at a stop string, and was not cut by the length limit.

    Of several turns the last one decides: its last token has to complete a stop string, wherever others stand.
    """
    ends = {*eos_ids, tokenizer.pad_token_id}
    finished = [
        bool(ids) and (ids[-1] in ends or (len(ids) > minimum and _completes_stop(ids, tokenizer, stop)))
        for ids in completion_ids
    ]
    return torch.tensor(finished, dtype=torch.bool)


def _completes_stop(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] | None) -> bool:
    """Whether a stop string ends within the last token's part of the decoded text."""
    text, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:-1]))
    return any(text.rfind(s) >= 0 and text.rfind(s) + len(s) > len(before) for s in stop or ())
