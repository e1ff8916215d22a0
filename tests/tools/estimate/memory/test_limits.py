"""What fits, and what is said where a run does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.tools.estimate.memory.test_parts import MEASURED, STEP, with_engine
from trl_ext.tools.estimate.memory.limits import largest, preempting, refusal
from trl_ext.tools.estimate.memory.parts import GIB, Memory, memory_of
from trl_ext.tools.estimate.planned import Launch, Lengths, PlannedRun

CAPACITY = 10 * GIB
PER_ROW = GIB  # activations, with completions of 40 tokens


def estimate(made: PlannedRun) -> Memory:
    """A step whose activations grow with rows and tokens until the optimizer; checkpointing leaves a tenth."""
    tokens = made.token_limit or made.config.per_device_train_batch_size * made.lengths.max_completion
    size = PER_ROW * tokens // 40 // (10 if made.config.gradient_checkpointing else 1)
    step = {**STEP, "activations": size}
    peaks = {moment: STEP if moment == "optimizer step" else step for moment in MEASURED.peaks}
    return memory_of(made, CAPACITY, replace(MEASURED, peaks=peaks))


def said(**changes: Any) -> str | None:
    """The refusal of this run, or else what slows it."""
    made = with_engine(**changes)
    return refusal(made, estimate(made), estimate) or preempting(made, estimate(made))


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4)
    found = largest(made, estimate(made), estimate)
    assert found.setting == "micro_train_batch_size"
    assert found.micro_batch == 4  # 10 - 4 of the engine - 0.75 of CUDA, with a margin of 6 %
    assert estimate(made.with_settings(per_device_train_batch_size=4)).free >= 0
    assert estimate(made.with_settings(per_device_train_batch_size=5)).free < 0


def test_the_largest_completion_fits_and_one_more_does_not() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4, vllm_max_model_length=10_000)
    tokens = largest(made, estimate(made), estimate).completion
    assert largest(made.with_settings(vllm_max_model_length=64), estimate(made), estimate).completion == 64 - 20
    fits = replace(made, lengths=replace(made.lengths, max_completion=tokens))
    assert estimate(fits).free >= 0
    assert estimate(replace(made, lengths=replace(made.lengths, max_completion=tokens + 1))).free < 0


def test_a_micro_batch_of_limited_tokens_has_its_limit_in_tokens() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4, micro_batch_tokens=80, vllm_max_model_length=10_000)
    found = largest(made, estimate(made), estimate)
    assert found.setting == "micro_batch_tokens"
    assert estimate(made.with_settings(micro_batch_tokens=found.micro_batch)).free >= 0
    assert estimate(made.with_settings(micro_batch_tokens=found.micro_batch + 1)).free < 0
    assert found.completion == 80 - 20, "with the longest prompt a row fills it"
    assert "lower micro_batch_tokens from 1000 to 250" in str(said(vllm_mode="server", micro_batch_tokens=1000))


def test_a_longer_completion_is_measured_where_rows_are_padded() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4, micro_batch_tokens=80, vllm_max_model_length=10_000)
    tokens = made.lengths.max_completion

    def padded(other: PlannedRun) -> Memory:
        return estimate(other.with_settings(micro_batch_tokens=80 * (1 + 99 * (other.lengths.max_completion > tokens))))

    assert largest(made, estimate(made), padded).completion == tokens
    assert largest(made.with_settings(share_prompt_prefix=True), estimate(made), padded).completion == 80 - 20


def test_what_does_not_grow_fits_or_does_not() -> None:
    for tokens, most in ((80, 160), (800, 0)):
        made = with_engine(vllm_gpu_memory_utilization=0.4, micro_batch_tokens=tokens)
        memory = estimate(made)
        assert largest(made, memory, lambda _, found=memory: found).micro_batch == most


def test_the_engines_bounds_hold_the_batch_and_fit() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4)
    found = largest(made, estimate(made), estimate)
    assert estimate(made.with_settings(vllm_gpu_memory_utilization=found.fraction)).free >= 0
    assert estimate(made.with_settings(vllm_gpu_memory_utilization=found.fraction + 0.01)).free < 0
    for sequence in (64, 10_000_000):
        of_length = made.with_settings(vllm_max_model_length=sequence)
        least = largest(of_length, estimate(of_length), estimate).least_fraction
        enough = estimate(of_length.with_settings(vllm_gpu_memory_utilization=least)).engine
        assert enough is not None
        assert enough.blocks >= max(enough.to_decode, enough.to_start)


def test_a_run_that_fits_is_not_refused() -> None:
    assert said(vllm_gpu_memory_utilization=0.4) is None


def test_too_large_an_engine_is_lowered_to_what_fits() -> None:
    found = said(vllm_gpu_memory_utilization=0.9)
    assert found is not None
    assert "lower vllm_gpu_memory_utilization from 0.9 to 0.71" in found
    assert said(vllm_gpu_memory_utilization=0.71) is None


def test_an_engine_that_cannot_start_is_not_one_that_preempts() -> None:
    assert "it would not start" in str(said(vllm_gpu_memory_utilization=0.15))
    assert "set it to 0.16" in str(said(vllm_gpu_memory_utilization=0.15))
    preempted = str(said(vllm_gpu_memory_utilization=0.16, vllm_max_num_seqs=300_000))
    assert "would preempt" in preempted
    assert "set it to" in preempted


def test_vllm_keeps_a_block_empty() -> None:
    """An engine with the blocks of one longest sequence and none more does not start."""
    whole = with_engine(vllm_gpu_memory_utilization=1.0)
    engine = estimate(whole).engine
    assert engine is not None
    for blocks, starts in ((engine.to_start - 1, False), (engine.to_start, True)):
        memory = memory_of(whole, engine.total_for(blocks), MEASURED)
        assert memory.engine is not None
        assert memory.engine.blocks == blocks
        assert memory.engine.tokens >= memory.engine.sequence
        assert ("would not start" not in str(refusal(whole, memory, estimate))) is starts


def test_an_engine_that_preempts_by_a_guess_is_not_refused() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.16, vllm_max_num_seqs=300_000)
    assert refusal(made, estimate(made), estimate) is None
    small = with_engine(vllm_gpu_memory_utilization=0.15)
    assert "would not start" in str(refusal(small, estimate(small), estimate))
    assert preempting(small, estimate(small)) is None


def test_a_sleeping_engine_is_not_made_smaller_for_training() -> None:
    changes = {
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.3,
        "per_device_train_batch_size": 32,
        "step": 64,
    }
    assert "lower micro_train_batch_size from 32 to 8" in str(said(**changes))
    assert "lower vllm_gpu_memory_utilization from 0.99 to" in str(
        said(vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.99)
    )


def test_a_completion_of_one_token_has_its_limits() -> None:
    made = with_engine(vllm_gpu_memory_utilization=0.4, lengths=Lengths(10, 20, 1, 1))
    assert largest(made, estimate(made), estimate).completion == 1


def test_sequences_are_lowered_where_no_larger_engine_fits() -> None:
    found = str(said(vllm_gpu_memory_utilization=0.5, vllm_max_num_seqs=2_000_000))
    assert "lower vllm_max_num_seqs to" in found
    number = int(found.rpartition(" ")[2])
    assert said(vllm_gpu_memory_utilization=0.5, vllm_max_num_seqs=number) is None
    assert said(vllm_gpu_memory_utilization=0.5, vllm_max_num_seqs=number + 20_000) is not None


def test_without_an_engine_the_micro_batch_is_lowered() -> None:
    found = said(vllm_mode="server", per_device_train_batch_size=32, step=64)
    assert found is not None
    assert "lower micro_train_batch_size from 32 to 8" in found


def test_a_single_row_that_does_not_fit_is_checkpointed() -> None:
    lengths = replace(with_engine().lengths, max_completion=2000)
    assert "set gradient_checkpointing: true" in str(
        said(vllm_mode="server", per_device_train_batch_size=1, lengths=lengths)
    )


def test_an_engine_sleeps_where_both_fit_in_turn() -> None:
    long = replace(with_engine().lengths, max_completion=2000)
    changes = {
        "vllm_gpu_memory_utilization": 0.7,
        "vllm_max_num_seqs": 300_000,
        "per_device_train_batch_size": 1,
        "lengths": long,
    }
    assert "set vllm_enable_sleep_mode: true" in str(said(**changes, gradient_checkpointing=True))
    assert said(**changes, gradient_checkpointing=True, vllm_enable_sleep_mode=True) is None


def test_no_step_is_measured_where_none_can_help() -> None:
    """Weights and optimizer that are too large by themselves: one step says so, and each takes ten seconds."""
    made = with_engine(vllm_gpu_memory_utilization=0.99, vllm_max_num_seqs=2_000_000)
    found = estimate(made)
    assert "it needs" in str(refusal(made, found, lambda _: pytest.fail("a step was measured")))
    assert largest(made, found, lambda _: pytest.fail("a step was measured")).micro_batch == 0


def test_where_no_setting_helps_it_is_said_what_does() -> None:
    lengths = replace(with_engine().lengths, max_completion=200_000)
    found = str(
        said(vllm_mode="server", per_device_train_batch_size=1, lengths=lengths, launch=Launch(2, zero_stage=2))
    )
    assert "ZeRO-3" in found
    assert "an adapter" in found
