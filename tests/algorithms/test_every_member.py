"""A member of an axis has a value by hand, a transcription of its formula, and a planted fault in its own lines."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.algorithms import (
    test_advantages,
    test_aggregation,
    test_distillation,
    test_kl,
    test_papers,
    test_papers_advantages,
    test_papers_other_axes,
    test_policy_losses,
    test_sampler_correction,
    test_selection,
)
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.distillation import DISTILLATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.registry import Registry

# axis -> its members, the test of their values by hand, and the transcriptions by name
AXES: dict[str, tuple[Registry, Callable[..., None], Mapping[str, object]]] = {
    "advantage": (ADVANTAGES, test_advantages.test_values_by_hand, test_papers_advantages.PAPERS),
    "policy_loss": (
        POLICY_LOSSES, test_policy_losses.test_values_by_hand, {**test_papers.PAPERS, **test_papers.OF_STEP},
    ),
    "aggregation": (AGGREGATIONS, test_aggregation.test_values_by_hand, test_papers_other_axes.AGGREGATED),
    "kl_estimator": (KL_ESTIMATORS, test_kl.test_values_by_hand, test_papers_other_axes.PENALTIES),
    "sampler_weight": (SAMPLER_WEIGHTS, test_sampler_correction.test_weights_by_hand, test_papers_other_axes.WEIGHTS),
    "sampler_rejection": (
        SAMPLER_REJECTIONS, test_sampler_correction.test_rejections_by_hand, test_papers_other_axes.KEPT,
    ),
    "distillation": (DISTILLATIONS, test_distillation.test_values_by_hand, test_distillation.PAPERS),
    "rollout_selection": (SELECTIONS, test_selection.test_values_by_hand, test_papers_other_axes.SELECTED),
}  # fmt: skip
# Members whose value by hand needs inputs of its own.
IN_A_TEST_OF_ITS_OWN = {
    "gdpo": test_advantages.test_gdpo_normalizes_each_reward_and_then_the_batch,
    "discounted": test_advantages.test_discounted_gives_the_last_token_the_most,
    "turn_returns": test_advantages.test_returns_of_turns_are_of_a_turn_and_those_after_it,
    "pass_at_k": test_advantages.test_pass_at_k_by_hand,
}


@pytest.mark.parametrize("axis", AXES)
def test_every_member_has_a_value_by_hand(axis: str) -> None:
    members, by_hand, _ = AXES[axis]
    (mark,) = (mark for mark in vars(by_hand)["pytestmark"] if "name" in mark.args[0])
    named = {values[0] for values in mark.args[1]}
    assert set(members) - named == set(members) & IN_A_TEST_OF_ITS_OWN.keys()


@pytest.mark.parametrize("axis", AXES)
def test_every_member_is_transcribed_from_its_formula(axis: str) -> None:
    members, _, transcribed = AXES[axis]
    assert set(members) == transcribed.keys()


@pytest.mark.parametrize("axis", AXES)
def test_every_member_has_a_planted_fault(axis: str) -> None:
    faults = tomllib.loads((Path(__file__).parent / "faults.toml").read_text(encoding="utf-8"))["fault"]
    members = {name: inspect.getsource(member) for name, member in AXES[axis][0].items()}
    planted = {name for name, source in members.items() for fault in faults if fault["find"] in source}
    assert members.keys() == planted
