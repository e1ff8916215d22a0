"""What is cached per layer, by hand and by vLLM's own accounting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3ForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Llama4TextConfig,
    Mamba2Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)  # fmt: skip

from tests.support.tiny import tiny_tokenizer
from trl_ext.generation.vllm_start import device_settings, starting_vllm
from trl_ext.tools.estimate.kv_cache import Blocks, layer_tokens, token_bytes, windows_of
from trl_ext.tools.estimate.planned import NoEstimateError

FULL, SLIDING = "full_attention", "sliding_attention"
BYTES = 2 * 1 * 32 * 4  # keys and values, heads, head size, float32


def gemma(*kinds: str, window: int = 64, **changes: Any) -> Gemma3TextConfig:
    """A model with layers of these kinds."""
    tokenizer = tiny_tokenizer()
    return Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=len(kinds),
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, sliding_window=window,
        layer_types=list(kinds), eos_token_id=1, pad_token_id=0, bos_token_id=None, dtype="float32", **changes,
    )  # fmt: skip


def test_each_layer_has_its_window() -> None:
    assert windows_of(Qwen3Config(num_hidden_layers=3)) == [None, None, None]
    assert windows_of(gemma(SLIDING, FULL, SLIDING)) == [64, None, 64]
    assert windows_of(MistralConfig(num_hidden_layers=2, sliding_window=100)) == [100, 100]
    assert windows_of(MistralConfig(num_hidden_layers=2, sliding_window=None)) == [None, None]


def test_layers_that_read_anothers_cache_have_none() -> None:
    kinds = [SLIDING, FULL] * 4
    shared = Gemma3nTextConfig(num_hidden_layers=8, layer_types=kinds, num_kv_shared_layers=3, sliding_window=9)
    assert windows_of(shared) == [9, None, 9, None, 9]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (Qwen3NextConfig(), "linear_attention"),
        (Mamba2Config(), "linear_attention"),
        (Llama4TextConfig(), "chunked_attention"),
        (RecurrentGemmaConfig(), RecurrentGemmaConfig().layers_block_type[0]),  # transformers has renamed it
        (Gemma4TextConfig(), "different heads"),
        (DeepseekV3Config(), "latent attention"),
        (PretrainedConfig(num_hidden_layers=2), "no attention"),
        (gemma(SLIDING, FULL, window=None), "no sliding_window"),
    ],
)
def test_what_is_no_such_cache_is_said(network: PretrainedConfig, said: str) -> None:
    with pytest.raises(NoEstimateError, match=said):
        windows_of(network)


def test_a_sequence_holds_no_more_than_the_window() -> None:
    network = gemma(SLIDING, FULL, SLIDING)
    assert layer_tokens(network, 1000) == 64 + 1000 + 64
    assert layer_tokens(network, 10) == 30
    assert token_bytes(network, 4) == BYTES


def test_layers_are_in_groups_of_the_smaller_kind() -> None:
    blocks = Blocks.of(gemma(*[SLIDING] * 5, FULL, SLIDING), BYTES, 16)
    assert blocks.groups == ((64, 6), (None, 1))
    assert blocks.size == 1 * 16 * BYTES
    nearly_as_many = Blocks.of(gemma(*[SLIDING] * 4, *[FULL] * 3), BYTES, 16)
    assert nearly_as_many.groups == ((64, 1), (None, 1))
    assert nearly_as_many.size == 4 * 16 * BYTES


def test_a_window_begins_within_a_block_and_waits_for_tokens() -> None:
    blocks = Blocks.of(gemma(SLIDING, FULL), BYTES, 16)
    assert blocks.needed(1000) == 63 + (4 + 1)  # 63 tokens before the newest one, from anywhere in a block
    assert blocks.needed(1000, in_flight=100) == 63 + (11 + 1)
    assert blocks.needed(20, in_flight=100) == 2 + (2 + 1)


LAYERS = [
    [FULL] * 6, [SLIDING] * 6, [*[SLIDING] * 5, FULL], [*[SLIDING] * 5, FULL] * 4 + [SLIDING] * 2, [SLIDING, FULL] * 6,
    [*[SLIDING] * 4, *[FULL] * 3], [*[FULL] * 7, SLIDING, SLIDING],
]  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("kinds", LAYERS)
@pytest.mark.parametrize(("window", "longest"), [(64, 2048), (512, 2048), (4096, 1000)])
def test_vllm_counts_the_same_blocks(kinds: list[str], window: int, longest: int) -> None:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    specs = {
        f"{i}": SlidingWindowSpec(**shape, sliding_window=window) if kind == SLIDING else FullAttentionSpec(**shape)
        for i, kind in enumerate(kinds)
    }
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None), speculative_config=None, max_in_flight_tokens=256,
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        model_config=SimpleNamespace(max_model_len=longest),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    blocks = Blocks.of(gemma(*kinds, window=window), BYTES, 16)
    assert blocks.size == kv_cache_utils._pool_bytes_per_block(groups)
    needed = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
    assert blocks.size * blocks.needed(longest, in_flight=256) == needed


@pytest.mark.vllm
def test_an_engine_says_the_estimated_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = gemma(*[SLIDING] * 5, FULL, SLIDING)
    Gemma3ForCausalLM(network).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with starting_vllm():
        from vllm import LLM

        settings = {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "max_num_seqs": 4}
        llm = LLM(str(tmp_path), **{**device_settings(), **settings, "max_num_batched_tokens": 2048})
    engine = llm.llm_engine.vllm_config
    room = engine.cache_config.kv_cache_memory_bytes
    blocks = Blocks.of(network, token_bytes(network, 4), engine.cache_config.block_size)
    needed = blocks.needed(2048, engine.max_in_flight_tokens)
    assert engine.cache_config.num_gpu_blocks == room // blocks.size
    assert engine.cache_config.kv_cache_size_tokens == room // blocks.size * 2048 // needed
