"""What validations send to TensorBoard, wandb and trackio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.tiny import ends_early, make_trainer, prompts, tiny_sft
from tests.support.tiny import tiny_tokenizer as tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.rewards.graders import Grade
from trl_ext.runs.folder import Run
from trl_ext.sft.trainer import ExtSFTConfig, ExtSFTTrainer, tokenized
from trl_ext.training.callbacks import Validation

FIGURES = {"step", "accuracy", "format_rate", "mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect",
           "entropy_estimate", "seconds"}  # fmt: skip
TRACES = [{"prompt": f"{i % 9} + 1 =", "response": "a b"} for i in range(8)]


def some_correct(responses: Any, answers: Any) -> list[Grade]:
    return [Grade(i > 2, None, i % 4 == 3, "") for i, _ in enumerate(responses)]


def validated(path: Path, trainer: Any) -> Run:
    """A training of three steps that is validated before the first and after the second one and at the end."""
    run, sampling = Run(path, {}), {"batch_size": 16, "seed": 0}
    is_due = lambda state: state.global_step == 2  # noqa: E731
    trainer.add_callback(Validation(list(prompts()), some_correct, is_due, sampling, run, trainer))
    trainer.train()
    return run


def grpo(path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(path / "events"))
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, ends_early, preset="grpo_clip", report_to=tracker)


def sft(path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(path / "events"))
    rows = tokenized(TRACES, tokenizer())[0]
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, rows, report_to=tracker, sampling_max_tokens=12)


@pytest.mark.parametrize("make", [grpo, sft])
def test_tensorboard_has_every_figure_of_every_validation(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = validated(tmp_path, make(tmp_path, "tensorboard", monkeypatch))
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = {tag for tag in found.Tags()["scalars"] if "validation" in tag}
    assert tags == {f"validation/{name}" for name in FIGURES}
    for name in ("accuracy", "mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect", "entropy_estimate"):
        drawn = [(event.step, event.value) for event in found.Scalars(f"validation/{name}")]
        assert drawn == [(entry["step"], pytest.approx(entry[name])) for entry in run.validations]
    assert [event.value for event in found.Scalars("validation/step")] == [0, 2, 3]
    assert [event.value for event in found.Scalars("validation/format_rate")] == pytest.approx([13 / 16] * 3)
    assert all(0.5 < entry["entropy_estimate"] < 3 for entry in run.validations)


def test_wandb_draws_validations_against_their_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer = grpo(tmp_path, "wandb", monkeypatch)
    defined: list[tuple[str, Any]] = []
    define = wandb.define_metric
    monkeypatch.setattr(
        wandb, "define_metric", lambda name, **more: (defined.append((name, more)), define(name, **more))
    )
    validated(tmp_path, trainer)
    assert ("validation/*", {"step_metric": "validation/step"}) in defined
    assert {f"validation/{name}" for name in FIGURES} <= set(wandb.run.summary.keys())
    wandb.finish()


def test_trackio_gets_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    validated(tmp_path, grpo(tmp_path, "trackio", monkeypatch))
