"""Tiny GGUF files, written by the package that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, FEED_FORWARD, HEADS = 32, 64, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOL = "<tool_call>"  # which a user may write, and which is one token all the same
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "Ġ 1", "Ġ Ġ"]  # of which a tokenizer that cuts at digits never makes the first two
TOKENS = [*SPECIAL, TOOL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FIELDS: dict[str, Any] = {
    "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2, "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHATML, "general.name": "Tiny", "general.license": "apache-2.0",
}  # fmt: skip


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a Llama of one layer, in float32; its embedding is its output head."""
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN), "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    return {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    types: dict[str, str] | None = None,
    architecture: str = "llama",
    **fields: Any,
) -> Path:
    """A GGUF file of a Llama.

    Args:
        tensors: by name, in float32; the default is `matrices()`.
        types: GGML's types by tensor; Q8_0 for the other matrices.
        fields: of the metadata, with `__` for a dot; None takes one of `FIELDS` away.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [4] + [1] * (len(TOKENS) - len(SPECIAL) - 1))
    writer.add_token_merges(MERGES)
    add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, float: writer.add_float32}
    for name, value in (FIELDS | {name.replace("__", "."): value for name, value in fields.items()}).items():
        if value is not None:
            add[type(value)](name, value)
    for name, values in (matrices() if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "Q8_0" if values.ndim > 1 else "F32")]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
