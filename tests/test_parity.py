"""The same weights as stock TRL after several steps of its own trainer.

SGD, because Adam turns rounding noise into full-size steps. Right code is below 1e-6 apart; a wrong axis moves the
weights by at least 1e-3 here, which the last test shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import ends_early, tiny_model, train, weight_difference
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer

TRL_EPS = {"eps": 1e-4}
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 8, "max_steps": 8}
# TRL divides dapo and cispo by the average token count of a rollout's optimizer steps, we by the step's own count.
# With one optimizer step per epoch the two agree.
OFF_POLICY_WHOLE_ROLLOUT = {"num_iterations": 2, "max_steps": 6}

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip", "aggregation": "sequence_mean"}),
    ({"loss_type": "dapo"}, {"policy_loss": "ppo_clip", "aggregation": "token_mean"}),
    ({"loss_type": "dr_grpo"}, {"policy_loss": "ppo_clip", "aggregation": "constant"}),
    (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"policy_loss": "cispo", "policy_loss_options": {"ratio_max": 1.5}, "aggregation": "token_mean"},
    ),
    ({"loss_type": "sapo"}, {"policy_loss": "sapo", "aggregation": "sequence_mean"}),
    (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    ),
    (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        None,  # not on the axes: TRL's own loss
    ),
    (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.4},
        {
            "policy_loss": "ppo_clip",
            "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 1.4},
            "aggregation": "token_mean",
        },
    ),
    (
        {"loss_type": "grpo", "beta": 0.05},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "beta": 0.05},
    ),
    (
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "advantage": "group_mean"},
    ),
    (
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "advantage": "batch_std"},
    ),
]


def _axes(settings: dict[str, Any]) -> dict[str, Any]:
    advantage = settings.get("advantage", "group_std")
    options = {} if advantage == "group_mean" else TRL_EPS
    return {"advantage": advantage, "advantage_options": options, **settings}


@pytest.mark.parametrize("off_policy", [False, True], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize(("stock", "axes"), [c for c in CASES if c[1]], ids=lambda c: "-".join(map(str, c.values())))
def test_axes_train_to_the_weights_of_trls_loss_type(
    stock: dict[str, Any], axes: dict[str, Any], off_policy: bool, tmp_path: Path
) -> None:
    by_tokens = axes["aggregation"] == "token_mean"
    schedule = (OFF_POLICY_WHOLE_ROLLOUT if by_tokens else OFF_POLICY) if off_policy else {}
    if "beta" in stock:  # TRL loads the reference model from a path
        from tests.tiny import save_tiny

        model = str(save_tiny(tmp_path / "model"))
        stock, axes = {**stock, "model": model}, {**axes, "model": model}
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, **stock, **schedule)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **_axes(axes), **schedule)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6


@pytest.mark.parametrize("stock", [{}, CASES[6][0]], ids=["defaults", "luspo"])
def test_stock_settings_give_stock_weights_exactly(stock: dict[str, Any], tmp_path: Path) -> None:
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, **stock)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **stock)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) == 0


def test_a_wrong_axis_is_far_from_stock(tmp_path: Path) -> None:
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, loss_type="grpo")
    for wrong in ({"aggregation": "token_mean"}, {"advantage": "group_mean"}, {"aggregation": "constant"}):
        settings = _axes({"policy_loss": "ppo_clip", "aggregation": "sequence_mean", **wrong})
        ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **settings)
        assert weight_difference(ours.model, theirs.model) > 1e-3
