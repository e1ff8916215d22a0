"""A run of an experiment: its command, and what the YAML files of all experiments are refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_ext.errors import InputError
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage
from trl_ext.tools.experiments.runspec import RunSpec, read_experiment, refuse_taken


def test_a_runs_own_settings_are_over_the_common_ones() -> None:
    run = RunSpec("sft", "a.yaml", {"seed_of_data": 2}, common={"seed_of_data": 1, "bf16": False}, more=["--x", "y"])
    settings = ["--seed_of_data", "2", "--bf16", "false"]
    assert run.command(Path("recipes"), 3) == [
        str(Path("recipes") / "sft_math.py"), "--config", "a.yaml", *settings, "--x", "y", "--seed", "3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (RunSpec, "a: [1", "while parsing"),
        (RunSpec, [1], r"not a mapping: \[1\]"),
        (RunSpec, {}, "missing field 'recipe', got none"),
        (RunSpec, {"recipe": "gpro"}, r"unknown recipe 'gpro'\. Did you mean 'grpo'"),
        (RunSpec, {"recipe": "grpo", "setings": {}}, r"unknown field 'setings'\. Did you mean 'settings'"),
        (RunSpec, {"recipe": "grpo", "common": {}}, r"unknown field 'common'\. Known: config, recipe, settings"),
        (Stage, {"recipe": "grpo", "more": []}, r"unknown field 'more'\. Known: arm, config, recipe, settings, share"),
        (Stage, {"recipe": "grpo", "share": "half"}, "share must be a number, got 'half'"),
        (Stage, {"recipe": "grpo", "settings": None}, "settings must be a mapping, got None"),
        (Pipeline, {"stages": "grpo"}, "stages must be a list, got 'grpo'"),
        (Pipeline, {"stages": [], "seed": 0.5}, "seed must be an integer, got 0.5"),
    ],
)
def test_a_file_is_refused_with_field_value_and_choices(kind: type, content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(InputError, match=message) as refusal:
        read_experiment(path, kind)
    assert str(refusal.value).startswith(f"{path}: ")


def test_what_a_file_leaves_out_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("settings: {beta: 1}\nconfig: null\n")
    found = read_experiment(tmp_path / "mine.yaml", RunSpec, recipe="sft", config="a.yaml")
    assert found == RunSpec("sft", None, {"beta": 1})


def test_settings_that_an_experiment_gives_its_runs_are_refused() -> None:
    refuse_taken({"learning_rate": 1.0}, "the lab", ["time_budget"])
    for name in ("output-dir", "time_budget"):
        with pytest.raises(ValueError, match=f"cell a: {name} is set by the lab; remove it"):
            refuse_taken({name: 1}, "the lab", ["time_budget"], "cell a")
