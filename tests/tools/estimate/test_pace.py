"""What a finished run, or the check of a GPU, says of the machine that another run is estimated on."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.tools.estimate.test_plan import SETTINGS, run
from trl_ext.tools.estimate import recipe
from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.operations import Polynomial
from trl_ext.tools.estimate.hardware import GPUS
from trl_ext.tools.estimate.plan import measured
from trl_ext.tools.estimate.planned import Launch
from trl_ext.tools.estimate.roofline import estimate_time

H100 = GPUS["h100"]
COST = Polynomial(np.array([[0, 1e9, 0, 0], [1e9, 0, 0, 0], [0, 0, 0, 0], [9, 0, 0, 0]]))
COSTS = ModelCosts(COST, COST, COST, COST, 10**6, 10**6, 10**6, 10, 100, 1000)
RECIPE = Path(__file__).parents[3] / "recipes" / "grpo_math_qwen2.5_math_1.5b.yaml"


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted costs of a small model, in place of ten seconds of counting."""
    monkeypatch.setattr(recipe, "estimate_time", functools.partial(estimate_time, costs=COSTS))


def test_a_finished_run_is_estimated_at_its_own_pace(tmp_path: Path) -> None:
    metrics, summary = run(60)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    settings = {name: value for name, value in SETTINGS.items() if value is not None}
    settings |= {"model_name_or_path": "Qwen/Qwen2.5-Math-1.5B", "use_vllm": "auto", "group_size": 4,
                 "preset": "grpo_clip", "dataset": "mini_math"}  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "resolved.json").write_text(json.dumps(SETTINGS))
    reached = recipe.pace_of_pilot(tmp_path, Launch(), H100)
    again = recipe.estimate_time(
        recipe.planned_run(tmp_path / "config.yaml", ["completion=5"], Launch()), H100, reached
    )
    rates = measured(metrics, summary, SETTINGS)
    for name in ("start", "completion_token", "trained_token", "sync", "step", "problem", "save"):
        assert getattr(again.rates, name) == pytest.approx(getattr(rates, name)), name


def test_the_check_of_a_gpu_gives_its_pace(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    found = {"rollout_tokens_per_s": 500.0, "training_tokens_per_s": 900.0, "sync_s": 0.5, "start_s": 60.0,
             "prompt_tokens": 100.5, "completion_tokens": 201.0}  # fmt: skip
    file.write_text(json.dumps(found))
    reached = recipe.pace_of_check(file, RECIPE, Launch(), H100)
    lengths = ["prompt=100.5", "longest_prompt=101", "completion=201"]
    again = recipe.estimate_time(recipe.planned_run(RECIPE, lengths, Launch()), H100, reached)
    assert again.rates.completion_token == pytest.approx(1 / 500)
    assert again.rates.trained_token == pytest.approx(1.5 / 900)
    file.write_text(json.dumps({name: value for name, value in found.items() if name != "prompt_tokens"}))
    with pytest.raises(ValueError, match=r"no prompt_tokens; python -m scripts\.benchmarks\.gpu --json writes"):
        recipe.pace_of_check(file, RECIPE, Launch(), H100)
