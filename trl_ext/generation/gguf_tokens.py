"""The tokenizer of a GGUF file, as the file's own metadata describe it.

What transformers makes of them differs in the BEGIN and END tokens, in most of the added tokens, and in where numbers
are cut (`tokenizer.ggml.pre`), so that what is known exactly is built here, and transformers is asked for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trl_ext.generation.gguf_header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

# GGUF's types of tokens (llama.h: llama_token_type)
_CONTROL, _USER_DEFINED = 3, 4
# By which name an end of a turn or of a text is known, where the metadata have only one of several (llama-vocab.cpp).
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<|end_of_turn|>", "<|return|>", "<EOT>", "_<EOT>", "<|eot|>",
)  # fmt: skip
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Where text is cut before the merges, by `tokenizer.ggml.pre`; None: single digits, then as GPT-2.
_PATTERNS: dict[str, str | None] = {
    "smollm": None,
    "qwen2": rf"{_WORDS}\p{{N}}{_REST}",
    "llama-bpe": rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",
}
_PLAIN = ("gpt-2", "gpt2")  # as GPT-2 and nothing else
_MARK = "trl_ext wrote this"


def build_tokenizer(header: Header) -> PreTrainedTokenizerFast:
    """The tokenizer with the tokens, the chat template and the context length of the metadata."""
    from transformers import PreTrainedTokenizerFast

    named = special_tokens(header)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(header),
        # All three, since transformers makes up <s> and </s> for those that are left out.
        bos_token=named.get("bos"),
        eos_token=named.get("eos"),
        unk_token=named.get("unknown"),
        pad_token=named.get("padding", named.get("eos")),
        model_max_length=context_length(header),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = header.fields.get("tokenizer.chat_template")
    return tokenizer


def special_tokens(header: Header) -> dict[str, str]:
    """The tokens that the metadata name by their number, by what they are for: bos, eos, unknown, padding, eot."""
    tokens = header.fields["tokenizer.ggml.tokens"]
    given = {name: header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED}
    return {name: tokens[number] for name, number in given.items() if number is not None and number < len(tokens)}


_NAMED = ("bos", "eos", "unknown", "padding", "eot")


def end_token_ids(header: Header, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Every token that ends a response: the metadata's first, the template's, and the usual ones that the model has."""
    tokens = header.fields["tokenizer.ggml.tokens"]
    kinds = header.fields.get("tokenizer.ggml.token_type") or [_CONTROL] * len(tokens)
    named, controls = (
        special_tokens(header),
        {token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL},
    )
    candidates = [
        named.get("eos"),
        named.get("eot"),
        _after_a_turn(tokenizer, controls),
        *(t for t in _ENDS if t in controls),
    ]
    places = {token: number for number, token in enumerate(tokens)}
    return [places[token] for token in dict.fromkeys(candidates) if token is not None]


def _after_a_turn(tokenizer: PreTrainedTokenizerFast, controls: set[str]) -> str | None:
    """The control token that the chat template writes after an assistant's turn; None if it is none, or not known."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # of whatever the template does; what it needs is refused where it is used
        return None
    after = text.partition(_MARK)[2].lstrip()
    return next((token for token in sorted(controls, key=len, reverse=True) if after.startswith(token)), None)


def adds_bos(header: Header) -> bool:
    """Whether the model was trained with a BEGIN token before every text; the defaults are llama.cpp's."""
    kind, cut = (header.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return bool(header.fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or cut == "llama-bpe"))


def context_length(header: Header) -> int:
    """The number of tokens that the model was made for."""
    return int(header.fields.get(f"{header.architecture}.context_length", 10**30))  # as transformers says: not known


def unknown_cuts(header: Header) -> str | None:
    """`tokenizer.ggml.pre` where it is not known here, so that transformers' guess is taken; else None."""
    cut = header.fields.get("tokenizer.ggml.pre")
    is_bpe = header.fields.get("tokenizer.ggml.model") == "gpt2"
    return str(cut) if is_bpe and cut not in (*_PATTERNS, *_PLAIN, None) else None


def _backend(header: Header) -> Tokenizer:
    from tokenizers import AddedToken, processors

    fields = header.fields
    is_bpe = fields.get("tokenizer.ggml.model") == "gpt2"
    known = is_bpe and (fields.get("tokenizer.ggml.pre") in _PATTERNS or fields.get("tokenizer.ggml.pre") in _PLAIN)
    tokenizer = _byte_level(fields) if known else _as_transformers_has_it(header)
    bos = special_tokens(header).get("bos")
    if adds_bos(header) and bos is not None:
        ids = [(bos, fields["tokenizer.ggml.bos_token_id"])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", ids)
    if is_bpe:
        kinds = zip(fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type") or (), strict=False)
        added = [(token, kind) for token, kind in kinds if kind in (_CONTROL, _USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in added if kind != _CONTROL])
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, kind in added if kind == _CONTROL])
    return tokenizer


def _byte_level(fields: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE, cut as `tokenizer.ggml.pre` says."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    cut = fields["tokenizer.ggml.pre"]
    vocabulary = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = _pairs(fields["tokenizer.ggml.merges"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe"))
    tokenizer.pre_tokenizer = _cutting(cut)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _cutting(cut: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if cut in _PLAIN:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    pattern = _PATTERNS[cut]
    if pattern is None:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        return pre_tokenizers.Sequence(parts)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Merges as BPE takes them; a space within a token is written as another character in a byte-level vocabulary."""
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _as_transformers_has_it(header: Header) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(header.file.parent), gguf_file=header.file.name)
    return tokenizer.backend_tokenizer
