"""The life of each kind of adapter: trained, resumed, evaluated, trained further, merged, with a card."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.generation.test_merging import lora
from tests.recipes.test_grpo import SMALL, TINY_RUN
from tests.recipes.test_left_behind import evaluated, recipe
from trl_ext.hub.card import write_model_card
from trl_ext.hub.push import merge
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS

STEPS = 3
REWARD = "def reward(completions, **_):\n    return [len(text) % 7 / 7 for text in completions]\n"
RUN = {
    **TINY_RUN, "preset": "grpo_clip", "max_steps": STEPS, "learning_rate": 0.01, "seed": 3, "use_vllm": "false",
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": None, "logging_strategy": "no",
    "validate_every": STEPS, "validation_problems": 8, "validation_temperature": 0.0, "sampling_max_tokens": 24,
}  # fmt: skip
ON_TWO = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": ON_TWO,
    "one module": {**ON_TWO, "lora_target_modules": ["q_proj"]},
    "regular expression": {**ON_TWO, "lora_target_modules": [".*v_proj"]},
    "all linear": {**ON_TWO, "lora_target_modules": ["all-linear"]},
    "rsLoRA": {**ON_TWO, "use_rslora": True},
    "DoRA": {**ON_TWO, "use_dora": True},
    "embedding": {**ON_TWO, "lora_target_modules": ["embed_tokens", "q_proj"]},
    "saved embedding": {**ON_TWO, "lora_modules_to_save": ["embed_tokens"]},
    "saved head": {**ON_TWO, "lora_modules_to_save": ["lm_head"]},
    "saved norms": {**ON_TWO, "lora_modules_to_save": ["norm"]},
    "new tokens in the base": {**ON_TWO, "lora_modules_to_save": ["embed_tokens"]},
    "new tokens in the adapter": {},  # trained further from the start
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base that has read enough to differ, with two more tokens, and an adapter that brings those."""
    top = tmp_path_factory.mktemp("starts")
    base = make_base_policy(0, top, dataclasses.replace(SMALL, steps=60, batch=16, hidden=64, heads=2), progress=False)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<first>", "<second>"])
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(top / "grown")
    adapted = peft.get_peft_model(grown, lora(target_modules=["q_proj", "v_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(top / "adapter", save_embedding_layers=True)
    for folder in ("grown", "adapter"):
        tokenizer.save_pretrained(top / folder)
    (top / "reward.py").write_text(REWARD)
    return {"": Path(base), "base": top / "grown", "adapter": top / "adapter", "reward": top / "reward.py"}


def responses(model: Path, folder: Path) -> tuple[list[str], dict[str, float]]:
    """An evaluation's responses, and what a validation says of them."""
    report = run_evaluation(evaluated(model, folder, problems=8, max_tokens=24, seed=3))
    tokens = statistics.mean(row["tokens"] for row in report.rows)
    return [row["response"] for row in report.rows], {"accuracy": report.accuracy, "mean_tokens": tokens}


def validated(folder: Path, number: int) -> dict[str, float]:
    said = json.loads((folder / "summary.json").read_text())["validations"][number]
    return {name: said[name] for name in ("accuracy", "mean_tokens")}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = peft.load_peft_weights(str(folder))
    return found


def is_equal(first: Path, second: Path) -> bool:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "DoRA" else pytest.mark.nightly) for k in KINDS])
def test_each_kind_of_adapter_lives_from_start_to_merge(
    kind: str, starts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "cache"))
    start = starts[kind.rpartition(" ")[2] if kind.startswith("new tokens") else ""]
    settings = {**RUN, "reward": f"{starts['reward']}:reward"}
    recipe(GRPO_SETTINGS, {**settings, **KINDS[kind]}, start, tmp_path / "first")
    run = tmp_path / "first" / "run"
    assert not is_equal(run, run / "checkpoint-1")
    said, measured = responses(run, tmp_path / "evaluated")
    assert measured == validated(run, -1) != validated(run, 0)

    killed = shutil.copytree(run, tmp_path / "again" / "run", ignore=shutil.ignore_patterns("checkpoint-[23]"))
    (killed / "adapter_model.safetensors").unlink()
    recipe(GRPO_SETTINGS, {**settings, **KINDS[kind]}, start, tmp_path / "again", resume="auto")
    assert is_equal(run, tmp_path / "again" / "run")

    recipe(GRPO_SETTINGS, settings, run, tmp_path / "further")
    further = tmp_path / "further" / "run"
    assert not is_equal(run, further)
    assert validated(further, 0) == measured
    assert responses(further, tmp_path / "evaluated_further")[1] == validated(further, -1)

    merge(run, tmp_path / "whole")
    assert responses(tmp_path / "whole", tmp_path / "evaluated_whole") == (said, measured)
    write_model_card(run)
    card = (run / "README.md").read_text()
    assert "AutoPeftModelForCausalLM" in card
    assert "base_model:" not in card  # a folder of this machine
