"""The decoding loop that HF `generate` runs in place of its own: little work per token, and none for rows that ended.

`generate` prepares logits processors and stopping criteria as ever and calls the loop, its `custom_generate`; tokens
are drawn from what its own loop would draw from. Letters: N rows, W tokens of a padded prompt, V of the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerationMixin, GenerationMode
from transformers.integrations.fsdp import is_fsdp_managed_module

from trl_ext.compat.checkpointing import CACHE
from trl_ext.generation.kv_sharing import unsupported_reason

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation import LogitsProcessorList, StoppingCriteriaList

    from trl_ext.generation.hf import TokenLogProbs

MIN_ROWS_TO_SHRINK = 8
_ROOM = 32  # tokens, at least
_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
# Their logits processors keep something of all rows.
_BOUND_TO_ROWS = ("guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config")


_NOT_FINITE = (
    "the model's scores of the next token are NaN or infinite in {} of {} rows, so none can be drawn: the policy has "
    "diverged (a lower learning_rate, max_grad_norm) or its numbers overflow (bfloat16 instead of float16)"
)


class Decoding:
    """Decodes N prompts, each different one computed once; rows that have ended leave."""

    def __init__(self, logps: TokenLogProbs | None = None) -> None:
        self.logps = logps

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> list[list[int]]:
        """(N, W) prompts, padded on the left, to N completions, each up to the token at which a criterion is met."""
        completions: list[list[int]] = [[] for _ in input_ids]
        ids, width = input_ids, input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask  # from transformers 5.23 on, None where no row is padded
        rows, lengths = torch.arange(len(ids), device=ids.device), torch.zeros_like(ids[:, 0])
        ended, idle = torch.zeros_like(lengths, dtype=torch.bool), 0
        cache = Cache(layer_class_to_replicate=_BufferedLayer)
        logits = _prefill(model, ids, mask, cache)
        while True:
            scores = logits_processor(ids, logits.to(copy=True, dtype=torch.float32))
            tokens = draw(scores) if generation_config.do_sample else scores.argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, tokens], dim=1)
            lengths += ~ended
            ended |= stopping_criteria(ids, None)
            remaining, undrawn = torch.stack([(~ended).sum(), (tokens >= scores.shape[1]).sum()]).tolist()
            if undrawn:
                raise FloatingPointError(_NOT_FINITE.format(undrawn, len(rows)))
            idle += len(rows) - remaining
            # Copying the keys and values of the rows that stay costs about as much as computing those once.
            if remaining == 0 or (len(rows) >= MIN_ROWS_TO_SHRINK and idle >= remaining):
                found = zip(rows[ended].tolist(), ids[ended, width:].tolist(), lengths[ended].tolist(), strict=True)
                for row, completion, length in found:
                    completions[row] = completion[:length]
                kept, idle = (~ended).nonzero()[:, 0], 0
                if self.logps:
                    self.logps.record(ids)
                    self.logps.select_rows(kept)
                if remaining == 0:
                    return completions
                ids, mask, rows, lengths, ended = (each[kept] for each in (ids, mask, rows, lengths, ended))
                cache.batch_select_indices(kept)
                _select_rows_of(logits_processor, kept)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            logits = _forward(model, ids[:, -1:], mask, cache)


def draw(scores: Tensor) -> Tensor:
    """(rows, 1) tokens from the softmax of (rows, V) scores: where one uniform number falls among the running sums.

    In float64, whose sums tell tokens of a probability of 1e-15 apart. `torch.multinomial` draws a number for each
    token of the vocabulary instead of one per row, which takes twice as long on a CPU, or more. Where a row has no
    distribution, because a score is NaN or infinite, its token is V, which is none.
    """
    sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = sums[:, -1:]
    points = (torch.rand_like(total) * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, points, right=True)  # right: never a token of probability 0


def own_loop_unsupported(model: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why this model, which may have an adapter, has to generate with the loop of `generate`, or None."""
    adapters = getattr(model, "peft_config", {}).values()
    plain = model.get_base_model() if adapters else model
    if config.get_generation_mode() not in _MODES:
        return f"decoding by {config.get_generation_mode().value} needs it"
    if config.cache_implementation is not None or config.use_cache is False:
        return "it was asked for another cache than the usual one"
    if bound := [name for name in _BOUND_TO_ROWS if getattr(config, name, None) is not None]:
        return f"{bound[0]} needs all rows"
    if model.device.type == "mps" or (model.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()):
        return (
            f"tokens are drawn by running sums in float64, which {model.device.type} lacks, or lacks in a fixed order"
        )
    if any(adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        return "the adapter depends on the place in the prompt"
    if type(plain).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        return "the model prepares its inputs itself"
    # A forward pass gathers sharded weights, so that all ranks have to run it or none.
    if has_several_ranks() and gathers_weights(model):
        return "the weights are sharded over the ranks"
    return unsupported_reason(plain)


def gathers_weights(model: PreTrainedModel) -> bool:
    """Whether a forward pass gathers weights from other ranks: under ZeRO-3, FSDP, and FSDP2, whose are `DTensor`s."""
    sharded = any(isinstance(param, DTensor) or is_partitioned(param) for param in model.parameters())
    return sharded or is_fsdp_managed_module(model)


def is_partitioned(param: Tensor) -> bool:
    """Whether ZeRO-3 shards this parameter and has not gathered it."""
    return param.numel() == 0 and getattr(param, "ds_numel", 0) > 0


def has_several_ranks() -> bool:
    """Whether there are other processes in this one's group."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _prefill(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """(N, V) logits after the prompts, whose keys and values come into the cache; different prompts only."""
    different, place = torch.cat([ids, mask], dim=1).unique(dim=0, return_inverse=True)
    prompts, masks = different.chunk(2, dim=1)
    logits = _forward(model, prompts, masks, cache)
    cache.batch_select_indices(place)
    return logits[place]


def _forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """(rows, V) logits of the token after `ids`, (rows, new tokens); the mask counts the tokens before them as well."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :],  # as `generate` counts them
        use_cache=True,
        logits_to_keep=1,
        **{CACHE: cache},
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _select_rows_of(processors: LogitsProcessorList, kept: Tensor) -> None:
    """Have processors with a value per row, a repetition penalty's lengths of prompts, continue with these rows."""
    for processor in processors:
        if isinstance(lengths := getattr(processor, "prompt_ignore_length", None), Tensor):
            processor.prompt_ignore_length = lengths[kept]


class _BufferedLayer(DynamicLayer):
    """Keys and values in buffers with room for tokens to come: a token is written, and those before it not copied."""

    _buffers: tuple[Tensor, Tensor]  # (rows, heads, tokens with room, size)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, new tokens, size) keys and values; returns all so far, which are views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = (key_states[:, :, :0], value_states[:, :, :0])
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        keys, values = self._buffers
        if (lacking := end - keys.shape[2]) > 0:
            room = (0, 0, 0, lacking + max(_ROOM, end // 4))
            self._buffers = keys, values = pad(keys, room), pad(values, room)
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with these rows."""
        tokens, (keys, values) = self.get_seq_length(), self._buffers
        self._buffers = keys.index_select(0, indices), values.index_select(0, indices)
        self.keys, self.values = (buffer[:, :, :tokens] for buffer in self._buffers)
