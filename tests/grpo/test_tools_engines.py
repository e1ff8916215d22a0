"""Tools with vLLM for real, colocated and on a server: the ids that it sampled, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generation.test_server import AGREE
from tests.imitation.test_tools import made as expert_iteration
from tests.support.tiny import WAIT, calling_model, make_trainer, prompts, tool_tokenizer
from tests.support.vllm_server import VllmServer, serving
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.imitation.expert_iteration import ROLLOUTS
from trl_ext.io import read_jsonl

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]
SETTINGS: dict[str, Any] = {
    "tools": "calculator", "preset": "grpo_clip", "max_completion_length": 40, "max_turns": 3, "max_steps": 2,
    "learning_rate": 1e-4, "use_vllm": True, "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip
COLOCATED = {"vllm_mode": "colocate", "vllm_dtype": "float32", "vllm_max_model_length": 64, "vllm_enforce_eager": True}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a folder that calls the calculator or guesses."""
    tokenizer, folder = tool_tokenizer(), tmp_path_factory.mktemp("caller") / "model"
    calling_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(caller: Path) -> Iterator[VllmServer]:
    with serving(caller) as started:
        yield started.wait()


def says_six(completions: list[str], **_: Any) -> list[float]:
    return [float(text.endswith("6")) for text in completions]


def trained(path: Path, caller: Path, **engine: Any) -> Any:
    settings = SETTINGS | engine
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, path, says_six, model=str(caller), train_dataset=prompts(), **settings,
        processing_class=tool_tokenizer(), vllm_importance_sampling_correction=True,
    )  # fmt: skip
    trainer.train()
    return trainer


def check(trainer: Any) -> None:
    """The last rollout's turns, and that what the engine says of its tokens is what the policy said before the step."""
    rows = trainer.last_rollout
    assert {len(row["turns"]) for row in rows} >= {1, 3}
    for row in rows:
        own = "".join(turn["text"] for turn in row["turns"] if turn["role"] == "assistant")
        assert row["response"] == own.replace("<eos>", "")
        assert row["calls"] == own.count(WAIT)
    logged = [entry for entry in trainer.state.log_history if "tools/rollouts_with_call" in entry]
    assert all(0 < entry["tools/rollouts_with_call"] < 1 for entry in logged)
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in logged]
    assert max(differences) < AGREE


def test_a_colocated_engine_samples_every_turn(caller: Path, tmp_path: Path) -> None:
    trainer = trained(tmp_path, caller, **COLOCATED)
    check(trainer)
    completions = trainer.sample(["1+1="] * 16, 16, seed=3)
    assert {len(completion.turns or ()) for completion in completions} >= {1, 3}
    again = trainer.sample(["1+1="] * 16, 16, seed=3)
    assert [c.text for c in again] == [c.text for c in completions]


def test_a_server_samples_every_turn(caller: Path, server: VllmServer, tmp_path: Path) -> None:
    served = {"vllm_mode": "server", "vllm_server_base_url": server.url}
    check(trained(tmp_path / "grpo", caller, **served))
    trainer = expert_iteration(
        tmp_path / "ei", model=str(caller), use_vllm=True, model_init_kwargs={"dtype": "float32"}, **served
    )
    trainer.train()
    rollouts = read_jsonl(tmp_path / "ei" / "ei" / "step_1" / ROLLOUTS)
    assert 0 < sum(row["calls"] > 0 for row in rollouts) < len(rollouts)
    assert torch.isfinite(torch.tensor([row["entropy_estimate"] for row in rollouts])).all()
