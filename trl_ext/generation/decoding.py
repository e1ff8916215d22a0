"""The decoding loop that HF `generate` runs in place of its own: little work per token, and none for rows that ended.

`generate` prepares logits processors and stopping criteria as ever and calls the loop, its `custom_generate`; tokens
are drawn from what its own loop would draw from. Letters: N rows, U different ones, W tokens of a padded prompt, V of
the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.generation import GenerationMixin, GenerationMode
from transformers.integrations.fsdp import is_fsdp_managed_module

from trl_ext.compat.layers import CACHE
from trl_ext.generation.adapters import adapter_of_places
from trl_ext.generation.floats import widest_float
from trl_ext.generation.kv_sharing import Sequences, unsupported_reason
from trl_ext.generation.progress import advance
from trl_ext.generation.sampling import is_neutral

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation import LogitsProcessorList, StoppingCriteriaList

    from trl_ext.generation.token_logprobs import TokenLogProbs

MIN_ROWS_TO_SHRINK = 8
_MODES = (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
# Their logits processors keep something of all rows.
_BOUND_TO_ROWS = ("guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "watermarking_config")


NOT_FINITE = (
    "the model's scores of the next token are NaN or infinite in {} of {} rows, so none can be drawn: the policy has "
    "diverged (a lower learning_rate, max_grad_norm) or its numbers overflow (bfloat16 instead of float16)"
)


class Decoding:
    """Decodes N prompts; rows that are the same so far are computed once, and rows that have ended leave."""

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
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask  # transformers 5.23: None where no row is padded
        batch, idle, unfinished = Sequences(input_ids, mask, logits_processor), 0, len(input_ids)
        logits = _forward(model, batch.ids, batch)
        while True:
            scores = logits_processor(batch.ids, logits.to(copy=True, dtype=torch.float32))
            drawn_by = batch.of_row
            tokens = draw(scores, drawn_by) if generation_config.do_sample else most_likely(scores)[drawn_by, None]
            batch.append(tokens[:, 0])
            batch.ended |= stopping_criteria(batch.ids, None)
            over = batch.ended[batch.of_row]
            remaining, undrawn = torch.stack([(~over).sum(), (tokens >= scores.shape[1]).sum()]).tolist()
            if undrawn:
                raise FloatingPointError(NOT_FINITE.format(undrawn, len(over)))
            if self.logps:
                self.logps.record(tokens, drawn_by)
            idle += len(over) - remaining
            advance(unfinished, unfinished - remaining)
            unfinished = remaining
            # Copying the keys and values of the rows that stay costs about as much as computing those once.
            if remaining == 0 or (len(over) >= MIN_ROWS_TO_SHRINK and idle >= remaining):
                for row, completion in batch.completions(over, input_ids.shape[1]):
                    completions[row] = completion
                if remaining == 0:
                    return completions
                kept, idle = (~over).nonzero()[:, 0], 0
                if self.logps:
                    self.logps.select_rows(kept)
                batch.keep(kept)
            logits = _forward(model, batch.ids[:, -1:], batch)


def draw(scores: Tensor, of_row: Tensor) -> Tensor:
    """(rows, 1) tokens from the softmax of their scores: where one uniform number falls among the running sums.

    In float64, whose sums tell tokens of a probability of 1e-15 apart. `torch.multinomial` draws a number for each
    token of the vocabulary instead of one per row, which takes twice as long on a CPU, or more. Where a row has no
    distribution, because a score is NaN or infinite, its token is V, which is none.

    Args:
        scores: (U, V), of which several rows may have one.
        of_row: (rows,) each row's.
    """
    sums = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)[of_row]
    total = sums[:, -1:]
    points = (torch.rand_like(total) * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, points, right=True)  # right: never a token of probability 0


def most_likely(scores: Tensor) -> Tensor:
    """(U,) tokens of the highest scores (U, V), the first of equal ones; V where that is NaN or infinite, as above."""
    highest, tokens = scores.max(dim=-1)
    return tokens.where(highest.isfinite(), scores.shape[-1])


def own_loop_unsupported(model: PreTrainedModel, config: GenerationConfig) -> str | None:
    """Why this model, which may have an adapter, has to generate with the loop of `generate`, or None."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model  # transformers' own has adapters, too
    if config.get_generation_mode() not in _MODES:
        return f"decoding by {config.get_generation_mode().value} needs it"
    if config.cache_implementation is not None or config.use_cache is False:
        return "it was asked for another cache than the usual one"
    if bound := [name for name in _BOUND_TO_ROWS if not is_neutral(name, getattr(config, name, None))]:
        return f"{bound[0]} needs all rows"
    device = model.device
    no_order = device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    if no_order or widest_float(device) != torch.float64:
        return f"tokens are drawn by running sums in float64, which {device.type} lacks, or lacks in a fixed order"
    if reason := adapter_of_places(model):
        return reason
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


def _forward(model: PreTrainedModel, ids: Tensor, batch: Sequences) -> Tensor:
    """(U, V) logits of the token after `ids`, (U, new tokens) of the batch."""
    output = model(
        input_ids=ids,
        attention_mask=batch.mask,
        position_ids=(batch.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :],  # as `generate` counts them
        use_cache=True,
        logits_to_keep=1,
        **{CACHE: batch.cache},
    )
    logits: Tensor = output.logits[:, -1]
    return logits
