"""Models with random weights and a made-up vocabulary, for measuring speed and memory without a download."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# The last is Qwen2.5-Math-1.5B's shape; as a Qwen3 model, because AutoTokenizer replaces a qwen2 model's tokenizer.
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512},
    "1m": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096},
    "6m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096},
    "60m": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000},
    "250m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 64_000},
    "qwen2.5-math-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                          "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip


def network_of(shape: str) -> Qwen3Config:
    """A shape's configuration."""
    return Qwen3Config(
        **SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0
    )


def save_random_model(folder: Path, shape: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write model and tokenizer into `folder`, once, and return it."""
    if (folder / "model.safetensors").exists():
        return folder
    size = SHAPES[shape]["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, size)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    config = network_of(shape)
    config.dtype = dtype
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # where many weights are drawn in a moment
        model = Qwen3ForCausalLM(config).to(dtype)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
