"""The LM head's tiles on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from trl_ext.compat.trl_head import TILE, tiles_in_cache

CPU = torch.device("cpu")


def widths(monkeypatch: pytest.MonkeyPatch, vocabulary: int, device: torch.device) -> tuple[set[int], torch.Tensor]:
    """Columns of the logits' tiles, forward and backward, and the gradient of the head's weights."""
    found: set[int] = set()
    for name in ("_forward_tile", "_backward_tile"):
        fold = getattr(chunked_logprob, name)

        def seen(tile: torch.Tensor, *args: Any, fold: Any = fold, **kwargs: Any) -> None:
            found.add(tile.shape[1])
            fold(tile, *args, **kwargs)

        monkeypatch.setattr(chunked_logprob, name, seen)
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=vocabulary, num_key_value_heads=1, tie_word_embeddings=False, **size)
    model: Any = AutoModelForCausalLM.from_config(config).double()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids = torch.arange(5)[None]
    with tiles_in_cache(vocabulary, device):
        outputs = model(ids, labels=ids, fused_lm_head=True)
    (outputs.log_probs.sum() + outputs.entropy.sum()).backward()
    monkeypatch.undo()
    return found, model.lm_head.weight.grad


def test_a_cpus_tiles_are_narrow_and_their_gradient_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 2 * TILE + 300
    narrow, ours = widths(monkeypatch, vocabulary, CPU)
    wide, plain = widths(monkeypatch, vocabulary, torch.device("cuda"))
    assert narrow == {TILE, 300}
    assert wide == {vocabulary}
    assert (ours - plain).abs().max() < 1e-6 * plain.abs().max()  # TRL adds up in float32


def test_a_small_vocabulary_has_one_tile_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = []
    fold = chunked_logprob._forward_tile

    def seen(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        strides.append(tile.stride(0))
        fold(tile, *args, **kwargs)

    monkeypatch.setattr(chunked_logprob, "_forward_tile", seen)
    with tiles_in_cache(40, CPU):
        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model: Any = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=40, num_key_value_heads=1, **size))
        add_fused_lm_head(model)
        model(torch.arange(5)[None], labels=torch.arange(5)[None], fused_lm_head=True)
    assert strides == [40]
