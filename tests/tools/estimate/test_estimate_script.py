"""`scripts/estimate.py`: a recipe and a GPU to tables, a file, and an exit status that says whether it fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts import estimate
from tests.tools.estimate.memory.test_step import NETWORK

RECIPE = """\
model_name_or_path: {model}
preset: dr_grpo
max_steps: 10
rollout_batch_size: 8
group_size: 2
train_batch_size: 8
micro_train_batch_size: 2
sampling_max_tokens: 64
vllm_max_model_length: 128
validation_problems: 16
bf16: true
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of a tiny model, which fits anywhere."""
    NETWORK.save_pretrained(tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=tmp_path / "model"), encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The program with these arguments."""
    monkeypatch.setattr(sys, "argv", ["estimate.py", *arguments])
    estimate.main()


@pytest.mark.slow
def test_a_recipe_is_estimated_with_a_table_and_a_file(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    options = ["--gpus", "2", "--quick", "--budget", "3600", "--json", str(written)]
    run(monkeypatch, "--config", str(recipe), *options)
    said, found = capsys.readouterr().out, json.loads(written.read_text(encoding="utf-8"))
    for line in ("parameters", "gradient buckets", "KV cache", "peak: ", "micro-batches", "fit into 3600 s"):
        assert line in said
    assert found["refusal"] is None
    assert found["limits"] is None
    assert found["totals"][found["peak"]] == sum(found["moments"][found["peak"]].values())
    assert found["free"] == found["capacity"] - found["totals"][found["peak"]]


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_with_its_setting(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["--set", "vllm_gpu_memory_utilization=0.999"]
    with pytest.raises(SystemExit, match=r"does not fit: .*lower vllm_gpu_memory_utilization from 0\.999 to 0\.9"):
        run(monkeypatch, "--config", str(recipe), "--quick", *changes)


TWO_GPUS = ["--two_gpus", "--gpu", "h100", "--set", "use_vllm=true"]


@pytest.mark.slow
def test_the_modes_of_two_gpus_are_compared(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "found.json"
    run(monkeypatch, "--config", str(recipe), *TWO_GPUS, "rollout_ahead=1", "vllm_mode=server", "--json", str(written))
    said, found = capsys.readouterr().out, json.loads(written.read_text(encoding="utf-8"))
    colocated, in_turn, ahead = (mode["seconds"] for mode in found["modes"].values())
    (served, other) = (found["modes"][name] for name in list(found["modes"])[1:])
    assert in_turn == pytest.approx(served["sampling"] + served["training"] + served["push"])
    assert ahead == pytest.approx(max(other["sampling"], other["training"]) + other["push"])
    assert found["ratio"] == pytest.approx(served["sampling"] / served["training"])
    fastest = min(found["modes"], key=lambda name: float(found["modes"][name]["seconds"]))
    assert f"the fastest: {fastest}" in said
    assert colocated > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "1"], "--two_gpus: of 2 GPUs, not of 1"),
        (["use_vllm=false"], "compares ways to sample GRPO's rollouts with vLLM"),
        (["group_size=2"], "on two; set rollout_batch_size and train_batch_size"),
    ],
)
def test_what_two_gpus_cannot_be_compared_for(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    if "set rollout" in said:  # without them a second GPU has as many rows again
        lines = recipe.read_text(encoding="utf-8").splitlines(True)
        recipe.write_text("".join(line for line in lines if "_batch_size" not in line or "micro" in line))
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, "--config", str(recipe), *TWO_GPUS, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "h1000"], "error: unknown GPU 'h1000'"),
        (["--set", "mirco_train_batch_size=2"], "Did you mean --micro_train_batch_size"),
        (["--pilot", "no_such_run"], "error: no_such_run: no config.yaml"),
        (["--check", "no_such_file"], "error: .*no_such_file"),
        (["--gpus", "0"], "error: --gpus 0: at least 1"),
        (["--budget", "0"], "error: --budget 0: more than 0 seconds"),
    ],
)
def test_what_cannot_be_estimated_ends_in_a_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        run(monkeypatch, "--config", str(recipe), "--quick", *options)


def test_a_recipe_that_is_no_yaml_ends_in_a_line(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.write_text("preset: [dr_grpo", encoding="utf-8")
    with pytest.raises(SystemExit, match="error: "):
        run(monkeypatch, "--config", str(recipe), "--quick")
