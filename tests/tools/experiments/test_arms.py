"""Pilots of a pipeline's arms: what they run, which arm the rule chooses, and that only that one continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_ext.errors import InputError
from trl_ext.tools.experiments.pipeline import run as module
from trl_ext.tools.experiments.pipeline.arms import choose, pilots_of, slope_of_last_half, with_chosen_arm
from trl_ext.tools.experiments.pipeline.record import RECORD
from trl_ext.tools.experiments.pipeline.run import _budget, run_pipeline
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage, read_pipeline

END = {"restore_best": True, "final_validation_problems": 5000, "lr_decay_fraction": 0.5}


def two_arms(**others: Any) -> Pipeline:
    stages = [
        Stage("expert_iteration", share=0.2, arm="warm_up"),
        Stage("grpo", settings={"learning_rate": 1e-4, **END}, arm="warm_up"),
        Stage("grpo", settings={"learning_rate": 2e-4, **END}, arm="on_policy"),
    ]
    return Pipeline(**{"stages": stages, "output_dir": "p", "time_budget": 200.0, "pilot_seconds": 30.0, **others})


# The rule.


def measured(**arms: tuple[float, float]) -> dict[str, Any]:
    return {name: {"accuracy": a, "problems": 1024, "slope_per_hour": slope} for name, (a, slope) in arms.items()}


@pytest.mark.parametrize(
    ("arms", "chosen"),
    [
        ({"a": (0.5, 0.0), "b": (0.4, 9.0)}, "a"),  # 4.6 standard errors
        ({"a": (0.4, 9.0), "b": (0.5, 0.0)}, "b"),
        ({"a": (0.50, 0.1), "b": (0.48, 0.2)}, "b"),  # 0.9
        ({"a": (0.50, 0.2), "b": (0.48, 0.1)}, "a"),
        ({"a": (0.50, 0.1), "b": (0.477, 0.2)}, "a"),  # 1.04
        ({"a": (0.50, 0.1), "b": (0.50, 0.1)}, "a"),
        ({"a": (0.50, 0.1), "b": (0.49, 0.2), "c": (0.30, 0.9)}, "b"),
        ({"a": (0.0, 0.0), "b": (0.0, 0.0)}, "a"),
    ],
)
def test_higher_accuracy_wins_and_within_an_error_the_steeper(
    arms: dict[str, tuple[float, float]], chosen: str
) -> None:
    assert choose(measured(**arms)) == chosen


def test_the_slope_is_that_of_the_last_half_by_the_clock() -> None:
    def curve(*points: tuple[float, float]) -> Any:
        return [{"wall_clock_s": seconds, "accuracy": accuracy} for seconds, accuracy in points]

    assert slope_of_last_half(curve((60, 0.1), (200, 0.3), (400, 0.4), (660, 0.5))) == pytest.approx(3600 * 0.2 / 460)
    assert slope_of_last_half(curve((60, 0.1), (360, 0.3), (660, 0.4))) == pytest.approx(3600 * 0.1 / 300)
    assert slope_of_last_half(curve((60, 0.1), (660, 0.4))) == pytest.approx(3600 * 0.3 / 600)
    assert slope_of_last_half(curve((60, 0.1))) == 0.0


# What is run.


@pytest.mark.parametrize(("first", "last"), [(0.7, None), (0.7, 0.3)])
def test_pilots_and_shares_leave_time_for_the_last_stage(first: float, last: float | None) -> None:
    stages = [
        Stage("expert_iteration", share=first, arm="a"),
        Stage("grpo", share=last, arm="a"),
        Stage("grpo", arm="b"),
    ]
    with pytest.raises(
        ValueError, match=r"arm a: its shares .* and 2 pilots of 30.0 s take 1[03]0% of the time_budget"
    ):
        two_arms(stages=stages)


def test_a_pilot_is_the_arms_first_stage_without_its_end() -> None:
    pilots = pilots_of(two_arms())
    assert list(pilots) == ["warm_up", "on_policy"]
    last = {"restore_best": False}  # also where a stage's config file has it
    assert pilots["warm_up"] == Stage("expert_iteration", share=0.15, settings=last, arm="warm_up")
    assert pilots["on_policy"] == Stage("grpo", share=0.15, settings={"learning_rate": 2e-4, **last}, arm="on_policy")
    assert _budget(two_arms(), pilots["on_policy"], {}) == 30.0
    assert pilots_of(Pipeline([Stage("grpo")], "p")) == {}


def test_a_pilot_that_was_never_validated_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Processes(monkeypatch, RUNS | {"0_on_policy": []})
    with pytest.raises(InputError, match="0_on_policy: no validation of arm on_policy; set validate_every"):
        run_pipeline(two_arms(output_dir=str(tmp_path)), tmp_path)


def test_only_the_chosen_arms_stages_are_left() -> None:
    assert with_chosen_arm(two_arms(), {}) == two_arms()
    left = with_chosen_arm(two_arms(), {"decision": {"arm": "warm_up"}})
    assert [(stage.recipe, stage.share, stage.arm) for stage in left.stages] == [
        ("expert_iteration", 0.2, None),
        ("grpo", None, None),
    ]


class Processes:
    """In place of the stages' processes: their commands, and a summary with the accuracy that is theirs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accuracies: dict[str, list[float]]) -> None:
        self.accuracies, self.commands, self.dies_in = accuracies, dict[str, list[str]](), ""
        monkeypatch.setattr(module, "run_stage", self.run)
        monkeypatch.setattr(module, "_check_stages", lambda *_: None)
        monkeypatch.setattr(module, "write_curve", lambda *_, **__: None)

    def run(self, command: list[str], name: str, tick: Any) -> None:
        self.commands[name] = command
        if name == self.dies_in:
            raise KeyboardInterrupt
        output = Path(command[command.index("--output_dir") + 1])
        output.mkdir(parents=True)
        curve = [
            {"step": 5 * i, "wall_clock_s": 10.0 * i, "accuracy": accuracy, "problems": 1024}
            for i, accuracy in enumerate(self.accuracies[name])
        ]
        (output / "summary.json").write_text(json.dumps({"validations": curve, "wall_clock_s": 30.0}))

    def model_of(self, name: str) -> str | None:
        command = self.commands[name]
        if "--model_name_or_path" not in command:
            return None
        return Path(command[command.index("--model_name_or_path") + 1]).name


RUNS = {
    "0_warm_up": [0.1, 0.3, 0.4],
    "0_on_policy": [0.1, 0.2, 0.3],
    "1_expert_iteration": [0.4, 0.5],
    "2_grpo": [0.5, 0.6],
    "1_grpo": [0.3, 0.7],
}


@pytest.mark.parametrize(
    ("of_pilots", "stages"),
    [
        ({}, {"1_expert_iteration": "0_warm_up", "2_grpo": "1_expert_iteration"}),
        ({"0_on_policy": [0.1, 0.2, 0.5]}, {"1_grpo": "0_on_policy"}),
    ],
)
def test_the_chosen_arm_continues_from_its_pilots_model(
    of_pilots: Any, stages: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(monkeypatch, RUNS | of_pilots)
    summary = run_pipeline(two_arms(output_dir=str(tmp_path)), tmp_path)
    assert list(processes.commands) == ["0_warm_up", "0_on_policy", *stages]
    assert [processes.model_of(name) for name in processes.commands] == [None, None, *stages.values()]
    arm = next(iter(stages.values()))
    decided: Any = summary["decision"]  # type: ignore[typeddict-item]
    assert decided["arm"] == arm.removeprefix("0_")
    assert decided["pilots"]["warm_up"]["accuracy"] == 0.4
    assert list(dict.fromkeys(entry["stage"] for entry in summary["validations"])) == [arm, *stages]
    assert summary["validations"][3]["step"] == 10  # after those of its pilot
    budgets = [float(command[command.index("--time_budget") + 1]) for command in processes.commands.values()]
    assert budgets[:2] == [30.0, 30.0]
    assert processes.commands[arm][processes.commands[arm].index("--resume") + 1] == "auto"


def test_interrupted_pilots_resume_and_a_decision_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = two_arms(output_dir=str(tmp_path))
    for dies_in, run in (
        ("0_on_policy", ["0_warm_up", "0_on_policy"]),
        ("2_grpo", ["0_on_policy", "1_expert_iteration", "2_grpo"]),
    ):
        processes = Processes(monkeypatch, RUNS)
        processes.dies_in = dies_in
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(pipeline, tmp_path)
        assert list(processes.commands) == run
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["decision"]["arm"] == "warm_up"
    shutil.rmtree(tmp_path / "0_on_policy")
    (tmp_path / record["0_on_policy"]["folder"]).mkdir()
    better = [{"step": 0, "wall_clock_s": 1.0, "accuracy": 0.9, "problems": 1024}]
    (tmp_path / record["0_on_policy"]["folder"] / "summary.json").write_text(json.dumps({"validations": better}))
    processes = Processes(monkeypatch, RUNS)
    run_pipeline(pipeline, tmp_path)
    assert list(processes.commands) == ["2_grpo"]
    with pytest.raises(InputError, match="holds a pipeline of other stages"):
        run_pipeline(two_arms(output_dir=str(tmp_path), pilot_seconds=20.0), tmp_path)


# The file.

A, B = {"recipe": "grpo", "arm": "a"}, {"recipe": "grpo", "arm": "b"}
WHOLE = {"stages": [A, B], "time_budget": 100, "pilot_seconds": 10}


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"stages": [A, {"recipe": "grpo"}]}, "arm: every stage needs one, and two at least are compared, got .'a', None"),
        ({"stages": [A]}, "arm: every stage needs one, and two at least"),
        ({"stages": [{"recipe": "grpo"}]}, "pilot_seconds: no stage has an arm"),
        ({"stages": [A, {"recipe": "grpo", "arm": "../b"}]}, "arm: '../b' must be letters"),
        ({"pilot_seconds": None}, "arms need pilot_seconds and a time_budget"),
        ({"time_budget": None}, "arms need pilot_seconds and a time_budget"),
        ({"pilot_seconds": 50}, "2 pilots leave some of the time_budget of 100 s to the chosen arm, got 50"),
        ({"pilot_seconds": -1}, "pilot_seconds must be positive"),
        ({"stages": [A, B, B]}, "every stage but the last needs a share"),
    ],
)  # fmt: skip
def test_arms_that_cannot_be_compared_are_refused(others: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(WHOLE))
    assert len(read_pipeline(path).stages) == 2
    path.write_text(yaml.safe_dump(WHOLE | others))
    with pytest.raises(InputError, match=message):
        read_pipeline(path)
