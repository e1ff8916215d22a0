"""A step of the real trainers on fake tensors: what is kept by settings whose effect is known."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import Qwen3Config
from transformers.utils import is_bitsandbytes_available

from scripts.benchmarks import estimate_memory
from tests.tools.estimate.memory.test_parts import with_engine
from trl_ext.step import attention
from trl_ext.tools.estimate.memory.ledger import ALLOCATION
from trl_ext.tools.estimate.memory.parts import Measured
from trl_ext.tools.estimate.memory.quantized import packed_bytes
from trl_ext.tools.estimate.memory.step import MOMENTS, measure
from trl_ext.tools.estimate.memory.trainers import rows_of_step
from trl_ext.tools.estimate.planned import Lengths, PlannedRun

LAYERS, VOCABULARY = 2, 512
NETWORK = Qwen3Config(
    hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip


needs_bitsandbytes = pytest.mark.skipif(not is_bitsandbytes_available(), reason="needs bitsandbytes")


def run(**changes: Any) -> PlannedRun:
    """A run with few long rows."""
    lengths = Lengths(prompt=16, longest_prompt=32, completion=64, max_completion=128)
    groups = {"num_generations": 2} if changes.get("recipe", "grpo") == "grpo" else {}
    return with_engine(**{"network": NETWORK, "lengths": lengths} | groups | changes)


def activations(measured: Measured, moment: str = "forward") -> int:
    """Bytes at the moment's peak."""
    return measured.peaks[moment]["activations"]


@pytest.fixture(scope="module")
def plain() -> Measured:
    return measure(run())


@pytest.mark.moderate
def test_what_is_static_has_the_size_of_the_parameters(plain: Measured) -> None:
    size = 4 * plain.parameters
    assert plain.trainable == plain.parameters > VOCABULARY * 64
    buffers = plain.resident["parameters"] - size
    assert 0 <= buffers < 4096
    assert plain.peaks["backward"]["gradients"] == pytest.approx(size, rel=0.01)
    assert plain.resident["optimizer"] == pytest.approx(2 * size, rel=0.03)
    assert plain.resident["gradients"] == 0
    assert plain.largest_parameter == VOCABULARY * 64


def test_a_rollout_is_kept_with_the_micro_batches_of_it(plain: Measured) -> None:
    tokens = 4 * ((32 + 128) * (8 + 8) + 128 * 4)  # bytes of ids and masks, and of log-probabilities
    # A count; advantages and groups of the rollout and of two micro-batches; which tokens of those are trained on.
    small = (1 + 2 + 2 * 2 + 2) * ALLOCATION
    assert plain.rows == 4
    assert plain.resident["batches"] == 2 * tokens + small
    assert {parts["batches"] for parts in plain.peaks.values()} == {plain.resident["batches"]}


@pytest.mark.slow
def test_checkpointing_keeps_less_of_the_forward_pass() -> None:
    kept = activations(measure(run(share_prompt_prefix=False)))
    recomputed = activations(measure(run(gradient_checkpointing=True)))
    assert recomputed < kept / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bf16", "checkpointing"), [(False, False), (False, True), (True, False), (True, True)], ids=str
)
def test_shared_prompts_take_no_more_than_trls_step(bf16: bool, checkpointing: bool) -> None:
    """Of a network whose gradients are larger than a micro-batch's activations: they are not kept twice."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    network = Qwen3Config(**size, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=VOCABULARY)
    settings = {"network": network, "num_generations": 8, "bf16": bf16, "gradient_checkpointing": checkpointing}
    ours = measure(run(**settings, share_prompt_prefix=True))
    trls = measure(run(**settings, dynamic_micro_batches=False, skip_zero_advantage_rows=False))
    assert ours.peaks["forward"]["activations"] > 0
    assert max(map(ours.total, MOMENTS)) <= max(map(trls.total, MOMENTS))
    assert ours.peaks["backward"]["backward"] < ours.parameters, "a quarter of the gradients' bytes"


@pytest.mark.slow
def test_a_gpus_rows_in_one_are_attended_to_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention._ByRowOnCPU, "forward", lambda *_: pytest.fail("as on a CPU"))
    settings = {"num_generations": 8, "lengths": Lengths(64, 64, 16, 16), "share_prompt_prefix": True}
    assert activations(measure(run(**settings, bf16=True))) > 0


@pytest.mark.slow
def test_eager_attention_keeps_the_scores(plain: Measured) -> None:
    scores = 4 * 2 * 2 * (32 + 128) ** 2  # bytes, rows, heads, tokens squared
    assert activations(measure(run(attn_implementation="eager"))) > activations(plain) + scores


@pytest.mark.moderate
def test_a_step_with_trls_own_loss_is_estimated_too(plain: Measured) -> None:
    found = measure(run(policy_loss=None))
    assert activations(found) == pytest.approx(activations(plain), rel=0.5)


@pytest.mark.slow
def test_a_wider_micro_batch_keeps_more() -> None:
    assert activations(measure(run(per_device_train_batch_size=4, num_generations=4))) > 1.8 * activations(
        measure(run(num_generations=4))
    )


@pytest.mark.slow
def test_micro_batches_are_as_wide_as_their_tokens_say() -> None:
    wider = activations(measure(run(micro_batch_tokens=4 * 160, num_generations=4)))
    assert wider == pytest.approx(2 * activations(measure(run(num_generations=4))), rel=0.1)


@pytest.mark.slow
def test_autocast_keeps_copies_of_the_weights() -> None:
    cast = measure(run(bf16=True))
    assert cast.resident["parameters"] >= 4 * cast.parameters
    linear = cast.parameters - VOCABULARY * 64
    assert cast.peaks["forward"]["weight casts"] == pytest.approx(2 * linear, rel=0.05)


@pytest.mark.moderate
def test_an_adapter_has_gradients_of_its_own_only() -> None:
    measured = measure(run(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"]))
    assert measured.trainable == LAYERS * 4 * ((64 + 64) + (64 + 32))
    assert measured.peaks["optimizer step"]["gradients"] < 0.05 * 4 * measured.parameters


@pytest.mark.slow
def test_float16_takes_what_bfloat16_does() -> None:
    found = [measure(run(**{name: True})) for name in ("fp16", "bf16")]
    assert found[0] == found[1]


def test_packed_weights_have_scales() -> None:
    assert packed_bytes(64, 128, 8, nested=False) == 64 * 128 + 64 * 4, "one of float32 for a row"
    assert packed_bytes(64, 128, 4, nested=False) == 64 * 128 // 2 + 128 * 4, "one of float32 for 64 weights"
    assert packed_bytes(512, 128, 4, nested=True) == 512 * 128 // 2 + 1024 + 4 * 4, "of a byte; one for 256"


@pytest.mark.slow
def test_quantized_weights_are_dequantized_for_each_pass() -> None:
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    plain = measure(run(**adapter))
    four, eight = (measure(run(**adapter, **{f"load_in_{bits}bit": True})) for bits in (4, 8))
    head = VOCABULARY * 64
    linear = LAYERS * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    assert plain.parameters == four.parameters == eight.parameters, "as many numbers"
    saved = plain.resident["parameters"] - four.resident["parameters"]
    adapters = 2 * plain.trainable  # which TRL has in bfloat16
    assert saved == pytest.approx(linear * (4 - 0.5 - 4 / 64) + adapters, rel=0.02)
    assert four.largest_parameter == four.largest_layer == head, "the embedding, which is the LM head, is not quantized"
    assert eight.resident["parameters"] > four.resident["parameters"]
    assert activations(eight) > activations(four), "8-bit layers keep their input"


@pytest.mark.moderate
def test_a_reference_model_is_a_second_copy(plain: Measured) -> None:
    measured = measure(run(beta=0.1))
    assert measured.peaks["backward"]["reference"] == pytest.approx(4 * plain.parameters, rel=0.01)
    assert plain.resident["reference"] == 0


@pytest.mark.slow
def test_supervised_steps_have_rows_of_the_longest_length() -> None:
    half, whole = (measure(run(recipe="sft", max_length=n)) for n in (80, 160))
    assert activations(whole) == pytest.approx(2 * activations(half), rel=0.15)


@pytest.mark.slow
def test_a_single_micro_batch_has_no_earlier_gradients(plain: Measured) -> None:
    alone = measure(run(step=2))
    assert alone.peaks["forward"]["gradients"] == 0
    assert plain.peaks["forward"]["gradients"] >= 4 * plain.parameters


def test_the_fake_step_has_whole_groups() -> None:
    assert rows_of_step(run(per_device_train_batch_size=4, num_generations=6)) == 24
    assert rows_of_step(run(recipe="sft", per_device_train_batch_size=4)) == 8


@pytest.mark.slow
def test_the_fake_step_fills_a_micro_batch_of_limited_tokens() -> None:
    most = {"micro_batch_tokens": 16 * 128, "num_generations": 4, "step": 64}
    assert rows_of_step(run(**most)) == 2 * 16, "of each prompt"
    assert rows_of_step(run(**most, share_prompt_prefix=True)) == 16, "together"
    assert rows_of_step(run(**most, share_prompt_prefix=True, attn_implementation="flash_attention_2")) == 2 * 16, (
        "not shared"
    )
    assert rows_of_step(run(**{**most, "step": 12})) == 2 * 12, "a step has no more"
    half = activations(measure(run(**{**most, "micro_batch_tokens": 8 * 128})))
    assert activations(measure(run(**most))) == pytest.approx(2 * half, rel=0.1)


def test_what_an_earlier_profile_saw_is_not_of_this_one() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        earlier = torch.zeros(4096)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        passing = torch.zeros(8)
        del passing
        with record_function("moment:forward"):
            del earlier
            kept = torch.zeros(1024)
    assert estimate_memory.peaks(profiler, at_start=100)["forward"] == 100 + kept.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "checkpointing",
        *(
            pytest.param(c, marks=pytest.mark.nightly)
            for c in ("plain", "eager attention", "prompts not shared", "lora")
        ),
        pytest.param("lora, 4 bits", marks=[pytest.mark.nightly, needs_bitsandbytes]),
    ],
)
def test_a_real_step_has_the_estimated_memory(case: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = estimate_memory.run("1m", case, estimate_memory.Work(), Path(folder))
        estimated = estimate_memory.estimate("1m", case, estimate_memory.Work(), Path(folder), on_gpu=False)
    parts = estimate_memory.compare(measured["peaks"], measured["static"], estimated)
    assert {"parameters", "gradients", "optimizer", "peak, forward", "peak, backward"} <= parts.keys()
    most = 0.02 if case.endswith("bits") else 0.01  # bitsandbytes' kernels for a CPU keep what they need for themselves
    off = {name: round(part["error"], 3) for name, part in parts.items() if abs(part["error"]) >= most}
    assert not off
