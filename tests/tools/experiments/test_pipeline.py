"""A pipeline of recipes: its file, the time that each stage has, how it resumes, and the report of all stages."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from trl_ext.errors import InputError, Stopped
from trl_ext.runs.layout import RunFolder, finished
from trl_ext.runs.recipes import RECIPES, recipe_of
from trl_ext.tools.experiments.pipeline import run as module
from trl_ext.tools.experiments.pipeline.record import RECORD, load_or_create, resume_point, write_record
from trl_ext.tools.experiments.pipeline.run import _budget, _budget_of_process, _command, _report, run_pipeline
from trl_ext.tools.experiments.pipeline.settings import TAKEN_TOO, Pipeline, Stage, read_pipeline
from trl_ext.tools.experiments.preflight import check_in_this_process, check_runs
from trl_ext.tools.experiments.process import run_stage
from trl_ext.tools.experiments.runspec import TAKEN, RunSpec

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "recipes").glob("pipeline*.yaml"))
GRPO = {"recipe": "grpo"}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# The file.


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_pipelines_are_expert_iteration_then_grpo(path: Path) -> None:
    pipeline = read_pipeline(path)
    assert [stage.recipe for stage in pipeline.stages] == ["expert_iteration", "grpo"]
    assert pipeline.output_dir == f"runs/{path.stem}"
    assert pipeline.time_budget is not None
    assert [stage.share is None for stage in pipeline.stages] == [False, True]
    for stage in pipeline.stages:
        assert stage.config is None or (ROOT / stage.config).is_file()


def test_every_recipe_of_a_stage_is_a_script_with_its_own_yaml() -> None:
    for recipe in RECIPES.values():
        assert (ROOT / "recipes" / recipe.script).is_file()
        assert (ROOT / "recipes" / recipe.script).with_suffix(".yaml").is_file()


def test_all_file_settings_are_used_and_arguments_override_them(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "stages": [{"recipe": "sft", "config": "a.yaml", "share": 0.25, "settings": {"max_steps": 3}}, GRPO],
            "output_dir": "there", "model_name_or_path": "m", "time_budget": 60, "launch": ["--x", "y"], "seed": 4,
        },
    )  # fmt: skip
    stages = [Stage("sft", "a.yaml", {"max_steps": 3}, share=0.25), Stage("grpo")]
    assert read_pipeline(path, seed=None, output_dir=None) == Pipeline(stages, "there", "m", 60, ["--x", "y"], 4)
    given = {"output_dir": "here", "model_name_or_path": "n", "time_budget": 9.5, "seed": 0}
    assert read_pipeline(path, **given) == Pipeline(stages, "here", "n", 9.5, ["--x", "y"], 0)


def test_what_a_file_leaves_out_has_defaults(tmp_path: Path) -> None:
    for content in ({"stages": [GRPO]}, {"stages": [GRPO], "launch": None, "time_budget": None}):
        assert read_pipeline(written(tmp_path, content)) == Pipeline([Stage("grpo")], "runs/mine", None, None, [], 0)


def stages(*shares: float | str | None) -> list[dict[str, Any]]:
    return [{"recipe": "grpo", "share": share} for share in shares]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- grpo\n", "mine.yaml: not a mapping"),
        ("", "mine.yaml: not a mapping"),
        ("a: [1", "mine.yaml: while parsing"),
        ({"stages": []}, "stages: at least one is needed"),
        ({"seed": 1}, "stages: at least one is needed"),
        ({"stages": [GRPO], "time_bugdet": 3}, "unknown field 'time_bugdet'. Did you mean 'time_budget'"),
        ({"stages": [GRPO], "time_budget": 0}, "time_budget must be positive seconds, got 0"),
        ({"stages": [GRPO], "time_budget": "long"}, "mine.yaml: time_budget must be a number, got 'long'"),
        ({"stages": "grpo"}, "mine.yaml: stages must be a list, got 'grpo'"),
        ({"stages": [GRPO], "seed": 0.5}, "mine.yaml: seed must be an integer, got 0.5"),
        ({"stages": [GRPO | {"common": {}}]}, "stage 1: unknown field 'common'.* Known: arm, config, recipe, settings, share$"),
        ({"stages": [GRPO], "launch": "--num_processes 2"}, "launch must be a list, got '--num_processes 2'"),
        ({"stages": [GRPO, {"recipe": "grop"}]}, "stage 2: unknown recipe 'grop'. Did you mean 'grpo'"),
        ({"stages": [{"recipe": "sft", "shar": 0.5}]}, "stage 1: unknown field 'shar'. Did you mean 'share'"),
        ({"stages": [GRPO, {"config": "a.yaml"}]}, "stage 2: .*missing.*'recipe'"),
        ({"stages": ["grpo"]}, "stage 1: not a mapping: 'grpo'"),
        ({"stages": [GRPO | {"settings": None}]}, "stage 1: settings must be a mapping, got None"),
        ({"stages": [GRPO | {"settings": ["max_steps", 3]}]}, "stage 1: settings must be a mapping, got .'max_steps', 3"),
        ({"stages": stages(0.5)}, "share needs a time_budget"),
        ({"stages": stages(0.5, 0.6), "time_budget": 9}, "shares .* at most 1 together, got .0.5, 0.6"),
        ({"stages": stages(1.5), "time_budget": 9}, "shares .* got .1.5"),
        ({"stages": stages(None, 0), "time_budget": 9}, "shares of the time budget must be above 0 .* got .0"),
        ({"stages": stages(None, 0.5), "time_budget": 9}, "every stage but the last needs a share of the time_budget"),
        ({"stages": stages(None, None), "time_budget": 9}, "every stage but the last needs a share of the time_budget"),
        ({"stages": stages(0.5, 0.5, None), "time_budget": 9}, "leave nothing of the time budget for the last stage"),
        ({"stages": stages(1.2, -0.4), "time_budget": 9}, "shares of the time budget must be above 0 .* got .1.2, -0.4"),
    ],
)  # fmt: skip
def test_file_describing_no_pipeline_is_refused_by_name(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        read_pipeline(written(tmp_path, content))
    assert str(refusal.value).startswith(str(tmp_path / "mine.yaml"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: .*No such file"):
        read_pipeline(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", [*TAKEN, *TAKEN_TOO, "output-dir"])
def test_what_the_pipeline_gives_its_stages_is_no_setting_of_one(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"stages": [GRPO | {"settings": {"max_steps": 3, name: "1"}}]})
    with pytest.raises(InputError, match=f"stage 1: settings: {name} is set by the pipeline; remove it"):
        read_pipeline(path)


@pytest.mark.parametrize("shares", [(1,), (0.5, 0.5), (0.2, 0.4, 0.3, 0.1)])
def test_shares_may_be_all_of_the_budget(shares: tuple[float, ...], tmp_path: Path) -> None:
    assert sum(shares) >= 1  # the last ones by rounding more than 1
    pipeline = read_pipeline(written(tmp_path, {"stages": stages(*shares), "time_budget": 9}))
    assert [stage.share for stage in pipeline.stages] == list(shares)


# A stage's command.


def test_settings_become_arguments_of_a_command_line() -> None:
    settings = {
        "max_steps": 3, "learning_rate": 1e-5, "bf16": False, "push_to_hub": True, "stop": ["</answer>", "two words"],
        "selection_options": {"k": 2}, "selection": "at_most",
    }  # fmt: skip
    assert Stage("grpo", "a.yaml", settings=settings).arguments() == [
        "--config", "a.yaml", "--max_steps", "3", "--learning_rate", "1e-05", "--bf16", "false", "--push_to_hub", "true",
        "--stop", "</answer>", "two words", "--selection_options", '{"k": 2}', "--selection", "at_most",
    ]  # fmt: skip
    assert Stage("grpo").arguments() == []


def test_stage_command_has_model_budget_folder_and_any_launcher() -> None:
    stage = Stage("sft", settings={"max_steps": 3})
    settings = ["--max_steps", "3", "--seed", "7", "--output_dir", "out", "--resume", "auto"]
    script = str(Path("recipes") / "sft_math.py")
    alone = Pipeline([stage], "runs/p", seed=7)
    assert _command(alone, stage, Path("recipes"), Path("out"), None, None) == [sys.executable, script, *settings]
    launched = Pipeline([stage], "runs/p", launch=["--num_processes", "2"], seed=7)
    assert _command(launched, stage, Path("recipes"), Path("out"), "m", 30.5) == [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", script, *settings,
        "--model_name_or_path", "m", "--time_budget", "30.5",
    ]  # fmt: skip


# Time.


@pytest.mark.parametrize(
    ("share", "spent", "wanted"),
    [
        (None, [], 96.0),  # the report of all stages takes time as well
        (None, [30.0], 66.0),
        (None, [30.0, 45.52], 20.5),  # in tenths
        (0.25, [], 25.0),
        (0.25, [30.0], 25.0),  # of all of it, not of what is left
        (0.25, [50.0, 40.0], 6.0),  # but no more than is left
    ],
)
def test_a_stage_may_take_its_share_and_never_more_than_is_left(
    share: float | None, spent: list[float], wanted: float
) -> None:
    stage = Stage("grpo", share=share)
    record = {"stages": [["grpo", None, {}], 0]} | {f"{i}_grpo": {"seconds": s} for i, s in enumerate(spent, start=1)}
    record["9_grpo"] = {"time_budget": 50.0}  # begun and interrupted: its own clock has that
    assert _budget(Pipeline([stage], "p", time_budget=100), stage, record) == wanted
    assert _budget(Pipeline([Stage("grpo")], "p"), Stage("grpo"), record) is None


@pytest.mark.parametrize("seconds", [95.5, 130.0])  # 4 s are for the end
def test_budget_used_up_by_earlier_stages_is_an_error(seconds: float) -> None:
    stage = Stage("grpo", share=0.5)
    with pytest.raises(InputError, match="earlier stages used up the time budget of 100 s"):
        _budget(Pipeline([stage], "p", time_budget=100), stage, {"1_sft": {"seconds": seconds}})


# Resuming.

PIPELINE = Pipeline(
    [Stage("sft", share=0.5, settings={"stop": ("a",)}), Stage("grpo", share=0.5)], "p", None, 100, seed=1
)


def test_a_pipelines_record_is_taken_up_by_the_same_stages_only(tmp_path: Path) -> None:
    record = load_or_create(tmp_path, PIPELINE)
    assert record == {
        "stages": [["sft", None, None, 0.5, {"stop": ["a"]}], ["grpo", None, None, 0.5, {}], 1, None, 100]
    }
    first, second = PIPELINE.stages
    others = [
        Pipeline(PIPELINE.stages, "p", time_budget=100, seed=2),
        Pipeline(PIPELINE.stages[::-1], "p", time_budget=100, seed=1),
        Pipeline([first, Stage("grpo", share=0.1)], "p", time_budget=100, seed=1),
        Pipeline([first, Stage("grpo", "a.yaml", share=0.5)], "p", time_budget=100, seed=1),
        Pipeline([Stage("sft", share=0.5), second], "p", time_budget=100, seed=1),
        Pipeline(PIPELINE.stages, "p", "other", 100, seed=1),
        Pipeline(PIPELINE.stages, "p", time_budget=300, seed=1),
    ]
    begun = {"overhead": {"seconds": 7.0}, "1_sft": {"time_budget": 50.0, "earlier": 3.0, "running": 1.5}}
    write_record(tmp_path, record | begun)
    assert load_or_create(tmp_path, PIPELINE) == record | begun
    for other in others:  # nothing is done yet that could be lost
        anew = load_or_create(tmp_path, other)
        assert anew.pop("stages") != record["stages"]
        assert anew == {"overhead": {"seconds": 7.0}, "1_sft": {"earlier": 4.5}}  # whose time is used all the same
    write_record(tmp_path, record | {"1_sft": {"seconds": 3.0}})
    elsewhere = Pipeline(PIPELINE.stages, "q", None, 100, ["--x"], 1)
    for same in (PIPELINE, elsewhere):
        assert load_or_create(tmp_path, same) == record | {"1_sft": {"seconds": 3.0}}
    for other in others:
        with pytest.raises(InputError, match="holds a pipeline of other stages, another seed, model or time budget"):
            load_or_create(tmp_path, other)


def test_a_stages_yaml_that_has_changed_makes_another_pipeline(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1")
    pipeline = Pipeline([Stage("sft", str(tmp_path / "a.yaml"))], "p")
    write_record(tmp_path, load_or_create(tmp_path, pipeline) | {"1_sft": {"seconds": 3.0}})
    assert "1_sft" in load_or_create(tmp_path, pipeline)
    (tmp_path / "a.yaml").write_text("seed: 2")
    with pytest.raises(InputError, match="holds a pipeline of other stages"):
        load_or_create(tmp_path, pipeline)


def test_stage_resumes_in_last_checkpoint_folder_with_its_clock(tmp_path: Path) -> None:
    wanted = tmp_path / "1_grpo"
    assert resume_point(wanted) == (wanted, 0.0)
    wanted.mkdir()
    for name, seconds in (("1_grpo-2", 12.5), ("1_grpo-10", 3.0)):
        for step in (4, 20):
            (tmp_path / name / f"checkpoint-{step}").mkdir(parents=True)
            (tmp_path / name / f"checkpoint-{step}" / "run.json").write_text(
                json.dumps({"wall_clock_s": seconds * step})
            )
    (tmp_path / "1_grpo-11").mkdir()  # killed before its first checkpoint
    assert resume_point(wanted) == (tmp_path / "1_grpo-10", 60.0)


def test_what_interrupted_processes_have_used_is_used() -> None:
    entry = {"time_budget": 100.0, "earlier": 30.0}
    assert _budget_of_process(entry, 0.0, 500.0) == 70.0  # no checkpoint: a new clock
    assert _budget_of_process(entry, 20.0, 500.0) == 90.0  # 70 more, on a clock that begins at 20
    assert _budget_of_process(entry, 20.0, 45.0) == 65.0  # restarts have used up some of it as well
    assert _budget_of_process({"time_budget": 100.0, "earlier": 130.0}, 20.0, 500.0) == 21.0  # a second, to end well
    assert _budget_of_process({"time_budget": None, "earlier": 30.0}, 0.0, math.inf) is None


def test_a_stage_has_finished_in_the_last_folder_with_a_summary(tmp_path: Path) -> None:
    wanted = tmp_path / "1_grpo"
    for number, path in enumerate([wanted, *(tmp_path / f"1_grpo-{n}" for n in range(2, 12))], start=1):
        path.mkdir()
        if number in (1, 3, 9, 10):  # the others have not ended
            (path / "summary.json").touch()
            assert finished(wanted) == RunFolder(path)
    (tmp_path / "11_grpo").mkdir()
    (tmp_path / "11_grpo" / "summary.json").touch()
    assert finished(wanted) == RunFolder(tmp_path / "1_grpo-10")


def validation(step: int, seconds: float, accuracy: float) -> dict[str, Any]:
    return {"step": step, "wall_clock_s": seconds, "accuracy": accuracy, "problems": 8}


def leave_summary(folder: Path, *validations: dict[str, Any], seconds: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"validations": validations, "wall_clock_s": seconds}))


Curves = Mapping[str, Sequence[dict[str, Any]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be drawn: file name, title and curves of the last call."""
    last: dict[str, Any] = {}

    def note(path: Path, curves: Curves, title: str, seconds: float | None) -> None:
        drawn_curves = {name: list(curve) for name, curve in curves.items()}
        last.update(file=path.name, title=title, curves=drawn_curves, seconds=seconds)

    monkeypatch.setattr(module, "write_curve", note)
    monkeypatch.setattr(module, "provenance", lambda: {"command": "python"})
    return last


def test_pipeline_report_has_one_clock_and_cumulative_steps(tmp_path: Path, drawn: dict[str, Any]) -> None:
    record = {
        "stages": [],
        "overhead": {"seconds": 7.5},
        "1_sft": {"time_budget": 50.0, "folder": "1_sft-2", "seconds": 40.0},
        "2_grpo": {"time_budget": 60.0, "folder": "2_grpo", "seconds": 55.5},
        "3_grpo": {"time_budget": 4.5, "folder": "3_grpo", "seconds": 4.5},
    }
    leave_summary(tmp_path / "1_sft-2", validation(0, 5.0, 0.1), validation(10, 30.0, 0.3))
    again = validation(35, 50.0, 0.95) | {"weights_of_step": 20}
    leave_summary(tmp_path / "2_grpo", validation(0, 6.0, 0.3), validation(20, 25.0, 0.9), again)
    leave_summary(tmp_path / "3_grpo", validation(0, 2.0, 0.8))
    pipeline = Pipeline([Stage("sft"), Stage("grpo"), Stage("grpo")], str(tmp_path), time_budget=None, seed=3)
    summary = _report(tmp_path, pipeline, record)
    points = [(v["stage"], v["step"], v["wall_clock_s"], v["accuracy"]) for v in summary.pop("validations")]
    assert points == [
        ("1_sft", 0, 12.5, 0.1), ("1_sft", 10, 37.5, 0.3), ("2_grpo", 10, 53.5, 0.3), ("2_grpo", 30, 72.5, 0.9),
        ("2_grpo", 45, 97.5, 0.95), ("3_grpo", 45, 105.0, 0.8),
    ]  # fmt: skip
    assert summary == {
        "validation_accuracy_before": 0.1, "validation_accuracy_after": 0.8, "best_validation_accuracy": 0.95,
        "best_validation_step": 30, "validation_problems": 8, "final_validation_problems": 8,
        "wall_clock_s": 107.5, "seed": 3, "command": "python",
        "stages": {name: record[name] for name in ("1_sft", "2_grpo", "3_grpo")},
    }  # fmt: skip
    assert (drawn["file"], drawn["title"], drawn["seconds"]) == ("curve.png", tmp_path.name, None)
    assert [(name, v["step"]) for name, curve in drawn["curves"].items() for v in curve] == [p[:2] for p in points]
    assert json.loads((tmp_path / "summary.json").read_text())["best_validation_step"] == 30


class FakeStages:
    """In place of a stage's process: leaves the summary of a run of so many seconds, or fails where it is told to.

    Args:
        seconds: by each run's own clock.
        took: each process; none of the time if left out.
    """

    def __init__(self, seconds: Sequence[float], took: Sequence[float] = (), fails_at: int = -1) -> None:
        self.seconds, self.took, self.fails_at = seconds, took or [0.0] * len(seconds), fails_at
        self.now = 0.0
        self.asked: list[dict[str, str]] = []  # names and values of each command line
        self.records: list[dict[str, Any]] = []  # what is noted in the middle of each

    def __call__(self, command: list[str], name: str, tick: Any) -> None:
        asked = dict(zip(command[2::2], command[3::2], strict=True)) | {"recipe": Path(command[1]).name}
        number = len(self.asked)
        self.asked.append(asked)
        self.now += self.took[number] / 2
        tick()
        self.records.append(json.loads((Path(asked["--output_dir"]).parent / RECORD).read_text()))
        self.now += self.took[number] / 2
        if number == self.fails_at:
            raise InputError(f"{name} ended with status 3")
        wanted = Path(asked["--output_dir"])
        is_new = wanted.exists() and not list(wanted.glob("checkpoint-*"))  # as a recipe chooses
        folder = wanted.with_name(f"{wanted.name}-2") if is_new else wanted
        leave_summary(folder, validation(0, 1.0, 0.5), seconds=self.seconds[number])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, drawn: dict[str, Any]) -> Any:
    def install(seconds: Sequence[float], took: Sequence[float] = (), fails_at: int = -1) -> FakeStages:
        stages = FakeStages(seconds, took, fails_at)
        monkeypatch.setattr(module, "_check_stages", lambda *_: None)
        monkeypatch.setattr(module, "run_stage", stages)
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: stages.now))
        return stages

    return install


def three(tmp_path: Path) -> Pipeline:
    stages = [Stage("expert_iteration", share=0.4), Stage("sft", share=0.5), Stage("grpo")]
    return Pipeline(stages, str(tmp_path / "p"), "start", time_budget=100, seed=5)


def test_each_stage_starts_from_the_previous_with_the_time_left(
    tmp_path: Path, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # the first run has been interrupted after 34 s; the second took long to save
    stages, folder = fake([44.0, 15.0, 36.0], took=[10.0, 20.0, 36.0]), tmp_path / "p"
    (folder / "1_expert_iteration" / "checkpoint-3").mkdir(parents=True)
    (folder / "1_expert_iteration" / "checkpoint-3" / "run.json").write_text('{"wall_clock_s": 34.0}')
    (folder / "2_sft").mkdir(parents=True)  # of a run that ended before its first checkpoint
    summary = run_pipeline(three(tmp_path), Path("recipes"))
    assert [asked["recipe"] for asked in stages.asked] == ["expert_iteration.py", "sft_math.py", "grpo_math.py"]
    models = ["start", str(folder / "1_expert_iteration"), str(folder / "2_sft-2")]
    assert [asked["--model_name_or_path"] for asked in stages.asked] == models
    assert [asked["--time_budget"] for asked in stages.asked] == ["40.0", "50.0", "32.0"]  # less the end
    assert {asked["--seed"] for asked in stages.asked} == {"5"}
    assert summary["wall_clock_s"] == 100.0
    noted = [
        record[name] for record, name in zip(stages.records, ("1_expert_iteration", "2_sft", "3_grpo"), strict=True)
    ]
    assert [(entry["earlier"], entry["running"]) for entry in noted] == [(34.0, 5.0), (0.0, 10.0), (0.0, 18.0)]
    assert summary["stages"]["1_expert_iteration"] == {
        "time_budget": 40.0, "earlier": 34.0, "folder": "1_expert_iteration", "seconds": 44.0,
    }  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "stage 1 of 3: expert_iteration", "stage 2 of 3: sft", "stage 3 of 3: grpo",
    ]  # fmt: skip


def test_time_of_killed_processes_and_of_startups_is_counted(tmp_path: Path, fake: Any) -> None:
    pipeline, stages = three(tmp_path), fake([44.0, 15.0, 36.0], took=[10.0, 20.0, 36.0])
    begun = {"1_expert_iteration": {"time_budget": 40.0, "earlier": 3.0, "running": 4.0}, "overhead": {"seconds": 6.0}}
    (tmp_path / "p").mkdir()
    write_record(tmp_path / "p", load_or_create(tmp_path / "p", pipeline) | begun)
    watched = []
    run_pipeline(pipeline, Path("recipes"), spent=5.0, watch=lambda: watched.append(stages.now))
    assert [asked["--time_budget"] for asked in stages.asked] == [
        "33.0",
        "50.0",
        "48.0",
    ]  # 40 - 7; 100 - 17 - 20 - 11 - 4
    record = json.loads((tmp_path / "p" / RECORD).read_text())
    assert record["overhead"] == {"seconds": 11.0}
    assert record["1_expert_iteration"]["seconds"] == 17.0
    assert watched == [5.0, 10.0, 20.0, 30.0, 48.0]  # while each runs and between them: the end of the last is the end


def test_what_the_watch_raises_ends_the_stage_and_is_noted(tmp_path: Path, fake: Any) -> None:
    def watch() -> None:
        raise TimeoutError

    fake([10.0], took=[10.0])
    with pytest.raises(TimeoutError):
        run_pipeline(three(tmp_path), Path("recipes"), watch=watch)
    record = json.loads((tmp_path / "p" / RECORD).read_text())
    assert record["1_expert_iteration"] == {"time_budget": 40.0, "earlier": 5.0}


def test_stage_with_changed_settings_gets_the_time_left(tmp_path: Path, fake: Any) -> None:
    pipeline = Pipeline([Stage("grpo")], str(tmp_path / "p"), time_budget=100)
    stages = fake([60.0], took=[60.0])
    (tmp_path / "p").mkdir()
    begun = {"stages": "others", "overhead": {"seconds": 6.0}, "1_grpo": {"time_budget": 20.0, "earlier": 10.0}}
    write_record(tmp_path / "p", begun)
    run_pipeline(pipeline, Path("recipes"))
    assert [asked["--time_budget"] for asked in stages.asked] == ["80.0"]  # less 6, 10 and the end


def test_the_start_is_noted_before_the_checks(tmp_path: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    fake([])
    monkeypatch.setattr(module, "_check_stages", killed)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(three(tmp_path), Path("recipes"), spent=5.0)
    assert json.loads((tmp_path / "p" / RECORD).read_text())["overhead"] == {"seconds": 5.0}


def test_interrupted_pipeline_resumes_its_stage_and_budget(tmp_path: Path, fake: Any) -> None:
    fake([10.0], took=[10.0, 7.0], fails_at=1)
    with pytest.raises(InputError, match="2_sft ended with status 3"):
        run_pipeline(three(tmp_path), Path("recipes"))
    record = json.loads((tmp_path / "p" / RECORD).read_text())
    assert record["2_sft"] == {"time_budget": 50.0, "earlier": 7.0}
    leave_summary(tmp_path / "p" / "1_expert_iteration-2")  # of a run by hand, after the stage was done
    again = fake([20.0, 5.0], took=[20.0, 5.0])
    run_pipeline(three(tmp_path), Path("recipes"))
    models = [str(tmp_path / "p" / name) for name in ("1_expert_iteration", "2_sft")]
    assert [asked["--model_name_or_path"] for asked in again.asked] == models
    assert [asked["--time_budget"] for asked in again.asked] == [
        "43.0",
        "59.0",
    ]  # 50 less 7; 100 less 10, 27 and the end
    finished = fake([])
    assert run_pipeline(three(tmp_path), Path("recipes"))["wall_clock_s"] == 42.0
    assert finished.asked == []


# Processes.


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("exit 0", None, ""),
        ("exit 3", InputError, "stage 2_grpo failed with exit status 3"),
        ("exit 143", Stopped, "SIGTERM"),
        ("kill -TERM $$", Stopped, "SIGTERM"),
    ],
)
def test_failed_stage_is_error_and_stopped_one_stops_pipeline(
    script: str, error: type[Exception] | None, message: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    if error is None:
        run_stage(["sh", "-c", script], "2_grpo")
    else:
        with pytest.raises(error, match=message):
            run_stage(["sh", "-c", script], "2_grpo")
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_launcher_of_a_stage_lets_its_ranks_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    run_stage(["sh", "-c", 'test "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" = 600'], "2_grpo")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "50")
    run_stage(["sh", "-c", 'test "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" = 50'], "2_grpo")


@pytest.mark.moderate
def test_stage_whose_tick_raises_is_killed_with_all_children(tmp_path: Path) -> None:
    def tick() -> None:
        if (tmp_path / "up").exists():
            raise TimeoutError

    script = f"trap '' TERM; (trap '' TERM; sleep 60) & echo $! > {tmp_path / 'up'}; wait"
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run_stage(["sh", "-c", script], "2_grpo", tick)
    assert time.monotonic() - began < 20
    child = int((tmp_path / "up").read_text())
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail("what the stage had started still runs")


ORPHAN = """
import sys, time
from trl_ext.tools.experiments.process import run_stage
run_stage([sys.executable, "-c", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"], "1_grpo")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stage outlives a pipeline that is killed")
def test_a_stage_is_told_to_stop_when_the_pipeline_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ORPHAN], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    for _ in range(600):
        time.sleep(0.1)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    process.kill()
    process.wait()
    stage = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not psutil.pid_exists(stage) or psutil.Process(stage).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail("the stage still runs")


LAUNCHER = """
import os
from trl_ext.recipes.cli import Stopped
from trl_ext.tools.experiments.process import run_stage
rank = "trap 'sleep 1; echo saved > saved; exit 0' TERM; echo up > up; while :; do sleep 0.05; done"
try:
    run_stage(["sh", "-c", f"({rank}) & wait"], "1_grpo")
except Stopped:
    os._exit(143)  # at once
"""


@pytest.mark.slow
def test_sigterm_reaches_launched_processes_and_is_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    for _ in range(600):
        time.sleep(0.1)
        if (tmp_path / "up").exists():
            break
    process.terminate()
    assert process.wait(30) == 143
    assert (tmp_path / "saved").exists()


# Checking the arguments of all stages before the first one runs.


def check(*plan: RunSpec, rules: str | None = None) -> None:
    runs = {f"stage {number}": run for number, run in enumerate(plan, start=1)}
    check_in_this_process(runs, rules, list(runs)[:-1])


@pytest.mark.slow  # imports every recipe
def test_every_recipe_can_be_checked_with_a_stages_arguments() -> None:
    assert {name: recipe_of(recipe.settings()[0]()) for name, recipe in RECIPES.items()} == {n: n for n in RECIPES}
    assert recipe_of(type("Mine", (RECIPES["sft"].settings()[0],), {})()) == "sft"
    settings = {"sampling_temperature": 0.5, "stop": ["a", "b"], "gradient_checkpointing": True}
    options = {"selection": "at_most", "selection_options": {"k": 2}}
    check(
        Stage("grpo", settings=settings),
        Stage("sft", settings=settings | {"filter_correct": True}),
        Stage("expert_iteration", settings=settings | options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("grpo", ["--dataset", "none_{split}.csv"], "dataset: no file 'none_train.csv'"),
        ("grpo", ["--help", "lr"], "--help shows settings and starts no run"),
        ("grpo", ["--preset", "dapoo"], "unknown preset 'dapoo'. Did you mean 'dapo'"),
        ("grpo", ["--n_ei_steps", "3"], "--n_ei_steps"),
        ("sft", ["--num_unique_examples", "0"], "num_unique_examples must be a positive number or full, got '0'"),
        ("expert_iteration", ["--selection", "shortst"], "unknown selection 'shortst'"),
        ("expert_iteration", ["--max_steps", "three"], "invalid int value: 'three'"),
        ("sft", ["--config", "none.yaml"], "--config none.yaml: there is no such file"),
        ("sft", ["--config", "torn.yaml"], "while parsing a flow sequence"),
    ],
)
def test_first_stage_with_invalid_arguments_is_named_in_one_line(
    recipe: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.yaml").write_text("a: [1, 2\nb: 3\n")
    plan = [RunSpec("grpo", more=["--seed", "3"]), RunSpec(recipe, more=arguments), RunSpec("grpo", "none.yaml")]
    with pytest.raises(InputError, match=f"^stage 2: .*{re.escape(message)}") as refusal:
        check(*plan)
    assert str(refusal.value).count("\n") == 0


@pytest.mark.slow  # imports every recipe
def test_only_the_last_stage_is_held_to_the_final_validation() -> None:
    ends_anyhow, whole = {"restore_best": False}, {"restore_best": True, "final_validation_problems": 5000}
    check(Stage("sft", settings=ends_anyhow), Stage("grpo", settings=whole), rules="mini")
    with pytest.raises(InputError, match=r"stage 2: the rules 'mini' are broken: .*restore_best must be true"):
        check(Stage("sft", settings=whole), Stage("grpo", settings=ends_anyhow), rules="mini")


@pytest.mark.nightly
@pytest.mark.slow  # a process that imports every recipe
def test_all_stages_are_checked_before_the_first_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_stage", FakeStages([]))
    wrong = Pipeline([Stage("sft"), Stage("grpo", settings={"preset": "dapoo"})], str(tmp_path / "p"))
    with pytest.raises(InputError, match=r"^stage 2 \(grpo\): unknown preset 'dapoo'\. Did you mean 'dapo'"):
        run_pipeline(wrong, ROOT / "recipes")
    assert [path.name for path in (tmp_path / "p").iterdir()] == [RECORD]
    with pytest.raises(InputError, match=r"the settings could not be checked: [\s\S]*KeyError: 'none'"):
        check_runs({"a run": RunSpec("grpo")}, rules="none")
