"""A device without float64, as Apple's GPU: rollouts, steps, metrics and validations do without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch.nn import Module

from scripts.benchmarks.step import replaying
from tests.support.devices import WithoutFloat64, on_a_device
from tests.support.tiny import fraction_of_ones, make_trainer, save_tiny, tiny_model, tiny_sft
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.decoding import own_loop_unsupported
from trl_ext.generation.floats import widest_float
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer

GRPO: dict[str, Any] = {"preset": "grpo_clip", "max_steps": 2, "rollout_selection": "mixed_groups"}


def test_the_widest_float_is_what_the_device_has() -> None:
    cpu = torch.device("cpu")
    assert widest_float(cpu) == torch.float64
    with WithoutFloat64():
        assert widest_float(cpu) == torch.float32
        assert "float64" in str(own_loop_unsupported(tiny_model(), tiny_model().generation_config))
        with pytest.raises(TypeError):
            torch.zeros(2).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"stop": ["stop"], "mask_truncated_completions": True},
        {"num_iterations": 2, "aggregation": "token_mean", "policy_loss": "gspo"},
        {"policy_loss": "clip_cov", "policy_loss_options": {"fraction": 0.2, "low": 0.01}, "advantage": "opo"},
        {"entropy_coef": 0.1, "advantage": "gdpo"},
        {"preset": None, "rollout_selection": None},
    ],
)
def test_no_rollout_and_no_step_needs_float64(settings: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **{**GRPO, **settings})
    token_log = trainer.log_tokens()
    with WithoutFloat64():
        trainer.train()
        completions = trainer.sample(["1 + 1 =", "2 + 2 ="], 2, seed=1)
        assert all(completion.text for completion in completions)
        if trainer.args.uses_axes:
            assert any(token_log(row) for row in range(16))
    assert trainer.state.global_step == 2
    assert "completions/clipped_ratio" in trainer.state.log_history[0]


def test_fine_tuning_needs_no_float64(tmp_path: Path) -> None:
    rows = [{"input_ids": [3, 4, 5, 1], "completion_mask": [0, 1, 1, 1]}] * 16
    trainer = tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path, rows, max_steps=2)
    with WithoutFloat64():
        trainer.train()
    assert trainer.state.global_step == 2


class Replay:
    """In place of an engine: completions of one to three tokens and an end."""

    def seed_requests(self, seed: int, place: Any) -> None:
        """Nothing is sampled."""

    def sync_weights(self) -> None:
        """It has none."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        """What vLLM would return."""
        completions = [[*(3, 4, 5)[: 1 + place % 3], 1] for place in range(len(prompts))]
        return prompts, completions, [[[-1.0]] * len(ids) for ids in completions], None


def moved(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer on the device of `on_a_device`, as if accelerate had found it."""
    device = torch.device("meta")
    for part in vars(trainer).copy().values():
        if isinstance(part, Module):
            part.to(device)
    trainer.args.__dict__["_setup_devices"] = device  # a cached property
    for state in (PartialState, AcceleratorState):
        monkeypatch.setitem(state._shared_state, "device", device)
    assert trainer.accelerator.device == trainer.args.device == device
    return trainer


NIGHTLY: dict[str, dict[str, Any]] = {
    "two steps a rollout": {"preset": "dapo", "num_iterations": 2, "rollout_selection": "mixed_groups"},
    "reference": {"preset": "grpo_clip", "beta": 0.1, "share_prompt_prefix": False, "mask_truncated_completions": True},
    "TRL's": {},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"preset": "grpo_clip", "vllm_importance_sampling_correction": True}, id="correction"),
        *(pytest.param(of, id=name, marks=pytest.mark.nightly) for name, of in NIGHTLY.items()),
    ],
)
def test_a_step_is_made_on_a_device_apart(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real trainer, without values: rollout, advantages, plan of the step, loss, gradient, optimizer, metrics."""
    given = {"max_steps": settings.get("num_iterations", 1), "use_vllm": True, "vllm_mode": "colocate", **settings}
    given["model"] = str(save_tiny(tmp_path / "model"))  # by its name, by which TRL makes a reference
    with replaying(Replay()):
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **given)
        moved(trainer, monkeypatch)
        with on_a_device():
            trainer.train()
    assert trainer.state.global_step == given["max_steps"]


@pytest.mark.nightly
@pytest.mark.slow
def test_fine_tuning_is_done_on_a_device_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": [3, 4, 5, 1], "completion_mask": [0, 1, 1, 1]}] * 16
    trainer = moved(tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path, rows, max_steps=1), monkeypatch)
    with on_a_device():
        trainer.train()
    assert trainer.state.global_step == 1
