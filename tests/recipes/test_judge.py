"""A judge in runs: next to a verifier, lost in the middle and resumed, in an evaluation, and refused before a model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.recipes.test_evaluate import grade, responses_file, samples
from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, SMALL, TINY_RUN, refused, rows
from tests.support.recipe import run_recipe
from tests.support.scripted_judge import honest, judge_file, response_in, verdict
from tests.support.scripted_server import Answer, serving
from trl_ext.errors import InputError, ServerError
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes import preflight
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS, GRPOTask
from trl_ext.rewards.judge.judging import judge_of

BOTH = ["--reward", "strict,judge", "--reward_weights", "1,0.2"]


def by_hash(number: int, body: Mapping[str, Any]) -> Answer:
    """Scores that differ between responses and not between two runs."""
    return Answer(verdict(hashlib.sha256(response_in(body).encode()).digest()[0] % 6))


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--reward", "judge"], "judge needs a file that says which model judges: --judge judge.yaml with url"),
        (["--validation_grader", "judge"], "judge needs a file that says which model judges"),
        (["--reward", "judge", "--judge", "none.yaml"], "judge none.yaml: there is no such file"),
        (
            ["--judge", "{file}"],
            "is for the reward or the grader judge, and this run has compatible and strict: choose",
        ),
        (["--reward", "strict,jugde", "--judge", "{file}"], "unknown reward 'jugde'. Did you mean 'judge'?"),
        (["--reward", "strict,strict"], "reward must be different names, separated by commas, got 'strict,strict'"),
        (["--reward", "strict,"], "reward must be different names, separated by commas, got 'strict,'"),
        (["--reward_weights", "1,x"], "--reward_weights"),
    ],
)
def test_a_mistake_is_one_line_while_arguments_are_parsed(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = judge_file(tmp_path, "http://127.0.0.1:1/v1")
    said = refused([argument.format(file=file) for argument in arguments], capsys)
    assert words in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_several_rewards_are_built_in_order_with_weights(tmp_path: Path) -> None:
    with serving(honest) as server:
        file = str(judge_file(tmp_path, server.url))
        task, _, config = parse(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, *BOTH, "--judge", file])
        strict, judge = task.reward_functions()
        completions = ["so 72 </think> <answer> 72 </answer>", "so 5"]
        assert strict(completions=completions, answer=["72"] * 2) == [1.0, 0.0]
        assert judge(completions=completions, answer=["72"] * 2) == [1.0, 0.0]
    assert (strict.__name__, judge.__name__, config.reward_weights) == ("strict", "judge", [1.0, 0.2])
    assert task.graders["train"] == "strict"
    assert judge_of(file).budget.used_calls == 2


def test_metrics_of_the_second_grader_have_its_name() -> None:
    logged: dict[str, float] = {}
    for reward in GRPOTask(reward="strict,compatible").reward_functions():
        reward(completions=["</think> <answer> 4 </answer>"], answer=["4"], log_metric=logged.__setitem__)
    assert {"rewards/answer_reward", "compatible/rewards/answer_reward"} <= set(logged)


@pytest.mark.parametrize(
    ("reward", "weights", "words"),
    [
        ("strict", [1.0, 0.2], r"reward_weights has 2 for 1 rewards \(strict\): give one for each"),
        ("strict,compatible", [1.0], r"reward_weights has 1 for 2 rewards \(strict, compatible\)"),
        ("strict,compatible", ["1,0.2"], r"reward_weights must be numbers, such as 1,0.2; got \['1,0.2'\]"),
    ],
)
def test_weights_are_numbers_one_for_each_reward(reward: str, weights: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GRPOTask(reward=reward).check_weights(weights)
    GRPOTask(reward=reward).check_weights(None)


def test_judge_and_weights_are_checked_before_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOTask, "data", None)
    monkeypatch.setattr(preflight, "loadable", None)
    with serving([Answer("")], models=("other",)) as server:
        file = str(judge_file(tmp_path, server.url))
        for more, words in (
            ([*BOTH[:2], "--reward_weights", "1", "--judge", file], "reward_weights has 1 for 2 rewards"),
            ([*BOTH, "--judge", file], "serves no model 'scripted'. It serves: other"),
        ):
            arguments = [*ON_A_CPU, *more, "--output_dir", str(tmp_path / "run")]
            with pytest.raises(InputError, match=words):
                run_recipe(*parse(GRPO_SETTINGS, "about", DEFAULT, arguments))
    assert not (tmp_path / "run").exists()


# Runs.


def run(folder: Path, name: str, file: Path, *more: str) -> dict[str, Any]:
    policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
    settings = {**TINY_RUN, "model_name_or_path": str(policy), "save_strategy": "steps", "save_steps": 100}
    (folder / "mine.yaml").write_text(yaml.safe_dump(settings))
    arguments = [*ON_A_CPU, *BOTH, "--judge", str(file), "--output_dir", str(folder / name), *more]
    return run_recipe(*parse(GRPO_SETTINGS, "about", folder / "mine.yaml", arguments))


@pytest.mark.slow
def test_a_run_that_loses_its_judge_resumes_bit_identically(tmp_path: Path) -> None:
    alive = [True]

    def script(number: int, body: Mapping[str, Any]) -> Answer:
        return by_hash(number, body) if alive[0] and (number < 30 or alive == [True, True]) else Answer(status=500)

    with serving(by_hash) as server:
        whole = tmp_path / "whole"
        whole.mkdir()
        run(tmp_path, "uninterrupted", judge_file(whole, server.url))
    with serving(script) as server:
        file = judge_file(tmp_path, server.url, limits={"failures": 1, "concurrency": 1})
        with pytest.raises(ServerError, match=r"reward 'judge' raised JudgeError: the judge gave no verdict on 1 resp"):
            run(tmp_path, "run", file)
        (saved,) = (tmp_path / "run").glob("checkpoint-*")
        judge_of.cache_clear()  # a new process
        alive.append(True)
        asked = len(server.bodies)
        run(tmp_path, "run", file, "--resume", "auto")
        assert asked < len(server.bodies)
    step = int(saved.name.partition("-")[2])
    assert 0 < step < 4
    ended = [load_file(tmp_path / name / "model.safetensors") for name in ("uninterrupted", "run")]
    assert all(ended[0][name].equal(ended[1][name]) for name in ended[0])
    metrics = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "judge/calls" in row]
    assert {"judge/cache_hits", "judge/failures", "judge/seconds", "judge/score/correct", "rewards/judge/mean",
            "rewards/answer_reward"} <= set(metrics[0])  # fmt: skip
    (again,) = [row for row in metrics if row["step"] == step + 1]
    assert again["judge/cache_hits"] > 0, "what was judged before the judge was lost is not paid for twice"
    row = rows(tmp_path / "run" / "generations.jsonl")[0]
    assert row["reward"] == pytest.approx(row["rewards"]["strict"] + 0.2 * row["rewards"]["judge"])
    assert row["judge_scores"]["correct"] == pytest.approx(5 * row["rewards"]["judge"])


@pytest.mark.slow
def test_another_judge_makes_another_experiment(tmp_path: Path) -> None:
    with serving(by_hash) as server:
        run(tmp_path, "run", judge_file(tmp_path, server.url))
        judge_of.cache_clear()
        other = judge_file(tmp_path, server.url, sampling={"seed": 1})
        with pytest.raises(InputError, match="judge_is"):
            run(tmp_path, "run", other, "--resume", "auto", "--max_steps", "5")
    judge_of.cache_clear()


# Evaluations.


def test_responses_without_verdict_are_counted_and_incorrect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(number: int, body: Mapping[str, Any]) -> Answer:
        return Answer("no" if response_in(body) == "four" else verdict(5))

    with serving(script) as server:
        file = judge_file(tmp_path, server.url)
        found = grade(responses_file(tmp_path), tmp_path / "run", grader="judge", judge=str(file))
    assert [row["reward"] for row in samples(tmp_path / "run")] == [1.0, 1.0, None]
    assert (found.accuracy, found.rows[2]["reason"]) == (
        pytest.approx(2 / 3),
        "of its answer: it was not one JSON object",
    )
    assert "1 of 3 responses have no verdict of the judge, and count as incorrect" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["without_verdict"] == 1
    with pytest.raises(ValueError, match="export: other harnesses have no judge"):
        Evaluation(grader="judge", judge=str(file), export=str(tmp_path / "exported"))


def test_an_evaluation_is_graded_by_the_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(number: int, body: Mapping[str, Any]) -> Answer:
        return Answer(verdict(5 if "< answer> 2" in response_in(body) else 1))

    with serving(script) as server:
        file = judge_file(tmp_path, server.url)
        found = grade(responses_file(tmp_path), tmp_path / "run", grader="judge", judge=str(file))
    assert [row["outcome"] for row in samples(tmp_path / "run")] == ["correct", "format_only", "neither"]
    assert [row["reward"] for row in found.rows] == [1.0, 0.2, 0.2]
    assert found.rows[0]["judge_scores"] == {"correct": 5, "reasoning": 5, "clarity": 5}
    assert re.search(r"^accuracy +0\.333", capsys.readouterr().out, re.MULTILINE)
    grade(responses_file(tmp_path), tmp_path / "run", grader="judge", judge=str(file))  # shown: nobody is asked
    judge_file(tmp_path, server.url, sampling={"seed": 3})
    with pytest.raises(InputError, match="its judge differs from what is there now"):
        grade(responses_file(tmp_path), tmp_path / "run", grader="judge", judge=str(file))
    settings = json.dumps(yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text()))
    assert str(file) not in settings, "where the file lies decides nothing"
    judge_of.cache_clear()  # and its connection
    with pytest.raises(InputError, match=r"does not list its models: .*; start the server"):
        grade(responses_file(tmp_path), tmp_path / "other", grader="judge", judge=str(file))
