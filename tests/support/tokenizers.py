"""Tokenizers of the kinds that checkpoints bring along, each with a model that answers every r1_zero prompt by 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trl_ext.mini.policy import EOS, PAD, PROMPT_PARTS, TAGS

BOS, TURN, END = "<|bos|>", "<|turn|>", "<|im_end|>"
RESPONSE = (*TAGS[:2], "5", TAGS[2])
TEXT = "".join(RESPONSE)


def tokenizer_of(*, special: tuple[str, ...] = (), adds: str = "", **named: Any) -> PreTrainedTokenizerFast:
    """Bytes, the tags, and the parts of the r1_zero prompt, as the embedded default's tokenizer has them.

    Args:
        special: of the tags and further tokens, those that are special tokens.
        adds: template of the post-processor around `$A`, such as `<|bos|> $A`.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([EOS, PAD])
    for token in (*TAGS, *PROMPT_PARTS, BOS, TURN, END):
        add = core.add_special_tokens if token in special else core.add_tokens
        add([AddedToken(token, normalized=False)])
    if adds:
        ids = [(token, core.token_to_id(token)) for token in (BOS, EOS) if token in adds]
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, padding_side="left", **{"eos_token": EOS, "pad_token": PAD, **named}
    )


def answering_model(
    tokenizer: PreTrainedTokenizerFast,
    response: Sequence[str | int] = (*RESPONSE, "x", "y", EOS),
    spare: int = 0,
    after: str = PROMPT_PARTS[1],
) -> Qwen3ForCausalLM:
    """A model that continues the r1_zero prompt by these tokens, which differ, whatever comes before.

    Args:
        response: tokens or ids.
        spare: embeddings beyond the tokenizer's.
        after: the token that the response follows, the prompt's last.
    """
    size, wide = len(tokenizer) + spare, 320  # which vLLM's kernels for a CPU take
    shape = {"hidden_size": wide, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    shape |= {"vocab_size": size, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id))
    chain = [t if isinstance(t, int) else tokenizer.convert_tokens_to_ids(t) for t in (after, *response)]
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the embedding reaches the head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, wide))
        model.lm_head.weight.zero_()
        for token, following in pairwise(chain):
            model.lm_head.weight[following, token] = 2.0
    return model


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer, and what is to come of it."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    model: Callable[[PreTrainedTokenizerFast], Qwen3ForCausalLM] = answering_model
    prompt: str = "".join((PROMPT_PARTS[0], "{question}", PROMPT_PARTS[1]))
    ends: tuple[str, ...] = ()  # end tokens of the generation config
    refused: str = ""  # words of the error
    text: str = TEXT  # of every completion


def kind(special: tuple[str, ...] = (), adds: str = "", named: dict[str, Any] | None = None, **more: Any) -> Kind:
    return Kind(partial(tokenizer_of, special=special, adds=adds, **(named or {})), **more)


_WITH_BOS = BOS + Kind.prompt
_AFTER = partial(answering_model, response=(*RESPONSE[:3], 300, RESPONSE[3]), spare=64)  # 300 is no token's id

KINDS = {
    "ordinary": kind(),
    "tags_special": kind(special=TAGS),
    "closing_tag_special": kind(special=TAGS[2:]),
    "bos_added": kind((BOS,), f"{BOS} $A", {"bos_token": BOS}),
    "bos_added_and_in_prompt": kind((BOS,), f"{BOS} $A", {"bos_token": BOS}, prompt=_WITH_BOS),
    "bos_in_prompt": kind((BOS,), "", {"bos_token": BOS}, prompt=_WITH_BOS),
    "eos_appended": kind(adds=f"$A {EOS}"),
    "bos_is_eos": kind(adds=f"{EOS} $A", named={"bos_token": EOS}),
    "no_pad": kind(named={"pad_token": None}),
    "pad_is_eos": kind(named={"pad_token": EOS}),
    "no_eos": kind(named={"eos_token": None}),
    "several_ends": kind((END,), ends=(END, EOS)),
    "plain_token_ends": kind(ends=(TAGS[2], EOS)),
    "tag_ends": kind(TAGS, ends=(TAGS[2], EOS)),
    "tag_is_eos": kind(TAGS, named={"eos_token": TAGS[2]}),
    "padded_vocabulary": kind(model=partial(answering_model, spare=64)),
    "unknown_id_sampled": kind(model=_AFTER),
    "other_special_token": kind((TURN,), model=partial(answering_model, response=(*RESPONSE[:3], TURN, RESPONSE[3])),
                                text=TEXT.replace("5", f"5{TURN}")),
    "tokens_beyond_embeddings": kind(model=partial(answering_model, spare=-1), refused="resize the model's embeddings"),
}  # fmt: skip

# All of it in one, for engines, which take long to start.
EVERYTHING = kind(
    (*TAGS, BOS, TURN, END),
    f"{BOS} $A",
    {"bos_token": BOS, "pad_token": None},
    model=partial(answering_model, response=(*RESPONSE[:2], TURN, RESPONSE[2], 300, RESPONSE[3]), spare=64),
    prompt=_WITH_BOS,
    ends=(END, EOS),
    text=TEXT.replace("5", f"{TURN}5"),
)


def save(folder: Path, chosen: Kind) -> str:
    """Model, tokenizer and prompt template of a kind; returns the folder."""
    tokenizer = chosen.tokenizer()
    model = chosen.model(tokenizer)
    if chosen.ends:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(chosen.ends))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "own.prompt").write_text(chosen.prompt, encoding="utf-8")
    return str(folder)
