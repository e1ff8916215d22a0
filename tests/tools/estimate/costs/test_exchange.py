"""Bytes between GPUs and around the optimizer, by hand: 1,000 float32 parameters in 10 tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.tools.estimate.runs import planned
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.exchange import gradient_exchange, optimizer_work, sync_work
from trl_ext.tools.estimate.costs.operations import Polynomial
from trl_ext.tools.estimate.planned import Launch

NONE = Polynomial(np.zeros((4, 4)))
COSTS = ModelCosts(NONE, NONE, NONE, NONE, 1000, 1000, 1000, 10, 1, 100)


@pytest.mark.parametrize(
    ("stage", "checkpointing", "expected"),
    [
        (0, False, 2 * 3000),  # an all-reduce over four GPUs sends 2 x 3/4 of 4,000 bytes
        (1, False, 2 * 3000),
        (2, False, 5 * 2 * 3000),  # after each of five micro-batches
        (3, False, 5 * (3000 + 2 * 3000)),  # the sum in parts, and the weights for both passes
        (3, True, 5 * (3000 + 3 * 3000)),
    ],
)
def test_gradients_are_exchanged_as_the_stage_says(stage: int, checkpointing: bool, expected: int) -> None:
    one = planned(launch=Launch(4, 1, stage), gradient_checkpointing=checkpointing)
    assert gradient_exchange(one, COSTS, micro_batches=5).wire_bytes == expected


def test_deepspeed_sends_the_half_precision_and_ddp_the_weights() -> None:
    for stage, bytes_ in ((0, 4), (1, 2), (2, 2), (3, 2)):
        mixed = planned(launch=Launch(2, 1, stage), bf16=True)
        whole = mixed.with_settings(dtype="bfloat16")
        sent = gradient_exchange(mixed, COSTS, 1).wire_bytes
        assert sent == bytes_ // 2 * gradient_exchange(whole, COSTS, 1).wire_bytes
    two = planned(launch=Launch(4, 1, 2), bf16=True)
    assert optimizer_work(two, COSTS).wire_bytes == 1500
    three = planned(use_vllm=True, launch=Launch(4, 1, 3), bf16=True)
    assert sync_work(three, COSTS, 2).wire_bytes == 1500


def test_one_gpu_exchanges_nothing() -> None:
    for stage in range(4):
        assert gradient_exchange(planned(launch=Launch(1, 1, stage)), COSTS, 5).wire_bytes == 0


def test_an_adapter_exchanges_its_own_gradients() -> None:
    adapted = replace(COSTS, trained_parameters=10)
    assert gradient_exchange(planned(launch=Launch(2)), adapted, 5).wire_bytes == 2 * 20


@pytest.mark.parametrize(("stage", "own", "gathered"), [(0, 1000, 0), (2, 250, 3000), (3, 250, 0)])
def test_adam_moves_forty_bytes_of_each_own_parameter(stage: int, own: int, gathered: int) -> None:
    work = optimizer_work(planned(launch=Launch(4, 1, stage)), COSTS)
    assert (work.other_bytes, work.wire_bytes) == (40 * own, gathered)


def test_weights_reach_the_engine_by_its_way() -> None:
    colocated = sync_work(planned(use_vllm=True), COSTS, 2)
    # read in float32, written in bfloat16, then read and written twice
    assert (colocated.other_bytes, colocated.wire_bytes) == (1000 * (4 + 2 + 8), 0)
    assert sync_work(planned(use_vllm=True, vllm_mode="server"), COSTS, 2).wire_bytes == 2000
    assert sync_work(planned(use_vllm=True, launch=Launch(4, 1, 3)), COSTS, 2).wire_bytes == 3000
    assert sync_work(planned(use_vllm=False), COSTS, 2).other_bytes == 0
