"""Which side waits, and at which ratio of sampling to training another use of two GPUs is faster: by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.tools.estimate.runs import planned
from tests.tools.estimate.test_roofline import CPU, H100, costs, estimated
from trl_ext.tools.estimate.costs.ceilings import Machine
from trl_ext.tools.estimate.costs.sampling import Sampling
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.sides import Sides, TwoGpus, turning_ratios

IN_TURN = Sides(sampling=3.0, training=5.0, push=0.5)
SERVED = {"use_vllm": True, "vllm_mode": "server"}


def test_a_step_is_the_sum_or_the_longer_side() -> None:
    ahead, slow = replace(IN_TURN, ahead=True), Sides(7.0, 5.0, 0.5, ahead=True)
    assert (IN_TURN.seconds, ahead.seconds, slow.seconds) == (8.5, 5.5, 7.5)
    assert (IN_TURN.policy_waits, IN_TURN.engine_waits) == (3.0, 5.0)
    assert (ahead.policy_waits, ahead.engine_waits) == (0.0, 2.0)
    assert (slow.policy_waits, slow.engine_waits) == (2.0, 0.0)
    assert "in turn: 8.50 s" in IN_TURN.of_server()
    assert IN_TURN.of_server().endswith("the policy waits 3.00 s, the server 5.00 s")
    assert ahead.of_server().endswith("training; the server waits 2.00 s")


def test_perfect_halving_is_never_slower() -> None:
    assert turning_ratios(0.5, 0.5) is None
    for ratio in (0.5, 1.0, 2.0):
        halved = TwoGpus(Sides(ratio / 2, 0.5, 0.0), Sides(ratio, 1.0, 0.0))
        colocated, _, ahead = (side.seconds for side in halved.sides().values())
        assert ahead >= colocated
        assert (ahead == colocated) == (ratio == 1.0)


@pytest.mark.parametrize(
    ("shares", "turns"),
    [
        ((0.75, 0.5, 0.0), (2 / 3, 2.0)),  # 0.75 x + 0.5 is 1 at 2/3, and x at 2
        ((1.0, 0.5, 0.0), (0.5, math.inf)),  # however few rows, decoding takes as long
        ((0.5, 0.5, 0.1), (0.8, 1.2)),  # a push that takes a tenth of training longer
        ((0.5, 1.2, 0.0), (0.0, 2.4)),
    ],
)
def test_where_it_turns_by_hand(shares: tuple[float, float, float], turns: tuple[float, float]) -> None:
    assert turning_ratios(*shares) == pytest.approx(turns)


def test_modes_are_equal_where_it_turns() -> None:
    compared = TwoGpus(Sides(3.0, 3.5, 0.1), Sides(4.0, 6.0, 0.2))
    assert compared.ratio == pytest.approx(2 / 3)
    for ratio in compared.turns() or ():
        colocated, _, ahead = (side.seconds for side in compared.sides(ratio).values())
        assert ahead == pytest.approx(colocated)
    # 0.75 x + 3.5/6 + 0.1/6 = 1 + 0.2/6 at 0.58
    assert "the fastest: 1 + 1, rollout_ahead 1" in compared.table()
    assert "the fastest from 0.58 to 2.27" in compared.verdict()


def test_a_planned_run_ahead_waits_for_the_longer_side() -> None:
    in_turn, ahead = (estimated(CPU, **SERVED, rollout_ahead=on) for on in (0, 1))
    one, other = in_turn.sides, ahead.sides
    assert one.seconds == pytest.approx(one.sampling + one.training + one.push)
    assert other.seconds == pytest.approx(max(one.sampling, one.training) + one.push)
    rewards = 16 * Efficiency().reward_seconds
    assert ahead.rates.completion_token == pytest.approx((other.policy_waits + rewards) / 160)
    assert in_turn.rates.completion_token == pytest.approx((one.sampling + rewards) / 160)
    assert "rollouts ahead" in ahead.table()
    assert "in turn" in in_turn.table()
    assert "in turn" not in estimated(H100, use_vllm=True).table()


def test_a_server_has_its_gpus_memory_for_itself() -> None:
    small = replace(H100, memory=costs().parameters * 6)
    own, shared = (
        Sampling(planned(use_vllm=True, vllm_mode=mode), costs(), Machine(small, Efficiency())).slots
        for mode in ("server", "colocate")
    )
    assert own > shared
