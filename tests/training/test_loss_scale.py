"""Gradients that overflow while float16's loss scaler looks for its scale are no faults; others are as before."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from tests.support.tiny import CONFIG, ends_early, make_trainer, tiny_sft
from tests.training.test_faults import explodes
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.training import settings
from trl_ext.training.faults import NonFiniteError, loss_scale
from trl_ext.training.settings import is_without_fp16

OVERFLOWS = 2.0**24  # float16 ends at 65,504: a few halvings later no gradient of these models is beyond it
FITS = 2.0**8
ROWS = [{"input_ids": [3, 4, 5, 1], "completion_mask": [0, 1, 1, 1]}] * 16


def scaled(trainer: Any, scale: float) -> Any:
    """The trainer in float16 by autocast, with PyTorch's scaler, as accelerate sets it up for fp16 on a GPU."""
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    return trainer


@pytest.fixture(autouse=True)
def _precision_of_others() -> Any:
    from accelerate.state import AcceleratorState

    before = dict(AcceleratorState._shared_state)
    yield
    AcceleratorState._shared_state.clear()
    AcceleratorState._shared_state.update(before)


def grpo(path: Path, reward: Any = ends_early, **settings: Any) -> Any:
    own = {"preset": "grpo_clip", "advantage": "raw", "max_steps": 12, "learning_rate": 1e-3}
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, reward, **{**own, **settings})


def sft(path: Path) -> Any:
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, ROWS, max_steps=12, learning_rate=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("made", [grpo, sft])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_steps_of_the_scaler_are_counted_apart(made: Any, max_grad_norm: float, tmp_path: Path) -> None:
    trainer = made(tmp_path)
    trainer.args.max_grad_norm = max_grad_norm
    trainer = scaled(trainer, OVERFLOWS)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    skipped = trainer.steps_of_scaler
    assert 3 <= skipped < 12, "more than max_nonfinite_steps, and then it trains"
    assert (trainer.skipped_steps, trainer.skipped_in_a_row) == (0, 0)
    assert trainer.accelerator.scaler.get_scale() == OVERFLOWS / 2**skipped
    assert not list(tmp_path.glob("nonfinite_*"))
    logged = [entry["steps_of_scaler"] for entry in trainer.state.log_history if "steps_of_scaler" in entry]
    assert logged == [*range(1, skipped + 1)]
    weights = list(trainer.model.parameters())
    assert all(weight.isfinite().all() for weight in weights)
    assert not all(map(torch.equal, before, weights))
    assert trainer.resume_state()["steps_of_scaler"] == skipped


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_a_fault_at_any_scale(tmp_path: Path) -> None:
    trainer = scaled(grpo(tmp_path, explodes({2, 3, 4})), FITS)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row, up to step 4"):
        trainer.train()
    assert (trainer.skipped_steps, trainer.steps_of_scaler) == (3, 0)


@pytest.mark.slow
def test_at_the_least_scale_it_is_a_fault(tmp_path: Path) -> None:
    trainer = scaled(grpo(tmp_path), 1.0)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row, up to step 3"):
        trainer.train()
    assert trainer.steps_of_scaler == 0


def test_which_scales_may_fall() -> None:
    def of_deepspeed(scaler: Any) -> Any:
        engine = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
        wrapped = SimpleNamespace(engine=engine)
        return SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_engine_wrapped=wrapped)

    def of_accelerate(scaler: Any) -> Any:
        return SimpleNamespace(distributed_type=DistributedType.NO, scaler=scaler)

    made = {"scale_window": 1000, "delayed_shift": 1, "consecutive_hysteresis": False}
    for scale, found in ((2.0**16, 2.0**16), (2.0, 2.0), (1.0, None)):
        assert loss_scale(of_deepspeed(DynamicLossScaler(init_scale=scale, min_scale=1, **made))) == found
        assert loss_scale(of_accelerate(torch.amp.GradScaler("cpu", init_scale=scale))) == found
    assert loss_scale(of_deepspeed(LossScaler(scale=1.0))) is None  # bfloat16
    assert loss_scale(of_deepspeed(None)) is None
    assert loss_scale(of_accelerate(None)) is None
    assert loss_scale(of_accelerate(torch.amp.GradScaler("cpu", init_scale=8.0, enabled=False))) is None


def test_fp16_on_a_cpu_says_that_it_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(**settings: Any) -> str | None:
        return ExtGRPOConfig(output_dir=str(tmp_path), **{**CONFIG, **settings}).precision_reason

    assert "fp16 has no effect on a CPU" in str(reason(fp16=True, bf16=None))
    assert reason(bf16=False) is None
    assert is_without_fp16(use_cpu=True)
    assert is_without_fp16(use_cpu=False) is not torch.accelerator.is_available()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert not is_without_fp16(use_cpu=True)


def test_a_card_without_bfloat16_trains_in_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**asked: Any) -> Any:
        return ExtGRPOConfig(output_dir=str(tmp_path), **{**CONFIG, "bf16": None, **asked})

    for name, value in {"is_available": True, "is_bf16_supported": False, "get_device_name": "Tesla T4"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value, **_: value)
    assert settings.card_without_bf16(use_cpu=False) == "Tesla T4"
    assert settings.card_without_bf16(use_cpu=True) is None
    monkeypatch.undo()
    assert settings.card_without_bf16(use_cpu=False) is None or torch.cuda.is_available()
    monkeypatch.setattr(settings, "card_without_bf16", lambda use_cpu: "Tesla T4")
    monkeypatch.setattr(settings, "is_without_fp16", lambda use_cpu: False)
    for asked in ({"bf16": True}, {"bf16_full_eval": True}):
        with pytest.raises(ValueError, match=r"bf16: Tesla T4 has no bfloat16, .*set fp16: true .* or bf16: false"):
            config(**asked)
    found = [config(), config(bf16=False), config(fp16=True)]
    assert [one.fp16 for one in found] == [True, False, True]
    assert not any(one.bf16 for one in found)
    assert "since Tesla T4 has no bfloat16" in found[0].precision_reason
