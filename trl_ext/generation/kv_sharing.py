"""Keys and values that rows have in common, computed once: for which models, and while completions are decoded.

Rows with the same prompt are one sequence until they draw different tokens. What a row is drawn from is the same as if
it were alone. Letters: n rows, U sequences of theirs, W tokens of a padded prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from trl_ext.compat.layers import can_keep_caches
from trl_ext.generation.positions import unsupported_positions

if TYPE_CHECKING:
    from transformers.generation import LogitsProcessorList

_EXACT_WITH = ("eager", "sdpa")  # attention implementations that the tests hold to the plain path
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention")
_ROOM = 32  # tokens, at least


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this unwrapped model cannot share prompts, or None."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation not in _EXACT_WITH:
        return f"attention {config._attn_implementation!r} is not one of {', '.join(_EXACT_WITH)}"
    if layers != {"full_attention"} or any(getattr(config, name, None) for name in _WINDOWS):
        return "not all layers have full attention"
    return unsupported_positions(model)


def unsupported_in_a_step(model: PreTrainedModel) -> str | None:
    """Why an optimizer step of this unwrapped model cannot share prompts, or None."""
    attention = model.config.get_text_config()._attn_implementation
    if attention != "sdpa":
        return f"attention {attention!r} does not take rows apart, 'sdpa' does"
    return unsupported_reason(model)


def unsupported_checkpointing(model: nn.Module, reentrant: bool) -> str | None:
    """Why this unwrapped model cannot share prompts under gradient checkpointing, or None."""
    if reentrant:
        return "reentrant gradient checkpointing has no gradient for the cache (use_reentrant: false has)"
    return None if can_keep_caches(model) else "its layers drop the cache under gradient checkpointing"


class Sequences:
    """The rows that are still decoded, by their sequences.

    Args:
        ids, mask: (n, W) prompts, padded on the left.
        processors: that may have a value per row, and get the sequences in place of the rows.
    """

    def __init__(self, ids: Tensor, mask: Tensor, processors: LogitsProcessorList) -> None:
        self.rows = torch.arange(len(ids), device=ids.device)  # (n,) their numbers
        different, self.of_row = torch.cat([ids, mask], dim=1).unique(dim=0, return_inverse=True)  # of_row: (n,)
        self.ids, self.mask = different.chunk(2, dim=1)  # (U, tokens) each
        self.lengths = torch.zeros_like(self.ids[:, 0])  # (U,) of completions
        self.ended = torch.zeros_like(self.lengths, dtype=torch.bool)  # (U,)
        self.cache = Cache(layer_class_to_replicate=BufferedLayer)
        self._processors = processors
        _select_rows_of(processors, torch.zeros_like(self.lengths).scatter(0, self.of_row, self.rows))

    def append(self, tokens: Tensor) -> None:
        """Continue with (n,) tokens. Rows of a sequence that have drawn different ones are several from now on."""
        tokens = tokens.masked_fill(self.ended[self.of_row], 0)
        pairs, place = ((self.of_row << 32) + tokens).unique(return_inverse=True)
        before, newest = pairs >> 32, pairs & (2**32 - 1)
        if len(pairs) > len(self.ids):
            is_first = torch.cat([before.new_ones(1, dtype=torch.bool), before[1:] != before[:-1]])
            order = torch.cat([is_first.nonzero(), (~is_first).nonzero()])[:, 0]  # the first of each stays where it was
            before, newest, place = before[order], newest[order], order.argsort()[place]
            for layer in self.cache.layers:
                layer.append_copies(before[len(self.ids) :], len(self.rows))
            self._select(before)
        self.of_row = place
        self.ids = torch.cat([self.ids, newest[:, None]], dim=1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(newest), 1)], dim=1)
        self.lengths += ~self.ended

    def completions(self, rows: Tensor, width: int) -> Iterator[tuple[int, list[int]]]:
        """Numbers and completions, after prompts of `width` tokens, of the rows that (n,) bool selects."""
        of_row = self.of_row[rows]
        columns = self.rows[rows].tolist(), self.ids[of_row, width:].tolist(), self.lengths[of_row].tolist()
        return ((row, completion[:length]) for row, completion, length in zip(*columns, strict=True))

    def keep(self, kept: Tensor) -> None:
        """Continue with these of the n rows only."""
        sequences, self.of_row = self.of_row[kept].unique(return_inverse=True)
        self.rows = self.rows[kept]
        self.cache.batch_select_indices(sequences)
        self._select(sequences)

    def _select(self, sequences: Tensor) -> None:
        self.ids, self.mask = self.ids[sequences], self.mask[sequences]
        self.lengths, self.ended = self.lengths[sequences], self.ended[sequences]
        _select_rows_of(self._processors, sequences)


def _select_rows_of(processors: LogitsProcessorList, kept: Tensor) -> None:
    """Have processors with a value per row, a repetition penalty's lengths of prompts, continue with these rows."""
    for processor in processors:
        if isinstance(lengths := getattr(processor, "prompt_ignore_length", None), Tensor):
            processor.prompt_ignore_length = lengths[kept]


class BufferedLayer(DynamicLayer):
    """Keys and values in buffers with room for rows and tokens to come: those that are there are not copied."""

    _buffers: list[Tensor]  # of keys and of values, each (rows with room, heads, tokens with room, size)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, new tokens, size) keys and values; returns all so far, which are views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self._show(len(key_states), 0)
        rows, start = len(key_states), self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._make_room(len(self._buffers[0]), end + max(_ROOM, end // 4))
        keys, values = self._buffers
        keys[:rows, :, start:end], values[:rows, :, start:end] = key_states, value_states
        return self._show(rows, end)

    def append_copies(self, rows: Tensor, most: int) -> None:
        """Continue with a copy of each of these rows in addition; there will never be more than `most` rows."""
        before, tokens = len(self.keys), self.get_seq_length()
        after = before + len(rows)
        if after > len(self._buffers[0]):
            self._make_room(min(2 * after, most), self._buffers[0].shape[2])
        for buffer in self._buffers:
            buffer[before:after, :, :tokens] = buffer[:, :, :tokens].index_select(0, rows)
        self._show(after, tokens)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Continue with these rows."""
        keys, values = self._buffers
        self._buffers = [keys.index_select(0, indices), values.index_select(0, indices)]
        self._show(len(indices), self.get_seq_length())

    def _make_room(self, rows: int, tokens: int) -> None:
        """Buffers of so many rows and tokens with what there is."""
        for place, buffer in enumerate((self.keys, self.values)):
            self._buffers[place] = buffer.new_empty(rows, buffer.shape[1], tokens, buffer.shape[3])
            self._buffers[place][: len(buffer), :, : buffer.shape[2]] = buffer

    def _show(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (buffer[:rows, :, :tokens] for buffer in self._buffers)
        return self.keys, self.values
