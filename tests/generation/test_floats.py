"""A device without float64, as Apple's GPU: rollouts, steps, metrics and validations do without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.tiny import fraction_of_ones, make_trainer, tiny_model, tiny_sft
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.decoding import own_loop_unsupported
from trl_ext.generation.floats import widest_float
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer

GRPO: dict[str, Any] = {"preset": "grpo_clip", "max_steps": 2, "rollout_selection": "mixed_groups"}


class WithoutFloat64(TorchDispatchMode):
    """As on MPS, a tensor of float64 is a TypeError."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(part, Tensor) and part.dtype == torch.float64 for part in tree_leaves(found)):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return found


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
