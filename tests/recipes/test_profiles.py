"""Recipes for one small card: their settings pass, and the memory that they say is what the estimate says, with room."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trl_ext.recipes import model_settings
from trl_ext.recipes.cli import read_settings
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.model_settings import check_dtype, check_model_settings
from trl_ext.recipes.requirements import check_requirements
from trl_ext.tools.estimate.hardware import GPUS
from trl_ext.tools.estimate.memory.limits import preempting, refusal
from trl_ext.tools.estimate.memory.step import estimate_memory
from trl_ext.tools.estimate.planned import Launch
from trl_ext.tools.estimate.recipe import planned_run
from trl_ext.training import settings

ROOT = Path(__file__).parents[2]
ESTIMATED = re.compile(r"Estimated by `trl-ext estimate --gpu (\S+)`: ([\d.]+) GiB of ([\d.]+) at the peak")
PROFILES = {
    path.stem.removeprefix("grpo_gsm8k_"): (path, *found.groups())
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
    if (found := ESTIMATED.search(path.read_text(encoding="utf-8")))
}


def test_there_is_one_for_each_size_of_card() -> None:
    assert {name: found[1] for name, found in PROFILES.items()} == {
        "8gb": "rtx-4060", "16gb": "rtx-4080", "24gb": "rtx-4090", "t4": "t4",
    }  # fmt: skip
    for path, gpu, needed, size in PROFILES.values():
        assert "Not measured on such a card" in path.read_text(encoding="utf-8")
        assert float(size) == round(GPUS[gpu].memory / 2**30, 1)
        assert float(needed) <= 0.9 * float(size)


def accepted(path: Path) -> Any:
    """The settings of a recipe after the checks that need neither model nor data."""
    task, model, config = read_settings(GRPO_SETTINGS, None, path, ["--use_cpu", "true", "--output_dir", "unused"])
    check_model_settings(model, config)
    check_dtype(model, config)
    check_requirements(config)
    return task, model, config


@pytest.mark.moderate
@pytest.mark.parametrize("name", PROFILES)
def test_its_settings_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_settings, "is_bitsandbytes_available", lambda: True)
    task, model, config = accepted(PROFILES[name][0])
    assert (task.dataset, task.prompt, model.use_peft, model.lora_dropout) == ("gsm8k", "chat", True, 0.0)
    assert config.fp16 == (name == "t4")


@pytest.mark.moderate
def test_a_t4_is_given_nothing_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own profile is accepted as on such a card, and those of newer ones are refused with what to set."""
    for module in (settings, model_settings):
        monkeypatch.setattr(module, "card_without_bf16", lambda use_cpu: "Tesla T4")
    monkeypatch.setattr(model_settings, "is_bitsandbytes_available", lambda: True)
    _, model, config = accepted(PROFILES["t4"][0])
    assert (model.dtype, config.fp16, config.bf16, config.vllm_dtype) == ("float16", True, False, "float16")
    for name in PROFILES.keys() - {"t4"}:
        with pytest.raises(ValueError, match=r"Tesla T4 has no bfloat16, .*set fp16: true"):
            accepted(PROFILES[name][0])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", PROFILES)
def test_it_fits_with_a_tenth_of_the_card_to_spare(name: str) -> None:
    path, gpu, needed, _ = PROFILES[name]
    launch, capacity = Launch.of_accelerate(ROOT / "accelerate_configs/one_gpu.yaml"), GPUS[gpu].memory
    run = planned_run(path, [], launch)
    memory = estimate_memory(run, capacity)
    peak = memory.total(memory.peak)
    assert peak <= 0.9 * capacity
    assert peak / 2**30 == pytest.approx(float(needed), abs=0.06), "what its first lines say"
    assert refusal(run, memory, lambda _: memory) is None
    assert preempting(run, memory) is None
