"""A policy loss that sees all tokens of its optimizer step: the right ones, however the step is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.grpo.test_step import ALL, OFF_POLICY, PLAIN, TWO_EPOCHS, trained, trainer_of, words_of_row
from tests.support.tiny import scripted, weight_difference
from trl_ext import ExtGRPOConfig
from trl_ext.grpo.ineffective_settings import ineffective_settings
from trl_ext.step import OnPrompts

# Options with which they choose some of a step's 32 rows.
OF_STEP: dict[str, dict[str, Any]] = {
    "kl_cov": {"fraction": 0.2},
    "clip_cov": {"fraction": 0.2, "low": 0.01},
    "bapo": {"low_max": 0.95, "positive": 0.6},
}


def axes(loss: str) -> dict[str, Any]:
    return {"policy_loss": loss, "policy_loss_options": OF_STEP[loss]}


TRLS_MICRO_BATCHES = {"entropy_coef": 0.1}  # which are planned by nobody


@pytest.mark.slow
@pytest.mark.parametrize("cut", [PLAIN, ALL, TRLS_MICRO_BATCHES], ids=["plain", "savings", "unplanned"])
def test_a_loss_sees_every_token_of_its_step_once(cut: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained(tmp_path, **{**TWO_EPOCHS, **axes("bapo"), **cut})
    has_changed = []
    for number in range(trainer.state.global_step):
        seen = [(x, others["step"]) for step, x, others in trainer.seen if step == number]
        assert len(seen) > 1
        for x, step in seen:
            of_step = (step.logp, step.old_logp, step.advantage)
            for own, value in zip((x.logp, x.old_logp, x.advantage.expand_as(x.logp)), of_step, strict=True):
                found, wanted = step.of_micro_batch(value)[x.mask].double(), own[x.mask].double()
                assert_close(found, wanted, rtol=0, atol=1e-6)
            assert not step.of_micro_batch(step.advantage + 99)[~x.mask].any()
            assert not step.logp.requires_grad
        places = torch.cat([step.place[x.mask] for x, step in seen])
        assert places.sort().values.tolist() == list(range(len(seen[0][1].logp)))
        has_changed.append(bool((seen[0][1].logp - seen[0][1].old_logp).abs().max() > 1e-4))
    assert has_changed == [False, *[True] * 3, False, *[True] * 3]  # the first step of each rollout is on-policy


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", ["kl_cov", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("clip_cov", "bapo"))]
)
def test_how_a_step_is_divided_changes_nothing_of_it(loss: str, tmp_path: Path) -> None:
    ends = {
        (size, saved): trained(
            tmp_path, **{**TWO_EPOCHS, **axes(loss), "per_device_train_batch_size": size}, **(ALL if saved else PLAIN)
        ).model
        for size, saved in ((16, False), (2, False), (4, True))
    }
    whole = ends[16, False]
    assert weight_difference(whole, trained(tmp_path, **TWO_EPOCHS, **PLAIN).model) > 1e-4  # than with PPO's clip
    for other in ends.values():
        assert weight_difference(whole, other) < 1e-7  # a norm computes in float32


@pytest.mark.moderate
def test_a_step_that_begins_on_shared_prompts_is_the_same(tmp_path: Path) -> None:
    """Its tokens are computed on the prompts that its first micro-batch would have computed already."""

    def with_long_prompts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rollout = scripted(words_of_row)(prompts, trainer)
        return {**rollout, "prompt_ids": [[3] * 16 + row for row in rollout["prompt_ids"]]}

    whole_groups = {"rollout_batch_size": 32, "train_batch_size": 32, "n_grpo_steps": 1, "epochs_per_rollout_batch": 2}
    settings = {**whole_groups, **axes("clip_cov"), "rollout_func": with_long_prompts}
    plain, ours = (trained(tmp_path / name, **settings, **cut) for name, cut in (("plain", PLAIN), ("ours", ALL)))
    assert all(isinstance(plan[0].forward, OnPrompts) for plan in ours._planner.plans)
    assert weight_difference(plain.model, ours.model) < 1e-7


def test_rows_of_zero_advantage_are_kept_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, **OFF_POLICY, **axes("kl_cov"), **ALL)
    assert "skip_zero_advantage_rows is off: the loss sees every row of a step" in caplog.text
    said = ineffective_settings(trainer.args)
    assert said["skip_zero_advantage_rows"] == "the loss sees every row of a step"


def test_what_no_loss_asks_for_is_not_computed(tmp_path: Path) -> None:
    assert {others["step"] for _, _, others in trained(tmp_path, n_grpo_steps=1).seen} == {None}


def test_an_evaluation_has_the_tokens_of_its_batch(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **OFF_POLICY, **axes("kl_cov"))
    assert trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_loss"] != 0
    assert all(len(others["step"].logp) == x.mask.sum() for _, x, others in trainer.seen)


def test_a_step_over_two_rollouts_cannot_be_seen_as_one(tmp_path: Path) -> None:
    spanning = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    with pytest.raises(
        ValueError, match="policy_loss 'bapo' sees all tokens of an optimizer step, so a step has to lie"
    ):
        ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, policy_loss="bapo", **spanning)
    ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, policy_loss="ppo_clip", **spanning)


def test_on_policy_only_clip_cov_differs_from_reinforce(tmp_path: Path) -> None:
    def idle(loss: str, **options: Any) -> set[str]:
        config = ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, policy_loss=loss, **options)
        return {"policy_loss"} & ineffective_settings(config).keys()

    assert [loss for loss in OF_STEP if not idle(loss)] == ["clip_cov"]
    assert not idle("kl_cov", num_iterations=2)
