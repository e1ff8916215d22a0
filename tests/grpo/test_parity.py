"""The same weights as stock TRL after several steps of its own trainer.

SGD, because Adam turns rounding noise into full-size steps. Correct code is below 1e-6 apart; an incorrect axis changes the
weights by at least 1e-3 here, which the last test shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.support.tiny import ends_early, save_tiny, tiny_model, train, weight_difference
from trl_ext import ADVANTAGES, ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.algorithms.advantages import for_training

TRL_EPS = {"eps": 1e-4}
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 8, "max_steps": 8}
# TRL divides dapo and cispo by the average token count of a rollout's optimizer steps, we by the step's own count.
# With one optimizer step per epoch the two agree.
OFF_POLICY_WHOLE_ROLLOUT = {"num_iterations": 2, "max_steps": 6}

LUSPO = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip", "aggregation": "sequence_mean"}),
    "dapo": ({"loss_type": "dapo"}, {"policy_loss": "ppo_clip", "aggregation": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"policy_loss": "ppo_clip", "aggregation": "constant"}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"policy_loss": "cispo", "policy_loss_options": {"ratio_max": 1.5}, "aggregation": "token_mean"},
    ),
    "sapo": ({"loss_type": "sapo"}, {"policy_loss": "sapo", "aggregation": "sequence_mean"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"policy_loss": "gspo", "aggregation": "sequence_mean"},
    ),
    "dapo_dual_clip": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.4},
        {
            "policy_loss": "ppo_clip",
            "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 1.4},
            "aggregation": "token_mean",
        },
    ),
    "grpo_kl": (
        {"loss_type": "grpo", "beta": 0.05},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "beta": 0.05},
    ),
    "grpo_kl_not_bias_corrected": (
        {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
        {
            "policy_loss": "ppo_clip",
            "aggregation": "sequence_mean",
            "beta": 0.05,
            "use_bias_correction_kl": False,
        },
    ),
    "grpo_mean_only": (
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "advantage": "group_mean"},
    ),
    "grpo_batch_std": (
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"policy_loss": "ppo_clip", "aggregation": "sequence_mean", "advantage": "batch_std"},
    ),
}
FAST = ("grpo", False), ("dapo", True)


def when(name: str, off_policy: bool) -> list[pytest.MarkDecorator]:
    """The first step on each rollout of an off-policy run is one of an on-policy run."""
    if (name, off_policy) in FAST:
        return []
    return [pytest.mark.slow] if off_policy else [pytest.mark.slow, pytest.mark.nightly]


PARAMETERS = [
    pytest.param(
        *CASES[name],
        off_policy,
        id=f"{name}-{'off_policy' if off_policy else 'on_policy'}",
        marks=when(name, off_policy),
    )
    for name in CASES
    for off_policy in (False, True)
]


def _axes(settings: dict[str, Any]) -> dict[str, Any]:
    advantage = settings.get("advantage", "group_std")
    options = {} if advantage == "group_mean" else TRL_EPS
    return {"advantage": advantage, "advantage_options": options, **settings}


@pytest.mark.moderate
@pytest.mark.parametrize(("stock", "axes", "off_policy"), PARAMETERS)
def test_axes_train_to_the_weights_of_trls_loss_type(
    stock: dict[str, Any], axes: dict[str, Any], off_policy: bool, tmp_path: Path
) -> None:
    by_tokens = axes["aggregation"] == "token_mean"
    schedule = (OFF_POLICY_WHOLE_ROLLOUT if by_tokens else OFF_POLICY) if off_policy else {}
    if "beta" in stock:  # TRL loads the reference model from a path
        model = str(save_tiny(tmp_path / "model"))
        stock, axes = {**stock, "model": model}, {**axes, "model": model}
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, **stock, **schedule)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **_axes(axes), **schedule)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6


def short_and_plain(completions: list[str], **_: Any) -> list[list[float | None]]:
    """Two rewards of unlike scale; the second does not score every completion."""
    lengths = [len(text.split()) for text in completions]
    return [[float(n <= 9) for n in lengths], [None if n % 5 == 0 else 10.0 * n for n in lengths]]


def short(completions: list[str], **_: Any) -> list[float | None]:
    """The first of two rewards."""
    return short_and_plain(completions)[0]


def plain(completions: list[str], **_: Any) -> list[float | None]:
    """The second, of another scale."""
    return short_and_plain(completions)[1]


SPANNING = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6}
# In TRL's words on both sides: its loss's name there, the axes that it is of here.
SAME_WORDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": (
        {"loss_type": "dapo"}, {"aggregation": "token_mean"},
        {"epsilon": 0.05, "epsilon_high": 0.3, "delta": 1.4, **OFF_POLICY_WHOLE_ROLLOUT},
    ),
    "epsilon": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"epsilon": 0.02, **OFF_POLICY}),
    "cispo": (
        {"loss_type": "cispo"}, {"policy_loss": "cispo", "aggregation": "token_mean"},
        {"epsilon_high": 1.1, **OFF_POLICY_WHOLE_ROLLOUT},
    ),
    "sapo": (
        {"loss_type": "sapo"}, {"policy_loss": "sapo"},
        {"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 0.3, **OFF_POLICY},
    ),
    "vespo": (
        {"loss_type": "vespo"}, {"policy_loss": "vespo", "aggregation": "token_mean"},
        {"vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0, **OFF_POLICY_WHOLE_ROLLOUT},
    ),
    "luspo": (
        {"loss_type": "luspo"}, {"preset": "luspo"},
        {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02, **OFF_POLICY},
    ),
    "adaptive_entropy": (
        {"loss_type": "grpo"}, {"policy_loss": "ppo_clip"},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.1, "entropy_target": 9.0, **OFF_POLICY},
    ),
    "sequence": (
        {"loss_type": "grpo"}, {"policy_loss": "ppo_clip"},
        {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02, **OFF_POLICY},
    ),
    "sequence_kl": (
        {"loss_type": "dr_grpo"}, {"preset": "dr_grpo", "advantage": "group_std"},
        {"importance_sampling_level": "sequence", "beta": 0.05, "use_bias_correction_kl": False, **OFF_POLICY},
    ),
    "batch": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"scale_rewards": "batch"}),
    "none": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"scale_rewards": False}),
    "true": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"scale_rewards": True}),
    "off_policy_mask": (
        {"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"off_policy_mask_threshold": 0.01, **OFF_POLICY},
    ),
    "two_rewards": (
        {"loss_type": "grpo"}, {"policy_loss": "ppo_clip"},
        {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    ),
    "entropy_bonus": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, {"entropy_coef": 0.3, **OFF_POLICY}),
    "high_entropy_tokens": (
        {"loss_type": "dapo"}, {"aggregation": "token_mean"},
        {"top_entropy_quantile": 0.3, "entropy_coef": 0.3, "mask_truncated_completions": True, "beta": 0.05,
         **OFF_POLICY_WHOLE_ROLLOUT},
    ),
    "step_over_two_rollouts": ({"loss_type": "grpo"}, {"policy_loss": "ppo_clip"}, SPANNING),
    "step_over_two_rollouts_by_tokens": (
        {"loss_type": "dapo"}, {"aggregation": "token_mean"}, {**SPANNING, "num_iterations": 2},
    ),
    "step_over_four_rollouts": (
        {"loss_type": "dapo"}, {"aggregation": "token_mean"}, {"steps_per_generation": 1},
    ),
}  # fmt: skip


# Whose words become an axis, exactly as tests/training/test_settings_table.py says, that the runs above have in ours.
NIGHTLY = ("epsilon", "cispo", "sapo", "sequence", "batch", "none", "true", "entropy_bonus")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in SAME_WORDS]
)
def test_trls_own_settings_next_to_an_axis_train_to_trls_weights(name: str, tmp_path: Path) -> None:
    stock, axes, both = SAME_WORDS[name]
    if "beta" in both:
        both = {**both, "model": str(save_tiny(tmp_path / "model"))}
    reward = [short, plain] if "reward_weights" in both else ends_early
    if not both.keys() & {"scale_rewards", "multi_objective_aggregation"} or both.get("scale_rewards") is True:
        axes = {"advantage": "group_std", "advantage_options": TRL_EPS, **axes}
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", reward, **stock, **both)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", reward, **axes, **both)
    without = {k: v for k, v in both.items() if k in ("model", *OFF_POLICY, *SPANNING, "reward_weights", "beta")}
    if without != both and both.get("scale_rewards") is not True:  # the setting changes something here
        plain_trl = train(GRPOTrainer, GRPOConfig, tmp_path / "c", reward, **stock, **without)
        assert weight_difference(theirs.model, plain_trl.model) > 1e-4
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6
    if "entropy_coef" in both:  # TRL's is a mean over micro-batches, of parts of a sum where dapo divides by all tokens
        parts = theirs.args.gradient_accumulation_steps if stock["loss_type"] == "dapo" else 1
        logged = [[e["policy_loss"] for e in run.state.log_history if "loss" in e] for run in (theirs, ours)]
        assert [parts * value for value in logged[0]] == pytest.approx(logged[1], abs=1e-5)
        coefficients = [[e["entropy_coef"] for e in run.state.log_history if "loss" in e] for run in (theirs, ours)]
        assert coefficients[0] == pytest.approx(coefficients[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stock", [pytest.param({}, id="defaults"), pytest.param(LUSPO, id="luspo", marks=pytest.mark.slow)]
)
def test_stock_settings_give_stock_weights_exactly(stock: dict[str, Any], tmp_path: Path) -> None:
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, **stock)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **stock)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) == 0


UNCLIPPED: dict[str, Any] = {"max_grad_norm": 0.0, "learning_rate": 3e-4}  # a clipped gradient would hide its scale


@pytest.mark.slow
def test_rloo_trains_to_the_weights_of_trls_rloo_trainer(tmp_path: Path) -> None:
    theirs = train(RLOOTrainer, RLOOConfig, tmp_path / "a", plain, beta=0.0, **UNCLIPPED)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", plain, preset="rloo", **UNCLIPPED)
    reward = torch.tensor(theirs._logs["rewards"]["plain"], dtype=torch.float64).view(-1, 4)
    assert 0 < reward.isnan().sum() < reward.numel()  # completions that nothing scored
    advantage = for_training(ADVANTAGES["leave_one_out"](reward), reward).flatten()
    logged = torch.tensor(theirs._logs["advantages"], dtype=torch.float64)
    torch.testing.assert_close(logged, advantage, rtol=1e-5, atol=1e-4)  # rewards up to 120 in float32
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6
    centered = {"preset": "rloo", "advantage": "group_mean"}
    other = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "c", plain, **centered, **UNCLIPPED)
    assert weight_difference(other.model, theirs.model) > 1e-3


@pytest.mark.slow
def test_trls_normalized_rloo_is_reinforce_plus_plus_baseline(tmp_path: Path) -> None:
    """G / (G - 1) times the centered rewards, over their standard deviation: the factor remains in eps only."""
    steps = {"max_grad_norm": 0.0, "learning_rate": 0.01}
    theirs = train(RLOOTrainer, RLOOConfig, tmp_path / "a", ends_early, beta=0.0, normalize_advantages=True, **steps)
    axes = {"advantage": "reinforce_plus_plus_baseline", "advantage_options": {"eps": 1e-4 * 3 / 4}}
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, preset="rloo", **axes, **steps)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6


@pytest.mark.slow
def test_a_wrong_axis_is_far_from_stock(tmp_path: Path) -> None:
    theirs = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, loss_type="grpo")
    for incorrect in ({"aggregation": "token_mean"}, {"advantage": "group_mean"}, {"aggregation": "constant"}):
        settings = _axes({"policy_loss": "ppo_clip", "aggregation": "sequence_mean", **incorrect})
        ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **settings)
        assert weight_difference(ours.model, theirs.model) > 1e-3


@pytest.mark.slow
def test_gmpo_trains_to_the_weights_of_trls_trainer(tmp_path: Path) -> None:
    theirs = train(GMPOTrainer, GMPOConfig, tmp_path / "a", ends_early, epsilon=0.05, epsilon_high=0.1, **OFF_POLICY)
    axes = {"preset": "gmpo", "advantage_options": TRL_EPS, "policy_loss_options": {"eps_low": 0.05, "eps_high": 0.1}}
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **axes, **OFF_POLICY)
    assert weight_difference(theirs.model, tiny_model()) > 1e-2
    assert weight_difference(ours.model, theirs.model) < 1e-6
    other = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "c", ends_early, preset="gspo", **OFF_POLICY)
    assert weight_difference(other.model, theirs.model) > 1e-4
