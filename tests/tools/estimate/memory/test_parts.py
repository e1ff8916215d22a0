"""Measured bytes of one process become those of a GPU, sharded and with the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import DeepseekV3Config, GPT2Config, GPTNeoXConfig, PretrainedConfig, Qwen3Config

from tests.tools.estimate.runs import planned
from trl_ext.tools.estimate.memory.parts import (
    BUCKET,
    CONTEXT,
    DIVERGENCE_COPIES,
    ENGINE_REST,
    GIB,
    MARGIN,
    NCCL,
    Measured,
    memory_of,
)
from trl_ext.tools.estimate.planned import Launch, Lengths, NoEstimateError, PlannedRun

N = 1000  # parameters
KINDS = dict.fromkeys(("weight casts", "activations", "lm head", "backward"), 0)
RESIDENT = {**KINDS, "batches": 160, "parameters": 4 * N, "gradients": 0, "optimizer": 8 * N}
STEP = {**RESIDENT, "gradients": 4 * N, "activations": 500}
MEASURED = Measured(
    peaks={"forward": STEP, "backward": {**STEP, "backward": 300}, "optimizer step": STEP},
    resident=RESIDENT, parameters=N, trainable=N, largest_parameter=400, largest_layer=400, rows=16,
)  # fmt: skip
ADAM = (4 + 8) * N // 2 + 4  # bytes of a half in float32, and of the count of steps
NETWORK = Qwen3Config(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=512,
    max_position_embeddings=128, dtype="bfloat16",
)  # fmt: skip


def with_engine(**changes: Any) -> PlannedRun:
    """A run on one GPU with colocated vLLM, one update per rollout."""
    of_engine = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 64}
    given = {"network": NETWORK, "lengths": Lengths(10, 20, 30, 40), "step": 16, "vllm_max_num_seqs": 16}
    return planned(**given | of_engine | changes)


def test_one_process_keeps_what_was_measured() -> None:
    memory = memory_of(with_engine(vllm_mode="server"), GIB, MEASURED)
    parts = memory.moments["backward"]
    measured = sum(MEASURED.peaks["backward"].values())
    assert {name: parts[name] for name in STEP} == MEASURED.peaks["backward"]
    assert memory.total("backward") == measured + CONTEXT + round(MARGIN * measured)
    assert memory.peak == "backward"
    assert memory.free == GIB - memory.total("backward")


def test_a_divergence_goes_through_the_lm_head_again() -> None:
    taught = {"teacher_url": "http://h:1", "distillation": "reverse_kl"}
    sampled, of_events = (
        memory_of(with_engine(**taught | changes), GIB, MEASURED).total("backward")
        for changes in ({}, {"distillation": "jensen_shannon"})
    )
    logits = 4 * DIVERGENCE_COPIES * 2**25
    assert of_events - sampled == pytest.approx(logits * (1 + MARGIN), abs=1)


def test_each_gpu_has_its_part_of_the_rollout() -> None:
    parts = memory_of(with_engine(generation_batch_size=64, launch=Launch(2)), GIB, MEASURED).moments["forward"]
    assert parts["batches"] == RESIDENT["batches"] * 64 // (2 * MEASURED.rows)


def test_copies_on_several_gpus_have_buckets_of_gradients() -> None:
    parts = memory_of(with_engine(launch=Launch(2)), GIB, MEASURED).moments["forward"]
    assert parts["gradient buckets"] == 4 * N
    assert parts["gradients"] == 4 * N
    assert parts["context"] == CONTEXT + NCCL


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "optimizer"),
    [(1, 4 * N, 4 * N, ADAM), (2, 4 * N, 2 * N, ADAM), (3, 2 * N, 2 * N, ADAM)],
)
def test_zero_shards_ever_more_of_it(stage: int, parameters: int, gradients: int, optimizer: int) -> None:
    parts = memory_of(with_engine(launch=Launch(2, zero_stage=stage)), GIB, MEASURED).moments["backward"]
    assert [parts[name] for name in ("parameters", "gradients", "optimizer")] == [parameters, gradients, optimizer]
    assert parts["gradient buckets"] == 4 * BUCKET
    assert ("gathered weights" in parts) == (stage == 3)
    assert parts["activations"] == 500


@pytest.mark.parametrize(
    ("optim", "state"), [("sgd", 0), ("adagrad", 4), ("adafactor", 4), ("adamw_torch", 8), ("stable_adamw", 8)]
)
def test_zero_shards_the_state_that_the_optimizer_has(optim: str, state: int) -> None:
    made = with_engine(launch=Launch(2, zero_stage=2), optim=optim)
    kept = memory_of(made, GIB, MEASURED).moments["backward"]["optimizer"]
    assert kept - (4 + state) * N // 2 in (0, 4), "a number in addition"


def test_paged_state_is_counted_apart_from_the_gpus() -> None:
    paged = memory_of(with_engine(vllm_mode="server"), GIB, replace(MEASURED, paged=7 * N))
    plain = memory_of(with_engine(vllm_mode="server"), GIB, MEASURED)
    assert paged.paged == 7 * N
    assert paged.moments["backward"]["optimizer"] == N
    assert paged.free - plain.free == pytest.approx(7 * N * (1 + MARGIN), abs=1)
    large = replace(MEASURED, trainable=400_000)
    shared = memory_of(with_engine(launch=Launch(2, zero_stage=2), optim="paged_adamw_32bit"), GIB, large)
    assert (shared.paged, shared.moments["backward"]["optimizer"]) == (8 * 200_000, 4 * 200_000)


@pytest.mark.parametrize(
    ("optim", "why"),
    [("galore_adamw", "flat partitions"), ("lomo", "within the backward pass"), ("adamw_torch_xla", "another device")],
)
def test_zero_with_an_unmodeled_optimizer_is_not_estimated(optim: str, why: str) -> None:
    with pytest.raises(NoEstimateError, match=f"^optim {optim}.*{why}"):
        memory_of(with_engine(launch=Launch(2, zero_stage=2), optim=optim), GIB, MEASURED)


def test_zeros_optimizer_step_has_float32_gradients() -> None:
    made = with_engine(launch=Launch(2, zero_stage=2), bf16=True)
    assert memory_of(made, GIB, MEASURED).moments["optimizer step"]["gradient buckets"] == 2 * N
    assert memory_of(made, GIB, MEASURED).moments["backward"]["gradient buckets"] == 2 * BUCKET


def test_the_engine_takes_its_fraction_and_caches_the_rest() -> None:
    memory = memory_of(with_engine(), 10 * GIB, MEASURED)
    engine = memory.engine
    assert engine is not None
    assert engine.total == 5 * GIB
    assert engine.weights == 2 * N  # bfloat16
    assert engine.layout.size == 16 * 2 * 2 * 1 * 32 * 2  # tokens, keys and values, layers, heads, head size, bytes
    assert engine.cache == 5 * GIB - 2 * N - ENGINE_REST
    assert engine.blocks == engine.cache // engine.layout.size
    assert engine.tokens == 16 * engine.blocks
    assert engine.sequence == 64
    assert engine.to_start == 64 // 16 + 1
    assert engine.length == 10 / 4 + 30  # a group's prompt is cached once
    assert engine.to_decode == 16 * 3 + 1
    assert engine.batch == 16 * 3 * 16
    held = [memory.moments["forward"][name] for name in ("engine weights", "KV cache", "engine rest")]
    assert sum(held) == engine.total


def test_quantized_weights_and_parallel_ones_are_smaller() -> None:
    quantized = memory_of(with_engine(vllm_quantization="fp8"), 10 * GIB, MEASURED).engine
    parallel = memory_of(with_engine(vllm_tensor_parallel_size=2), 10 * GIB, MEASURED).engine
    assert quantized is not None
    assert parallel is not None
    assert quantized.weights == parallel.weights == N


def test_an_engine_that_sleeps_is_there_for_the_rollout_only() -> None:
    memory = memory_of(with_engine(vllm_enable_sleep_mode=True), 10 * GIB, MEASURED)
    assert "KV cache" not in memory.moments["backward"]
    assert memory.moments["rollout"]["KV cache"] > 0
    assert memory.moments["sync"]["KV cache"] > 0
    assert memory.peak == "sync"


def test_hf_generate_caches_all_of_a_rollouts_sequences() -> None:
    memory = memory_of(with_engine(use_vllm=False, launch=Launch(2)), GIB, MEASURED)
    assert memory.engine is None
    assert memory.moments["rollout"]["KV cache"] == 8 * 60 * (2 * 2 * 1 * 32 * 4)
    assert memory.moments["rollout"]["lm head"] == 2 * 8 * 512 * 4


@pytest.mark.parametrize(
    "network",
    [
        GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128),
        GPTNeoXConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=128),
    ],
)
def test_a_model_without_grouped_heads_caches_all(network: PretrainedConfig) -> None:
    engine = memory_of(with_engine(network=network, vllm_max_model_length=None), 10 * GIB, MEASURED).engine
    assert engine is not None
    assert engine.layout.size == 16 * 2 * 2 * 2 * 32 * 2
    assert engine.sequence == 128
    generated = memory_of(with_engine(network=network, use_vllm=False), GIB, MEASURED).moments["rollout"]
    assert generated["KV cache"] == 16 * 60 * (2 * 2 * 2 * 32 * 4)


def test_sliding_layers_cache_their_window() -> None:
    """Of a model like Gemma; vLLM demands more to start, since the tokens in flight are kept for a while."""
    layers = {"num_hidden_layers": 12, "layer_types": ["sliding_attention"] * 10 + ["full_attention"] * 2}
    network = Qwen3Config(**NETWORK.to_dict() | layers | {"use_sliding_window": True, "sliding_window": 512})
    per_layer = 2 * 1 * 32
    long = {"lengths": Lengths(10, 2000, 6000, 14_000), "vllm_max_model_length": 16_000}
    engine = memory_of(with_engine(network=network, **long), 10 * GIB, MEASURED).engine
    assert engine is not None
    assert engine.layout.size == 2 * 16 * per_layer * 2  # two layers to a group
    assert engine.to_start == 1000 + 5 * (544 + 1) + 1  # ceil((511 + 2 x 4096) / 16) blocks of each sliding group
    assert engine.to_decode == 16 * (376 + 5 * (32 + 1)) + 1
    assert engine.to_start < engine.layout.needed(16_000) + 5 * 512 + 2 < 6 * 1000
    generated = memory_of(with_engine(network=network, use_vllm=False, **long), GIB, MEASURED).moments["rollout"]
    assert generated["KV cache"] == 16 * (2 * 16_000 + 10 * 512) * per_layer * 4


def test_a_latent_cache_is_not_counted_by_heads() -> None:
    with pytest.raises(NoEstimateError, match="latent attention"):
        memory_of(with_engine(network=DeepseekV3Config()), GIB, MEASURED)


def test_under_autocast_hf_generate_caches_in_its_dtype() -> None:
    memory = memory_of(with_engine(use_vllm=False, bf16=True), GIB, MEASURED)
    assert memory.moments["rollout"]["KV cache"] == 16 * 60 * (2 * 2 * 1 * 32 * 2)


def test_an_adapters_base_is_what_the_engine_serves() -> None:
    with_adapter = replace(MEASURED, parameters=N + 100, trainable=100)
    engine = memory_of(with_engine(use_peft=True), 10 * GIB, with_adapter).engine
    assert engine is not None
    assert engine.weights == 2 * N
