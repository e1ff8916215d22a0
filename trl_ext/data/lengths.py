"""Prompts that leave no room in the context for the longest response: refused, or left out and listed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_ext.data.source import Source
from trl_ext.generation.tokens import prompt_ids

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOO_LONG = ("refuse", "drop")
BLOCK = 64  # tokens, in whole numbers of which an engine's context is chosen


@dataclass(frozen=True)
class Room:
    """The number of tokens for a prompt and its response together, and the settings that it comes from."""

    context: int
    context_setting: str
    response: int
    response_setting: str


def rows_that_fit(
    rows: Dataset, role: str, source: Source, tokenizer: PreTrainedTokenizerBase, room: Room, choice: str
) -> Dataset:
    """The rows, with columns `prompt` and `row`, whose prompts fit; those left out are added to `source.too_long`.

    Raises:
        ValueError: a prompt does not fit and the choice is to refuse, or none fits.
    """
    excess = too_long(rows["prompt"], tokenizer, room)
    if not excess:
        return rows
    numbers = rows["row"][:]
    if choice == "refuse" or len(excess) == len(rows):
        first, longest = min(excess, key=lambda place: numbers[place]), max(excess.values())
        raise ValueError(
            f"{role}, {source.place(numbers[first])} of {source.file()!r}: its prompt of "
            f"{room.context - room.response + excess[first]} tokens and a response of up to {room.response} "
            f"({room.response_setting}) do not fit into {room.context} ({room.context_setting}); {len(excess)} of "
            f"{len(rows)} rows are too long, the longest by {longest}. Raise the context, lower "
            f"{room.response_setting}, or leave these rows out with --too_long drop"
        )
    source.too_long = [source.place(number) for number in sorted(numbers[place] for place in excess)]
    source.rows = len(rows) - len(excess)
    return rows.select([place for place in range(len(rows)) if place not in excess])


def too_long(prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, room: Room) -> dict[int, int]:
    """By the number of each prompt that does not fit, how many tokens it is too long."""
    token_ids = prompt_ids(tokenizer, prompts)
    over = {number: len(ids) + room.response - room.context for number, ids in enumerate(token_ids)}
    return {number: tokens for number, tokens in over.items() if tokens > 0}


def context_of(shape: PretrainedConfig, use_vllm: bool, vllm_limit: int | None) -> tuple[int | None, str]:
    """The length of the context, None if the model has no limit, and where it comes from."""
    if use_vllm and vllm_limit is not None:
        return vllm_limit, "vllm_max_model_length"
    return getattr(shape.get_text_config(), "max_position_embeddings", None), "the model's max_position_embeddings"


def engine_context(
    sampled: Iterable[tuple[Sequence[str], int]], tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> int | None:
    """The context that an engine needs: the longest prompt with its response, in whole blocks, at most `limit`.

    It is what keeps an engine of a model made for 131,072 tokens from reserving memory for rows as long as that.

    Args:
        sampled: lists of prompts, each with the length of the longest response to them.
        limit: of the model; None if it has none.

    Returns:
        None where nothing is sampled.
    """
    longest = 0
    for prompts, response in sampled:
        token_ids = tokenizer(text=list(prompts), verbose=False)["input_ids"] if len(prompts) else []
        longest = max(longest, *(len(ids) + response for ids in token_ids), 0)
    needed = -(-longest // BLOCK) * BLOCK
    return (needed if limit is None else min(needed, limit)) or None
