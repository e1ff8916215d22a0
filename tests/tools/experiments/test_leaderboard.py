"""The leaderboard's rules, what its result says at any moment, and a kill -9 at any of them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trl_ext.errors import InputError
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.checkpoints import link_model
from trl_ext.runs.clock import Clock
from trl_ext.tools.experiments import leaderboard as module
from trl_ext.tools.experiments.leaderboard import (
    BEST,
    RESULT,
    best,
    candidates,
    check_pipeline,
    processes_of,
    run_leaderboard,
    write_result,
)
from trl_ext.tools.experiments.pipeline.record import RECORD, elapsed_seconds, load_or_create
from trl_ext.tools.experiments.pipeline.run import _END
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage, read_pipeline
from trl_ext.tools.experiments.preflight import check_in_this_process
from trl_ext.tools.experiments.process import _TICK
from trl_ext.tools.experiments.rules import _PLAIN, RULES, violations

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "recipes").glob("leaderboard*.yaml"))
MINI = RULES["mini"]


# Rules.


def stage_settings(rules: str, **others: Any) -> tuple[Any, Any]:
    """A task and a config that keep to the rules but for `others`."""
    wanted = dict(RULES[rules].settings)
    known = {
        "final_validation_problems": RULES[rules].problems, "validation_problems": 512, "restore_best": True,
        "validation_temperature": None, "validation_max_tokens": None, "temperature": wanted.pop("temperature"),
        "max_completion_length": wanted.pop("max_tokens"), "top_p": 1.0, **wanted, **others,
    }  # fmt: skip
    of_config = {"temperature", "max_completion_length", *_PLAIN} & known.keys()
    config = SimpleNamespace(**{name: known.pop(name) for name in of_config})
    return SimpleNamespace(**known), config


@pytest.mark.parametrize("rules", RULES)
def test_settings_by_the_rules_break_none(rules: str) -> None:
    assert violations(RULES[rules], *stage_settings(rules), is_last=True) == []


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ({"dataset": "other"}, "dataset must be 'DigitalLearningGmbH/MATH-lighteval', is 'other'"),
        ({"train_split": "test"}, "train_split must be 'train', is 'test'"),
        ({"validation_split": "train"}, "validation_split must be 'test', is 'train'"),
        ({"prompt": "question_only"}, "prompt must be 'r1_zero', is 'question_only'"),
        ({"validation_grader": "strict"}, "validation_grader must be 'compatible', is 'strict'"),
        ({"temperature": 0.9}, "temperature must be 1.0, is 0.9"),
        ({"validation_temperature": 0.0}, "temperature must be 1.0, is 0.0"),
        ({"max_completion_length": 2048}, "max_tokens must be 1024, is 2048"),
        ({"validation_max_tokens": 512}, "max_tokens must be 1024, is 512"),
        ({"top_p": 0.95}, "top_p must be 1.0, is 0.95"),
        ({"top_k": 20}, "top_k must be 0, is 20"),
        ({"min_p": 0.1}, "min_p must be 0.0, is 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must be 1.0, is 1.1"),
        ({"generation_kwargs": {"top_k": 1}}, "generation_kwargs must be {}, is {'top_k': 1}"),
        ({"too_long": "drop"}, "too_long must be 'refuse', is 'drop'"),
        ({"answer_format": "boxed"}, "answer_format must be 'r1_zero', is 'boxed'"),
        ({"traces": "other", "traces_split": "train"}, "traces must be those of 'DigitalLearningGmbH/MATH-lighteval', split 'train', are ('other', 'train')"),
        ({"traces": "DigitalLearningGmbH/MATH-lighteval", "traces_split": "test"}, "traces must be those of 'DigitalLearningGmbH/MATH-lighteval', split 'train', are ('DigitalLearningGmbH/MATH-lighteval', 'test')"),
        ({"final_validation_problems": 1000}, "final_validation_problems must be 5000, is 1000"),
        ({"final_validation_problems": None}, "final_validation_problems must be 5000, is 512"),
        ({"restore_best": False}, "restore_best must be true, or a run that has collapsed would end with what is left of it"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(others: dict[str, Any], line: str) -> None:
    assert violations(RULES["math_4h"], *stage_settings("math_4h", **others), is_last=True) == [line]


@pytest.mark.parametrize(
    ("dataset", "split", "broken"),
    [
        ("math", "test", []),
        ("a/place/MATH/{split}.jsonl", "validation", []),
        ("a/place/MATH/{split}.jsonl", "test", ["validation_split must be 'validation', is 'test'"]),
        ("MATH_{split}.jsonl", "validation", ["dataset must be", "validation_split must be"]),
    ],
)
def test_copies_of_the_courses_dataset_keep_to_the_rules(dataset: str, split: str, broken: list[str]) -> None:
    rules = RULES["math_4h"]
    found = violations(rules, *stage_settings("math_4h", dataset=dataset, validation_split=split), is_last=True)
    assert [line.startswith(words) for line, words in zip(found, broken, strict=True)] == [True] * len(broken)


def test_a_folder_called_like_the_model_is_the_model() -> None:
    rules = RULES["math_4h"]
    assert rules.has_model("some/models/Qwen2.5-Math-1.5B")
    assert not rules.has_model("Qwen2.5-Math-1.5B-Instruct")
    assert not rules.has_model("models/Math-1.5B")
    assert not rules.has_model(None)
    assert RULES["mini"].has_model(None)


def test_rules_apply_to_validation_and_not_to_rollouts() -> None:
    others = {
        "temperature": 0.8,
        "validation_temperature": 1.0,
        "max_completion_length": 90,
        "validation_max_tokens": 80,
    }
    assert violations(MINI, *stage_settings("mini", **others), is_last=True) == []


def test_neutral_sampling_and_training_traces_break_no_rule() -> None:
    others = {"top_k": 0, "min_p": None, "generation_kwargs": {}, "traces": "mini_math", "traces_split": "train"}
    assert violations(MINI, *stage_settings("mini", **others), is_last=True) == []


def test_only_the_last_stages_validation_is_the_result() -> None:
    others = {"final_validation_problems": None, "restore_best": False}
    assert violations(MINI, *stage_settings("mini", **others), is_last=False) == []


def a_pipeline(**others: Any) -> Pipeline:
    settings = {"stages": [Stage("grpo")], "output_dir": "p", "time_budget": 300.0, "rules": "mini", **others}
    return Pipeline(**settings)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"rules": "min"}, "unknown rules 'min'. Did you mean 'mini'"),
        ({"rules": None}, "unknown rules 'None'"),
        ({"time_budget": 301.0}, "time_budget must be at most 300 s, is 301.0"),
        ({"time_budget": None}, "time_budget must be at most 300 s, is None"),
        ({"model_name_or_path": "mine"}, "model_name_or_path must be None, is 'mine'"),
        ({"launch": ["--num_processes", "3"]}, "launch must start at most 2 processes, starts 3"),
        ({"rules": "math_4h"}, "model_name_or_path must be 'Qwen/Qwen2.5-Math-1.5B', is None"),
    ],
)
def test_pipeline_breaking_a_rule_is_refused_before_it_runs(others: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_pipeline(a_pipeline(**others))
    assert check_pipeline(a_pipeline()) is MINI


def test_how_many_processes_a_launch_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    two = str(ROOT / "accelerate_configs" / "two_gpus_zero2.yaml")
    launches = (
        [],
        ["--cpu"],
        ["--multi_gpu"],
        ["--num_processes", "4"],
        ["--cpu", "--num-processes=8"],
        ["--config_file", two],
    )
    assert [processes_of(options) for options in launches] == [1, 1, 8, 4, 8, 2]


@pytest.mark.slow  # a process that imports every recipe
@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_leaderboards_that_ship_keep_to_their_rules(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pipeline = read_pipeline(path)
    rules = check_pipeline(pipeline)
    assert pipeline.time_budget == rules.seconds
    on_a_cpu = {"bf16": False}
    stages = [dataclasses.replace(s, settings={**s.settings, **on_a_cpu}) for s in pipeline.stages]
    from trl_ext.tools.experiments.pipeline.run import _check_stages

    _check_stages(dataclasses.replace(pipeline, stages=stages))
    monkeypatch.setattr("trl_ext.tools.experiments.pipeline.run.check_runs", check_in_this_process)
    arms = {stage.arm: number for number, stage in enumerate(stages)}  # the last stage of each
    for last in arms.values():
        broken = list(stages)
        broken[last] = dataclasses.replace(stages[last], settings=stages[last].settings | {"restore_best": False})
        with pytest.raises(
            InputError, match=f"stage {last + 1} .*the rules '{pipeline.rules}' are broken: restore_best must be true"
        ):
            _check_stages(dataclasses.replace(pipeline, stages=broken))


# The result.


def entry(step: int, accuracy: float, problems: int = 512, **more: Any) -> dict[str, Any]:
    return {"step": step, "accuracy": accuracy, "problems": problems, **more}


def checkpoint(stage: Path, step: int, *validations: dict[str, Any]) -> None:
    (stage / f"checkpoint-{step}").mkdir(parents=True)
    (stage / f"checkpoint-{step}" / "run.json").write_text(
        json.dumps({"validations": validations, "wall_clock_s": 0.0})
    )


def test_what_can_be_the_result_is_on_the_disk_and_was_validated(tmp_path: Path) -> None:
    history = [entry(0, 0.3), entry(20, 0.6), entry(40, 0.5)]
    assert list(candidates(tmp_path)) == []
    checkpoint(tmp_path / "1_grpo", 20, *history[:2])
    checkpoint(tmp_path / "1_grpo", 30, *history[:2])  # saved between two validations
    checkpoint(tmp_path / "1_grpo", 40, *history)
    (tmp_path / "1_grpo" / "checkpoint-50").mkdir()  # of a stock trainer
    (tmp_path / "2_grpo").mkdir()
    summary = {"validations": [entry(0, 0.5), entry(20, 0.7), entry(40, 0.8, 5000, weights_of_step=20)]}
    (tmp_path / "2_grpo" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "pipeline.json").write_text("{}")
    found = [(c["stage"], c["model"], c["step"], c["accuracy"], c["problems"]) for c in candidates(tmp_path)]
    assert found == [
        ("1_grpo", "1_grpo/checkpoint-40", 40, 0.5, 512), ("1_grpo", "1_grpo/checkpoint-20", 20, 0.6, 512),
        ("2_grpo", "2_grpo", 20, 0.8, 5000),
    ]  # fmt: skip


def test_full_measurement_ranks_above_a_better_partial_one() -> None:
    some, whole, less = entry(1, 0.9), entry(2, 0.7, 5000), entry(3, 0.6, 5000)
    assert best([some, whole, less], 5000) is whole
    ends = [entry(1, 0.8, 5000, stage="1_sft", is_last=True), entry(2, 0.75, 5000, stage="2_grpo", is_last=True)]
    assert best([some, entry(3, 0.9, 5000), *ends], 5000) is ends[1]  # its number did not choose it
    assert best([some, entry(4, 0.95)], 5000) == entry(4, 0.95)
    assert best([], 5000) is None
    tenth = entry(2, 0.7, 5000, stage="10_grpo", is_last=True)
    assert best([entry(1, 0.8, 5000, stage="9_sft", is_last=True), tenth], 5000) is tenth


def test_a_result_says_whether_it_is_one_by_the_rules(tmp_path: Path) -> None:
    clock: Any = SimpleNamespace(seconds=lambda: 299.9)
    nothing = write_result(tmp_path, "mini", MINI, clock, "running")
    assert (nothing["accuracy"], nothing["model"], nothing["is_by_the_rules"]) == (None, None, False)
    checkpoint(tmp_path / "1_grpo", 20, entry(20, 0.6))
    model = tmp_path / "1_grpo" / "checkpoint-20" / "model.safetensors"
    model.write_text("weights")
    some = write_result(tmp_path, "mini", MINI, clock, "running")
    model.unlink()  # the stage removes what it no longer needs
    assert (tmp_path / some["model"] / "model.safetensors").read_text() == "weights"
    assert (some["accuracy"], some["is_by_the_rules"], some["why_not"]) == (
        0.6,
        False,
        "measured on 512 of 5000 problems",
    )
    assert "chosen by this accuracy" in some["bias"]
    selection = {"fresh_samples": True, "problems_that_chose": 512, "accuracy_on_others": 0.54}
    last = entry(20, 0.55, 5000, selection=selection)
    (tmp_path / "1_grpo" / "summary.json").write_text(json.dumps({"validations": [last]}))
    whole = write_result(tmp_path, "mini", MINI, clock, "complete")
    assert "512 of the 5000 problems also chose the weights; on the others it is 0.540" in whole["bias"]
    assert "bias" in nothing
    assert (whole["accuracy"], whole["is_by_the_rules"], whole["why_not"]) == (0.55, True, None)
    assert whole["model"] == "1_grpo"
    assert list((tmp_path / BEST).iterdir()) == []
    assert whole["seconds_allowed"] == 300
    assert json.loads((tmp_path / RESULT).read_text()) == whole
    late = write_result(tmp_path, "mini", MINI, Clock(300.0), "complete")
    assert (late["is_by_the_rules"], late["why_not"][:4], late["why_not"][-8:]) == (False, "took", "of 300 s")


def test_result_falls_back_when_the_best_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "1_grpo", 20, entry(20, 0.6))
    checkpoint(tmp_path / "1_grpo", 40, entry(40, 0.5))

    def removed_first(one: Path, target: Path) -> None:
        if one.name == "checkpoint-20":
            shutil.rmtree(one)
        link_model(one, target)

    monkeypatch.setattr(module, "link_model", removed_first)
    result = write_result(tmp_path, "mini", MINI, Clock(), "running")
    assert (result["step"], result["accuracy"]) == (40, 0.5)
    assert [path.name for path in (tmp_path / BEST).iterdir()] == ["1"]
    again = write_result(tmp_path, "mini", MINI, Clock(), "running")
    assert [result["model"], again["model"]] == [f"{BEST}/1", f"{BEST}/2"]  # the old one is there until this is written
    assert [path.name for path in (tmp_path / BEST).iterdir()] == ["2"]


def test_time_of_earlier_processes_counts_however_they_ended(tmp_path: Path) -> None:
    assert elapsed_seconds(tmp_path) == 0.0
    record = {
        "stages": [], "overhead": {"seconds": 10.0}, "1_sft": {"seconds": 40.0, "earlier": 30.0, "time_budget": 50.0},
        "2_grpo": {"time_budget": 60.0, "earlier": 5.0, "running": 2.5},
    }  # fmt: skip
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert elapsed_seconds(tmp_path) == 57.5
    (tmp_path / "2_grpo" / "checkpoint-4").mkdir(parents=True)  # saved after its pipeline was killed
    (tmp_path / "2_grpo" / "checkpoint-4" / "run.json").write_text(json.dumps({"wall_clock_s": 12.0}))
    assert elapsed_seconds(tmp_path) == 62.0


def test_checkpoint_removed_during_the_scan_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (20, 40):
        checkpoint(tmp_path / "1_grpo", step, entry(step, 0.5))
    found = module.checkpoints

    def removed(stage: Path) -> list[Path]:
        listed = found(stage)
        shutil.rmtree(stage / "checkpoint-20", ignore_errors=True)
        return listed

    monkeypatch.setattr(module, "checkpoints", removed)
    assert [one["step"] for one in candidates(tmp_path)] == [40]


def finished(folder: Path, **others: Any) -> Pipeline:
    """A pipeline all of whose stages are done, and that has its result."""
    pipeline = a_pipeline(output_dir=str(folder), **others)
    folder.mkdir(exist_ok=True)
    record = load_or_create(folder, pipeline) | {"1_grpo": {"time_budget": 290.0, "seconds": 295.0, "folder": "1_grpo"}}
    (folder / RECORD).write_text(json.dumps(record))
    leave = {"validations": [entry(0, 0.1, wall_clock_s=1.0), entry(40, 0.7, 5000, wall_clock_s=290.0)]}
    (folder / "1_grpo").mkdir(exist_ok=True)
    (folder / "1_grpo" / "summary.json").write_text(json.dumps(leave))
    return pipeline


@pytest.mark.moderate
def test_a_pipeline_that_is_complete_is_left_as_it_is(tmp_path: Path) -> None:
    pipeline = finished(tmp_path / "p")
    first = run_leaderboard(pipeline, ROOT)  # killed before it could report, and out of time by now
    assert (first["status"], first["accuracy"]) == ("complete", 0.7)
    assert (tmp_path / "p" / "summary.json").is_file()
    before = (tmp_path / "p" / RESULT).read_text()
    assert run_leaderboard(pipeline, ROOT) == first
    assert (tmp_path / "p" / RESULT).read_text() == before


@pytest.mark.parametrize("is_done", [True, False])
def test_the_models_of_another_seed_are_no_result(is_done: bool, tmp_path: Path) -> None:
    pipeline = finished(tmp_path)
    if not is_done:
        begun = load_or_create(tmp_path, pipeline) | {"1_grpo": {"time_budget": 290.0, "earlier": 299.0}}
        (tmp_path / RECORD).write_text(json.dumps(begun))
    (tmp_path / RESULT).write_text('{"status": "complete"}')
    with pytest.raises(InputError, match="holds a pipeline of other stages, another seed"):
        run_leaderboard(a_pipeline(output_dir=str(tmp_path), seed=1), ROOT)
    assert (tmp_path / RESULT).read_text() == '{"status": "complete"}'


def test_valid_leaderboard_result_stays_valid_when_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = finished(tmp_path)
    begun = load_or_create(tmp_path, pipeline) | {"1_grpo": {"time_budget": 290.0, "earlier": 299.0}}
    (tmp_path / RECORD).write_text(json.dumps(begun))
    (tmp_path / RESULT).write_text('{"status": "running", "is_by_the_rules": true, "seconds": 298.0}')
    monkeypatch.setattr(module, "run_pipeline", lambda *_, **__: pytest.fail("nothing is to run"))
    assert run_leaderboard(pipeline, ROOT) == {"status": "out of time", "is_by_the_rules": True, "seconds": 298.0}


def test_the_budget_ends_whatever_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Clock", lambda spent=0.0: SimpleNamespace(seconds=lambda: now[0] + spent))
    now, pipeline = [5.0], a_pipeline(output_dir=str(tmp_path))

    def endless(pipeline: Pipeline, recipes: Path, spent: float, watch: Any) -> None:
        assert spent == 5.0
        checkpoint(tmp_path / "1_grpo", 20, entry(20, 0.6))
        for now[0] in (296.9, 297.1):
            watch()
        pytest.fail("it continues")

    monkeypatch.setattr(module, "run_pipeline", endless)
    result = run_leaderboard(pipeline, ROOT)
    assert (result["status"], result["accuracy"], result["seconds"]) == ("out of time", 0.6, 297.1)
    begun = load_or_create(tmp_path, pipeline) | {"1_grpo": {"time_budget": 290.0, "earlier": 299.0}}
    (tmp_path / RECORD).write_text(json.dumps(begun))
    again = run_leaderboard(pipeline, ROOT)  # nothing runs any more
    assert (again["status"], again["accuracy"]) == ("out of time", 0.6)


def test_a_stage_that_has_its_summary_may_close_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Clock", lambda spent=0.0: SimpleNamespace(seconds=lambda: now[0] + spent))
    now = [5.0]

    def closing(pipeline: Pipeline, recipes: Path, spent: float, watch: Any) -> None:
        finished(tmp_path)
        for now[0] in (297.1, 299.9, 300.1):
            watch()

    monkeypatch.setattr(module, "run_pipeline", closing)
    result = run_leaderboard(a_pipeline(output_dir=str(tmp_path)), ROOT)
    assert (result["status"], result["accuracy"], result["seconds"]) == ("out of time", 0.7, 300.1)


def test_a_stage_has_ended_before_it_would_be_killed() -> None:
    """And what still runs is killed before the budget ends, by someone who looks every second."""
    assert _END > module._GRACE > _TICK


@pytest.mark.parametrize("error", [InputError("1_grpo ended with status 3"), KeyboardInterrupt()])
def test_an_interrupted_pipeline_leaves_what_it_has(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        checkpoint(tmp_path / "1_grpo", 20, entry(20, 0.6))
        raise error

    monkeypatch.setattr(module, "run_pipeline", interrupted)
    with pytest.raises(type(error)):
        run_leaderboard(a_pipeline(output_dir=str(tmp_path)), ROOT)
    result = json.loads((tmp_path / RESULT).read_text())
    assert (result["status"], result["accuracy"]) == ("interrupted", 0.6)


TINY = {
    "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 16, "micro_train_batch_size": 8,
    "train_problems": 64, "validation_problems": 16, "validate_every": 4, "save_steps": 4, "max_steps": 100000,
    "final_validation_problems": 5000, "restore_best": True, "disable_tqdm": True, "sampling_max_tokens": 80,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow  # three processes that train the machine's base policy, and 5,000 problems
def test_run_killed_at_random_has_a_result_and_resumes_in_budget(
    tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(policy_cache))
    make_base_policy(0, policy_cache, progress=False)  # which a budget as short as this has no time for
    plan = {"rules": "mini", "time_budget": 150, "stages": [{"recipe": "grpo", "settings": TINY}]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(plan))
    out = tmp_path / "p"
    command = [sys.executable, str(ROOT / "recipes" / "leaderboard.py"), "--config", str(tmp_path / "mine.yaml")]
    command += ["--output_dir", str(out)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not list(out.glob("1_grpo/checkpoint-*")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(random.uniform(0, 5))
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    left = json.loads((out / RESULT).read_text())
    assert left["status"] == "running"
    assert left["is_by_the_rules"] is False
    if left["model"] is not None:
        assert (out / left["model"] / "model.safetensors").is_file()
    time.sleep(5)  # its stage saves and ends
    began = time.monotonic()
    before = elapsed_seconds(out)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((out / RESULT).read_text())
    assert (result["status"], result["problems"], result["is_by_the_rules"]) == ("complete", 5000, True)
    assert before > 10
    assert before + time.monotonic() - began < 152  # to within the second of the kill
    assert (out / result["model"] / "model.safetensors").is_file()
    assert (out / "curve.png").is_file()
