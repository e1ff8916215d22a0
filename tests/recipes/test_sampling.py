"""A run of a model that arrives with every field of sampling set: its validations are those of `evaluate.py`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.generation.test_sampling import ARRIVES, OF_VLLM, arrive
from tests.recipes.test_grpo import SMALL, TINY_RUN
from tests.support.recipe import run_recipe
from trl_ext.generation.sampling import OF_SERVERS
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS

RUN: dict[str, Any] = {
    **TINY_RUN, "max_steps": 2, "validate_every": 2, "sampling_max_tokens": 18, "validation_problems": 24,
    "validation_temperature": 0.0, "disable_tqdm": True, "learning_rate": 1.0e-2, "bf16": False, "seed": 0,
}  # fmt: skip
COMPARED = ("problems", "accuracy", "outcomes", "mean_tokens", "truncated")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has read enough to close some answers, with heads that vLLM's CPU kernels have."""
    config = dataclasses.replace(SMALL, steps=60, batch=16, hidden=64, heads=2)
    folder = tmp_path_factory.mktemp("policy")
    shutil.copytree(make_base_policy(0, folder / "cache", config, progress=False), folder / "model")
    own = json.loads((folder / "model" / "generation_config.json").read_text())
    return arrive(folder / "model", {**ARRIVES, **OF_VLLM, "eos_token_id": own["eos_token_id"]})


def evaluated(model: Path, folder: Path, **more: Any) -> dict[str, Any]:
    settings = {"problems": 24, "temperature": 0.0, "max_tokens": 18, "use_vllm": "false", **more}
    run_evaluation(Evaluation(model_name_or_path=str(model), output_dir=str(folder), **settings))
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def compared(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in COMPARED}


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text("def mine(completions, **_):\n    return [len(set(c)) / 9 for c in completions]\n")
    mine = {"reward": f"{folder / 'mine.py'}:mine", "output_dir": str(folder / "run")}
    settings = {**RUN, "model_name_or_path": str(policy), **mine}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run", run_recipe(*parse(GRPO_SETTINGS, "about", folder / "run.yaml", []))


@pytest.mark.slow
def test_validations_are_those_of_an_evaluation(policy: Path, run: tuple[Path, Any], tmp_path: Path) -> None:
    folder, summary = run
    first, last = summary["validations"][0], summary["validations"][-1]
    assert compared(first) != compared(last)
    before, after = evaluated(policy, tmp_path / "before"), evaluated(folder, tmp_path / "after")
    assert compared(before) == compared(first)
    assert compared(after) == compared(last)
    assert after["sampling"] == summary["sampling"]["validations"]
    rollouts = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 18}
    assert rollouts.items() <= summary["sampling"]["rollouts"].items()


@pytest.mark.vllm
@pytest.mark.timeout(900)  # several engines are started, 10 to 20 s each
def test_vllm_evaluates_as_the_runs_validations_did(policy: Path, run: tuple[Path, Any], tmp_path: Path) -> None:
    """What arrived with every field, and what was saved."""
    engine = {"use_vllm": "true", "dtype": "float32", "vllm_max_model_length": 128, "vllm_enforce_eager": True}
    neutral = {"repetition_penalty": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **OF_SERVERS}
    for model, validation in ((policy, 0), (run[0], -1)):
        found = evaluated(model, tmp_path / f"of_{validation}", **engine)
        assert compared(found) == compared(run[1]["validations"][validation])
        assert {**neutral, "temperature": 0.0, "max_tokens": 18}.items() <= found["sampling"].items()
