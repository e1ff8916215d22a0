"""The micro-batches of a step by the trainer's planner, and what they compute, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tools.estimate.runs import network, planned
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.micro_batches import (
    MicroBatches,
    plan_step,
    scoring_work,
    shares_prompts,
    training_work,
)
from trl_ext.tools.estimate.costs.operations import Polynomial
from trl_ext.tools.estimate.costs.rollouts import spread_lengths
from trl_ext.tools.estimate.planned import Launch, Lengths


def counting(*terms: float) -> Polynomial:
    """FLOPs by these coefficients of 1, B Q, B Q K and B K; nothing else."""
    return Polynomial(np.array([terms, (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)], dtype=float))


COSTS = ModelCosts(
    decoder=counting(0, 1, 0, 0), decoder_trained=counting(0, 3, 1, 0), head=counting(0, 10, 0, 0),
    head_trained=counting(0, 40, 0, 0), parameters=1, read_parameters=1, trained_parameters=1, tensors=1,
    kv_elements=1, vocabulary=100,
)  # fmt: skip
ALONE = MicroBatches(np.array([2.0]), np.array([5.0]), np.array([7.0]), None)
SHARED = MicroBatches(np.array([2.0, 3.0]), np.array([5.0, 5.0]), np.array([7.0, 4.0]), ((1, 5),))


def flops(works: Any) -> float:
    return float(sum(np.sum(work.flops) for work in works))


def test_a_micro_batch_computes_prompts_and_completions() -> None:
    # two rows of 12 tokens: 3 each and 12 keys each; the head of 7 tokens on a GPU, of all elsewhere
    decoder = 2 * 12 * (3 + 12)
    assert flops(training_work(COSTS, ALONE, checkpointing=False, on_gpu=True)) == decoder + 2 * 7 * 40
    assert flops(training_work(COSTS, ALONE, checkpointing=False, on_gpu=False)) == decoder + 2 * 12 * 40
    assert flops(training_work(COSTS, ALONE, checkpointing=True, on_gpu=True)) == decoder + 2 * 7 * 40 + 2 * 12
    assert flops(scoring_work(COSTS, ALONE, on_gpu=True)) == 2 * 12 + 2 * 7 * 10


def test_shared_prompts_are_computed_once() -> None:
    own = 2 * 7 * (3 + 11) + 3 * 4 * (3 + 8)  # keys: 4 tokens of the prompt, whose last is the first query
    prompt = 4 * (3 + 4)
    head = (2 * 7 + 3 * 4) * 40
    assert flops(training_work(COSTS, SHARED, checkpointing=False, on_gpu=True)) == own + prompt + head


def test_a_gpu_folds_logits_instead_of_copying_them() -> None:
    moving = Polynomial(np.array([[0, 0, 0, 0], [0, 0, 0, 0], [5, 9999, 0, 0], [0, 0, 0, 0]], dtype=float))
    costs = ModelCosts(COSTS.decoder, COSTS.decoder_trained, moving, moving, 1, 1, 1, 1, 1, vocabulary=100)
    (work,) = training_work(costs, ALONE, checkpointing=False, on_gpu=True)
    assert work.other_bytes.tolist() == [5 + 2 * 7 * 3 * 100 * 2]
    (work,) = scoring_work(costs, ALONE, on_gpu=True)
    assert work.other_bytes.tolist() == [5 + 2 * 7 * 100 * 2]
    (work,) = training_work(costs, ALONE, checkpointing=False, on_gpu=False)
    assert work.other_bytes.tolist() == [5 + 2 * 12 * 9999]


def test_groups_without_a_gradient_are_left_out() -> None:
    half = planned(step=16, trained_fraction=0.5)
    assert plan_step(half).rows.sum() == 8
    assert plan_step(planned(step=16, trained_fraction=0.5, skip_zero_advantage_rows=False)).rows.sum() == 16


def test_a_gpu_has_its_part_of_a_step() -> None:
    assert plan_step(planned(step=16, launch=Launch(4))).rows.sum() == 4


def test_micro_batches_keep_to_their_tokens() -> None:
    found = plan_step(planned(step=16, micro_batch_tokens=60, lengths=Lengths(8, 8, 10, 20)))
    assert found.rows.sum() == 16
    assert (found.rows * (found.prompts + found.completions)).max() <= 60


def test_shared_prompts_are_planned_where_the_trainer_shares() -> None:
    found = plan_step(planned(step=16, share_prompt_prefix=True))
    assert found.shared is not None
    assert sum(prompts for prompts, _ in found.shared) == 4  # sixteen rows in groups of four
    assert plan_step(planned(step=16)).shared is None


def test_on_shared_prompts_completions_have_no_padding() -> None:
    lengths = Lengths(8, 8, 10, 20)
    found = plan_step(planned(step=16, share_prompt_prefix=True, lengths=lengths))
    assert (found.rows * found.completions).sum() == pytest.approx(spread_lengths(16, 10, 20).sum())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"share_prompt_prefix": False}, False),
        ({"dynamic_micro_batches": False}, False),
        ({"attn_implementation": "flash_attention_2"}, False),
        ({"attn_implementation": "eager"}, False),
        ({"network": network(use_sliding_window=True, sliding_window=8, max_window_layers=1)}, False),
    ],
)
def test_what_the_trainer_refuses_to_share_is_not_shared(changes: dict[str, Any], expected: bool) -> None:
    assert shares_prompts(planned(**{"share_prompt_prefix": True} | changes)) is expected
