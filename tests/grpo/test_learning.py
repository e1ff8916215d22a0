"""A tiny model learns a trivial reward, and unlearns it when the sign of the loss is flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.grpo.test_trainer import OF_REWARDS
from tests.support.tiny import fraction_of_ones, tiny_model, train
from trl_ext import POLICY_LOSSES, ExtGRPOConfig, ExtGRPOTrainer, LossInputs, TokenLoss

STEPS, ENDS = 60, 5  # optimizer steps, and rollouts averaged at either end
DEFAULT = "grpo_clip"
SETTINGS: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 3e-3,
    "max_completion_length": 8,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_iterations": 2,
    "gradient_checkpointing": False,
}


def flipped(x: LossInputs) -> TokenLoss:
    """`ppo_clip` with the sign of a mistake."""
    return TokenLoss(-POLICY_LOSSES["ppo_clip"](x).loss)


def rewards(path: Path, preset: str, seed: int, **axes: Any) -> tuple[float, float]:
    """Fraction of the word 1 in the completions, in the first and in the last rollouts."""
    run = {"model": tiny_model(seed), "seed": seed, "preset": preset, "max_steps": STEPS, **axes}
    trainer = train(ExtGRPOTrainer, ExtGRPOConfig, path, fraction_of_ones, **run, **SETTINGS)
    curve = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(curve) == STEPS // 2
    return sum(curve[:ENDS]) / ENDS, sum(curve[-ENDS:]) / ENDS


def has_learned(first: float, last: float) -> bool:
    """Over three seeds and all presets the first is at most 0.33, the last at least 0.92, the rise at least 0.67."""
    return last > 0.8 and last - first > 0.45


EACH_PUSH = ("reinforce_with_baseline", "dr_grpo", "gspo")  # of the others what a step does to them is held exactly


@pytest.mark.slow
def test_default_preset_learns_and_unlearns_with_sign_flipped(tmp_path: Path) -> None:
    assert has_learned(*rewards(tmp_path, DEFAULT, seed=0))
    first, last = rewards(tmp_path, DEFAULT, seed=0, policy_loss=f"{__name__}:flipped")
    assert not has_learned(first, last)
    assert first > 0.02  # measured 0.04: there was something to unlearn
    assert last < 0.01  # measured 0.000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in EACH_PUSH else pytest.mark.nightly) for name in OF_REWARDS]
)
def test_every_preset_learns(preset: str, seed: int, tmp_path: Path) -> None:
    assert has_learned(*rewards(tmp_path, preset, seed))
