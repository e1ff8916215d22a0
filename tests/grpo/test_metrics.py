from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from trl_ext.grpo.metrics import StepMetrics
from trl_ext.grpo.rollout import Rollout, sample_metrics


def test_mean_is_over_all_tokens_of_the_step() -> None:
    metrics = StepMetrics()
    metrics.add({"a": torch.tensor([[1.0, 9.0]])}, torch.tensor([[True, False]]))
    metrics.add({"a": torch.tensor([[3.0, 5.0]]), "b": torch.tensor([[1.0, 0.0]])}, torch.tensor([[True, True]]))
    found = metrics.finish(Accelerator(cpu=True), counts={"b": 4.0})
    assert found == {"a": 3.0, "b": 0.25}  # (1 + 3 + 5) / 3; 1 / 4


def test_maximum_is_the_largest_and_unmeasured_is_absent() -> None:
    metrics = StepMetrics()
    for values in ([0.5], [2.0, 1.0], []):
        metrics.add_max("worst", torch.tensor(values))
    metrics.add_max("none", torch.tensor([]))
    metrics.add({"nothing": torch.zeros(1, 2), "counted": torch.zeros(1, 2)}, torch.zeros(1, 2, dtype=torch.bool))
    assert metrics.finish(Accelerator(cpu=True), {"counted": 5.0}) == {"worst": 2.0, "counted": 0.0}


def test_it_is_empty_again_after_each_step() -> None:
    metrics = StepMetrics()
    metrics.add({"a": torch.ones(1, 2)}, torch.ones(1, 2, dtype=torch.bool))
    metrics.add_max("b", torch.ones(1))
    metrics.finish(Accelerator(cpu=True), {})
    assert metrics.finish(Accelerator(cpu=True), {}) == {}


def test_a_masked_infinity_does_not_reach_the_mean() -> None:
    metrics = StepMetrics()
    metrics.add({"a": torch.tensor([[1.0, torch.inf]])}, torch.tensor([[True, False]]))
    assert metrics.finish(Accelerator(cpu=True), {})["a"] == pytest.approx(1.0)


def rollout_of(lengths: list[float], finished: list[bool], correct: list[float]) -> Rollout:
    unread = torch.zeros(len(lengths))
    return Rollout(
        unread[:, None], unread, torch.tensor(finished), torch.tensor(lengths).float(), torch.tensor(correct).float(), 0
    )


def test_lengths_and_entropy_are_of_all_ranks() -> None:
    asked: list[torch.Size] = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        asked.append(own.shape)
        # and a rank with one incorrect response of 7 tokens and 2 nats per token
        return torch.cat([own, torch.tensor([[1, 1, 7, 0, 0, 1, 7, 7, 14, 7, -7]])])

    rollout = rollout_of([2, 3, 5, 12], finished=[True, True, True, False], correct=[0, 1, 1, torch.nan])
    rows = [{"entropy_estimate": nats} for nats in (1.0, None, None, 0.5)]
    found, sampled = sample_metrics(rollout, rows, gather)
    names = ("clipped_ratio", "mean_terminated_length", "min_terminated_length", "max_terminated_length")
    assert [found[f"completions/{name}"] for name in names] == pytest.approx([0.2, 17 / 4, 2, 7])
    assert sampled == {
        "completions/mean_length_correct": 4,
        "completions/mean_length_incorrect": 4.5,
        "sampling/entropy_estimate": (2 * 1 + 12 * 0.5 + 14) / (2 + 12 + 7),
    }
    assert asked == [(1, 11)]


def test_lengths_where_no_response_ended() -> None:
    endless = rollout_of([3, 4], finished=[False, False], correct=[1, 1])
    found, sampled = sample_metrics(endless, [{"entropy_estimate": None}] * 2, lambda own: own)
    assert list(found.values()) == [1, 0, 0, 0]
    assert sampled == {"completions/mean_length_correct": 3.5}
