"""Prompts to token ids, and ids of completions to texts: one rule of each for every kind of tokenizer and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# What the r1_zero format is made of; part of the text even if the tokenizer calls one of them its EOS.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """N prompts to N lists of token ids that a completion can continue, see `to_be_continued`."""
    if len(prompts) == 0:
        return []
    return to_be_continued(tokenizer, prompts, tokenizer(text=list(prompts), verbose=False)["input_ids"])


def to_be_continued(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], ids: Iterable[Sequence[int]]
) -> list[list[int]]:
    """The ids of N prompts without what a tokenizer adds to them too much.

    A tokenizer whose post-processor begins every text with BOS makes two of it where the prompt begins with BOS: one
    stays. An EOS that it appends would end the text before the completion, and goes; one in the prompt itself stays.
    """
    return [_to_be_continued(tokenizer, prompt, list(row)) for prompt, row in zip(prompts, ids, strict=True)]


def _to_be_continued(tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int]) -> list[int]:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if eos is None or len(ids) < 2 or ids[-1] != eos:
        return ids
    is_of_prompt = prompt.rstrip().endswith(str(tokenizer.eos_token)) and ids[-2] != eos
    return ids if is_of_prompt else ids[:-1]


def completion_texts(
    tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[Sequence[int]], eos_ids: Iterable[int] = ()
) -> list[str]:
    """N completions as texts, in which special tokens stay unless they have a role, such as end, padding or BOS.

    Tags of an answer format, and stop strings, may be special tokens: `skip_special_tokens` would take them away.

    Args:
        completion_ids: N lists; ids that the tokenizer does not know, of a padded vocabulary, have no text.
        eos_ids: tokens that end a completion, in addition to the tokenizer's; a special one has no text.
    """
    left_out = _special_ids(tokenizer, eos_ids)[0]
    rows = [[token for token in ids if token not in left_out] for ids in completion_ids]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=False) if rows else []
    return texts


def special_ids_with_text(
    tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = (), tags_only: bool = False
) -> set[int]:
    """The special tokens that `completion_texts` keeps and `skip_special_tokens` takes away; of these, only `TAGS`."""
    ids = _special_ids(tokenizer, eos_ids)[1]
    return {token for token in ids if _is_tag(tokenizer, token)} if tags_only else ids


def _special_ids(tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int]) -> tuple[set[int], set[int]]:
    """Those that begin, end or fill a text, or stand for something unknown, and are no part of it; the others."""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, about in added if about.special)}
    named: Any = [getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES]
    without_text = {token for token in special.intersection([*named, *eos_ids]) if not _is_tag(tokenizer, token)}
    return without_text, special - without_text


def _is_tag(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    return str(tokenizer.convert_ids_to_tokens(token)).strip() in TAGS
