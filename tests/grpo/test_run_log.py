"""`RunLog`: a trainer that is used as a library leaves rollouts that the browser shows, metrics, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support.tiny import CONFIG, tiny_model, tiny_tokenizer
from trl_ext import POLICY_LOSSES, ExtGRPOConfig, ExtGRPOTrainer, LossInputs, RunLog, TokenLoss
from trl_ext.browse.command import browse
from trl_ext.browse.rows import read_rows, sources_in
from trl_ext.io import read_jsonl

TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"


def soft(x: LossInputs) -> TokenLoss:
    return TokenLoss(-torch.tanh(x.logp - x.old_logp) * x.advantage)


def short(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"].split()) <= 9) for completion in completions]


@pytest.fixture
def own_loss(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(POLICY_LOSSES, "soft", soft)
    return "soft"


def trainer_in(folder: Path, **settings: Any) -> ExtGRPOTrainer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": f"{i % 9} + {i % 5} ="}], "answer": str(i % 3)} for i in range(16)]
    return ExtGRPOTrainer(
        model=tiny_model(),
        reward_funcs=short,
        args=ExtGRPOConfig(**{**CONFIG, "output_dir": str(folder), **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


@pytest.mark.slow
def test_conversations_and_an_own_loss_leave_a_log(tmp_path: Path, own_loss: str) -> None:
    trainer = trainer_in(tmp_path, preset="grpo_clip", policy_loss=own_loss)
    trainer.add_callback(RunLog(trainer, every=2))
    trainer.train()
    rows = read_jsonl(tmp_path / "generations.jsonl")
    assert [row["step"] for row in rows if row["per_token"]["text"]] == [row["step"] for row in rows]
    assert {row["step"] for row in rows} == {1, 2}
    assert len([row for row in rows if row["step"] == 1]) >= trainer.num_generations  # a group side by side
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    (source,) = sources_in(tmp_path)
    assert all(row["prompt"].startswith("user: ") and row["rewards"] for row in read_rows(source))
    assert f"{len(rows)} rollouts" in browse([tmp_path])
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "reward" in row] == [1, 2, 3]
    assert (tmp_path / "training.png").stat().st_size > 1000


@pytest.mark.slow
def test_logs_restart_and_are_resumed_at_a_checkpoint(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, save_strategy="steps", save_steps=2)  # TRL's own loss
    first.add_callback(RunLog(first, every=1))
    first.train()
    steps = [row["step"] for row in read_jsonl(tmp_path / "generations.jsonl")]
    assert set(steps) == {1, 2, 3}
    for checkpoint in (str(tmp_path / "checkpoint-2"), None):
        again = trainer_in(tmp_path, save_strategy="no")
        again.add_callback(RunLog(again, every=1))
        again.train(resume_from_checkpoint=checkpoint)
        assert [row["step"] for row in read_jsonl(tmp_path / "generations.jsonl")] == steps
        assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl") if "reward" in r] == [1, 2, 3]


def test_it_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        RunLog(trainer_in(tmp_path), every=0)
