"""A run's phases, rates and plan: what adds up to what, and how they answer to a shape's settings."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.tools.estimate.runs import network, planned
from trl_ext.tools.estimate.costs.counting import ModelCosts, count_model
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import GPUS, Gpu
from trl_ext.tools.estimate.plan import BudgetPlan, seconds_of
from trl_ext.tools.estimate.planned import Launch, Lengths
from trl_ext.tools.estimate.roofline import PHASES, estimate_time
from trl_ext.tools.estimate.timing import Timing

H100 = GPUS["h100"]
CPU = Gpu("cpu", 2**34, 1e11, 1e11, 1e11, 1e10, 1e10, asynchronous=False)


@functools.cache
def costs() -> ModelCosts:
    return count_model(network())


def estimated(gpu: Gpu = CPU, efficiency: Efficiency | None = None, **changes: Any) -> Timing:
    return estimate_time(planned(**changes), gpu, efficiency, costs())


def seconds(timing: Timing, name: str) -> float:
    return next(phase.seconds for phase in timing.phases if phase.name == name)


@pytest.mark.slow
def test_rates_and_phases_say_the_same() -> None:
    """A rollout of 16 completions of 10 tokens, of which half are trained on, in two steps."""
    timing = estimated(trained_fraction=0.5)
    rollout = sum(seconds(timing, name) for name in ("prompts", "decoding", "rewards"))
    training = seconds(timing, "old log-probabilities") + 2 * seconds(timing, "micro-batches")
    assert timing.rates.completion_token == pytest.approx(rollout / 160)
    assert timing.rates.trained_token == pytest.approx(training / 80)
    assert timing.rates.step == pytest.approx(seconds(timing, "optimizer") + Efficiency().step_seconds)
    one = seconds_of(timing.rates, timing.workload, 1)
    assert one["rollout"] == pytest.approx(rollout / 2)
    assert one["training"] == pytest.approx(training / 2)
    assert timing.rates.problem == pytest.approx(seconds(timing, "validation on the way") / 20)


@pytest.mark.slow
def test_the_plan_is_the_one_of_a_measured_run() -> None:
    timing = estimated()
    found = timing.plan(1000.0)
    assert isinstance(found, BudgetPlan)
    assert sum(found.seconds.values()) <= 1000.0
    validations = found.steps // 10 + 2  # one at the start, one at the end
    line = (
        f"{found.steps} optimizer steps, {found.steps / 2:.0f} rollouts and {validations} validations fit into 1000 s"
    )
    assert line in timing.table(1000.0)
    assert "optimizer steps" not in timing.table()


@pytest.mark.moderate
def test_old_log_probabilities_are_those_of_later_steps() -> None:
    assert seconds(estimated(step=16), "old log-probabilities") == 0.0  # one update: on-policy
    assert seconds(estimated(step=4, use_vllm=True, old_log_probs="sampler"), "old log-probabilities") == 0.0
    one, two = (seconds(estimated(step=step), "old log-probabilities") for step in (8, 4))
    assert two == pytest.approx(3 * one / 2, rel=0.3)  # three of four steps instead of one of two
    reference = seconds(estimated(step=16, beta=0.1), "old log-probabilities")
    assert reference > 0


def test_checkpointing_runs_the_decoder_once_more() -> None:
    plain, checkpointed = (seconds(estimated(gradient_checkpointing=on), "micro-batches") for on in (False, True))
    assert 1.1 < checkpointed / plain < 1.5


def test_rows_that_are_left_out_take_no_time() -> None:
    half, whole = (seconds(estimated(trained_fraction=part, step=16), "micro-batches") for part in (0.5, 1.0))
    assert half == pytest.approx(whole / 2, rel=0.1)


def test_gpus_share_the_rows_and_exchange_gradients() -> None:
    one, two = (estimated(H100, step=16, launch=Launch(gpus, 1, 2)) for gpus in (1, 2))
    assert seconds(one, "gradient exchange") == 0.0
    assert seconds(two, "gradient exchange") > 0.0
    assert seconds(two, "micro-batches") < seconds(one, "micro-batches")
    assert next(p.bound for p in two.phases if p.name == "gradient exchange") == "interconnect"


def test_hf_has_no_weights_to_hand_over() -> None:
    assert seconds(estimated(H100), "weights to the engine") == 0.0
    assert seconds(estimated(H100, use_vllm=True), "weights to the engine") > 0.0


def test_decoding_on_a_gpu_reads_weights_cache_and_logits() -> None:
    """Four rows of the same 5 tokens after prompts of 8, without Python: by hand."""
    lengths = Lengths(8, 8, 5, 5)
    free = Efficiency(compute=1e9, memory=1.0, engine_step_seconds=0.0)
    timing = estimated(H100, free, use_vllm=True, generation_batch_size=4, step=4, lengths=lengths)
    weights = 5 * costs().read_parameters * 4
    cache = 4 * sum(range(9, 14)) * costs().kv_elements * 4
    logits = 5 * 4 * 100 * 24
    assert seconds(timing, "decoding") == pytest.approx((weights + cache + logits) / H100.bandwidth, rel=1e-6)
    assert next(p.bound for p in timing.phases if p.name == "decoding") == "memory bandwidth"


def test_sliding_layers_read_and_hold_their_window() -> None:
    lengths, free = Lengths(8, 8, 5, 5), Efficiency(compute=1e9, memory=1.0, engine_step_seconds=0.0)
    sliding = network(
        sliding_window=2, use_sliding_window=True, layer_types=["full_attention"] + ["sliding_attention"] * 2
    )
    timing = estimated(H100, free, use_vllm=True, generation_batch_size=4, step=4, lengths=lengths, network=sliding)
    weights, logits = 5 * costs().read_parameters * 4, 5 * 4 * 100 * 24
    cache = 4 * 5 * (11 + 2 + 2) / 3 * costs().kv_elements * 4  # 11 tokens on average, of which two layers see 2
    assert seconds(timing, "decoding") == pytest.approx((weights + cache + logits) / H100.bandwidth, rel=1e-6)


def test_an_engine_decodes_what_its_cache_holds() -> None:
    small = replace(H100, memory=costs().parameters * 4)  # of which 0.3 are less than the weights
    few, many = (estimated(gpu, use_vllm=True, vllm_dtype="float32") for gpu in (small, H100))
    assert seconds(few, "decoding") > 5 * seconds(many, "decoding")  # one row after the other


def test_sft_has_no_rollouts() -> None:
    timing = estimated(recipe="sft")
    assert seconds(timing, "decoding") == seconds(timing, "rewards") == 0.0
    assert seconds(timing, "micro-batches") > 0.0


def test_lower_precision_is_quicker() -> None:
    quick = Efficiency(op_seconds=0.0)
    full, half = (seconds(estimated(H100, quick, bf16=on), "micro-batches") for on in (False, True))
    assert half <= full


def test_a_pilots_pace_holds_for_its_phases_and_its_plan() -> None:
    before = estimated()
    measured = replace(
        before.rates, start=7.0, completion_token=3 * before.rates.completion_token,
        trained_token=before.rates.trained_token / 2, step=2 * before.rates.step, sync=0.0,
    )  # fmt: skip
    paced = estimated(efficiency=Efficiency().measured(before, measured))
    assert vars(paced.rates) == pytest.approx(vars(measured))
    assert seconds(paced, "decoding") == pytest.approx(3 * seconds(before, "decoding"))
    # another shape keeps the pace
    other, plain = (
        estimated(efficiency=Efficiency().measured(before, measured), generation_batch_size=32),
        estimated(generation_batch_size=32),
    )
    assert other.rates.completion_token == pytest.approx(3 * plain.rates.completion_token)


def test_a_second_pilot_corrects_the_first() -> None:
    before = estimated()
    once = Efficiency().measured(before, replace(before.rates, problem=2 * before.rates.problem))
    twice = once.measured(estimated(efficiency=once), replace(before.rates, problem=6 * before.rates.problem))
    assert twice.pace["validation"] == pytest.approx(6.0)


def test_the_check_of_a_gpu_gives_the_pace() -> None:
    before = estimated(H100, use_vllm=True)
    found = {"rollout_tokens_per_s": 50.0, "training_tokens_per_s": 90.0, "sync_s": 0.5, "start_s": 60.0}
    rates = estimated(H100, Efficiency().checked(before, found), use_vllm=True).rates
    # its training tokens are prompts of 8 and completions of 10: 18 are computed for 10
    expected = (60.0, 1 / 50, 1.8 / 90, 0.5)
    assert (rates.start, rates.completion_token, rates.trained_token, rates.sync) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no training_tokens_per_s, start_s; python -m"):
        Efficiency().checked(before, {"rollout_tokens_per_s": 1.0})


def test_every_phase_is_in_the_table() -> None:
    timing = estimated(H100, use_vllm=True, launch=Launch(2))
    assert [phase.name for phase in timing.phases] == list(PHASES)
    assert all(name in timing.table() for name in PHASES)
