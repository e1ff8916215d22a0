"""Expert iteration with tools: kept responses are learned where the model wrote them, and only read where tools did."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.imitation.test_expert_iteration import graded
from tests.support.tiny import CALL, WAIT, calling_model, tiny_sft, tool_tokenizer
from trl_ext.imitation.expert_iteration import KEPT, ROLLOUTS, ExpertIterationConfig, ExpertIterationTrainer
from trl_ext.imitation.sft import tokenized
from trl_ext.io import read_jsonl
from trl_ext.recipes.expert_iteration import EndOfStep

pytestmark = pytest.mark.moderate
SETTINGS: dict[str, Any] = {
    "n_ei_steps": 2, "questions_per_step": 8, "group_size": 4, "train_batch_size": 8, "micro_train_batch_size": 4,
    "sampling_max_tokens": 40, "max_steps": -1, "learning_rate": 0.01, "tools": "calculator", "max_turns": 3,
    "optim": "adamw_torch",
}  # fmt: skip


def made(path: Path, **more: Any) -> Any:
    tokenizer = tool_tokenizer()
    trainer = tiny_sft(
        ExpertIterationTrainer, ExpertIterationConfig, path, None, model=more.pop("model", None) or calling_model(tokenizer),
        processing_class=tokenizer, questions=[{"prompt": f"{n}+1=", "answer": "6"} for n in range(8)],
        grader=graded(lambda text: text.endswith("6")), folder=path / "ei", **SETTINGS | more,
    )  # fmt: skip
    trainer.add_callback(EndOfStep(trainer))
    return trainer


@pytest.mark.parametrize("max_length", [None, 60])
def test_turns_are_read_apart_and_only_own_ones_learned(max_length: int | None) -> None:
    tokenizer = tool_tokenizer()
    turns = [("assistant", f"{CALL}2*3{WAIT}"), ("tool", "\n6\n```\n"), ("assistant", "so6")]
    told = [{"role": role, "text": text} for role, text in turns]
    rows = [{"prompt": "1+1=", "response": f"{CALL}2*3{WAIT}so6", "turns": told}, {"prompt": "1+1=", "response": "so7"}]
    (called, plain), too_long = tokenized(rows, tokenizer, max_length)
    pieces = [tokenizer(text=text)["input_ids"] for _, text in turns]
    end = tokenizer.eos_token_id
    assert called["input_ids"] == [*tokenizer(text="1+1=")["input_ids"], *itertools.chain(*pieces), end]
    own = [int(role == "assistant") for (role, _), ids in zip(turns, pieces, strict=True) for _ in ids]
    assert called["completion_mask"] == [0] * 4 + own + [1]
    assert plain["input_ids"][4:] == [*tokenizer(text="so7")["input_ids"], end]
    assert plain["completion_mask"] == [0] * 4 + [1] * (len(plain["input_ids"]) - 4)
    assert too_long == 0


def test_it_learns_its_own_turns_and_not_the_tools(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    learned = list[str]()
    collate = trainer.data_collator

    def seen(rows: list[dict[str, list[int]]]) -> Any:
        own = [[i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100] for row in rows]
        learned.extend(map(trainer.processing_class.decode, own))
        return collate(rows)

    trainer.data_collator = seen
    trainer.train()
    rollouts = read_jsonl(tmp_path / "ei" / "step_1" / ROLLOUTS)
    called = [row for row in rollouts if row["calls"]]
    assert 0 < len(called) < len(rollouts) == 32
    kept = [row for step in (1, 2) for row in read_jsonl(tmp_path / "ei" / f"step_{step}" / KEPT)]
    own = ["".join(turn["text"] for turn in row["turns"] if turn["role"] == "assistant") for row in kept]
    assert sorted(text for text in learned if text) == sorted(own)
    assert any(WAIT in text for text in own)
    assert all(not text.startswith("\n") and "\n6\n" not in text for text in own)
    logged = [entry for entry in trainer.state.log_history if "tools/calls_per_response" in entry]
    assert logged[0]["tools/responses_with_call"] == pytest.approx(len(called) / 32)


@pytest.mark.slow
def test_it_resumes_within_a_step_of_calls(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = made(tmp_path, **saving)
    whole.train()
    assert whole.state.global_step > 2
    again = made(tmp_path, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_turns": 1}, "max_turns must be at least 2, got 1"),
        ({"tools": None}, "max_turns=3 needs tools"),
        ({"sampling_min_tokens": 3}, "tools with sampling_min_tokens"),
    ],
)
def test_what_tools_cannot_have_is_refused(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(tmp_path, **more)
