"""A judge behind a scripted server: verdicts, re-asking, the cache, limits, and what it says of a faulty file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.scripted_judge import CRITERIA, PROBLEM, WRONG, honest, judge_file, verdict
from tests.support.scripted_server import Answer, serving
from trl_ext.errors import InputError, ServerError
from trl_ext.rewards import GRADERS, REWARDS, Score
from trl_ext.rewards.judge.judging import Judge, JudgeError, judge_of
from trl_ext.rewards.judge.prompt import Case, fingerprint
from trl_ext.rewards.judge.settings import DEFAULT_RUBRIC, read_judge, read_rubric
from trl_ext.rewards.judge.verdict import NoVerdict, read_verdict

RUBRIC = read_rubric(DEFAULT_RUBRIC)
RIGHT = "She sold 48 + 24 = 72 clips. </think> <answer> 72 </answer>"
REFUSES_SCHEMA = "Invalid value for response_format"


def cases(*responses: str) -> list[Case]:
    return [Case(response, PROBLEM, "72") for response in responses]


def judge(folder: Path, server: Any, **fields: Any) -> Judge:
    return Judge(read_judge(judge_file(folder, server.url, **fields)))


# Verdicts.


@pytest.mark.parametrize(
    "text",
    [
        verdict(3),
        f"\n {verdict(3)} \n",
        f"```json\n{verdict(3)}\n```",
        f'<think>so {{"scores": 9}}</think>\n{verdict(3)}',
        json.dumps({"scores": dict.fromkeys(CRITERIA, 3)}),
    ],
)
def test_a_verdict_is_the_whole_of_an_answer(text: str) -> None:
    assert dict(read_verdict(text, RUBRIC).scores) == dict.fromkeys(CRITERIA, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not one JSON object"),
        (f"The verdict is {verdict(5)}", "not one JSON object"),
        (f"{verdict(5)}{verdict(5)}", "not one JSON object"),
        (f"```json\n{verdict(5)}\n```\n```json\n{verdict(0)}\n```", "not one JSON object"),
        (f"The response says\n```json\n{verdict(5)}\n```\nbut it is wrong.", "not one JSON object"),
        ("[" * 100_000, "not one JSON object"),
        ("5", 'no object "scores"'),
        ('{"scores": 5}', 'no object "scores"'),
        ('{"scores": {"correct": 5}}', "its scores were not those of correct, reasoning, clarity"),
        (verdict(5, (*CRITERIA, "length")), "its scores were not those of"),
        (verdict(6), "no whole number from 0 to 5"),
        (verdict(-1), "no whole number from 0 to 5"),
        (verdict(True), "no whole number"),
        (verdict(2).replace("2", "2.5"), "no whole number"),
        (verdict(2).replace("2", "NaN"), "no whole number"),
        (verdict(2).replace('"clarity"', '"correct"'), "a field twice"),
        (f'{{"scores": {{}}, {verdict(5)[1:]}', "a field twice"),
        (f'{{"injected": 1, {verdict(5)[1:]}', "other fields"),
    ],
)
def test_anything_else_is_no_verdict_and_says_why(text: str, why: str) -> None:
    with pytest.raises(NoVerdict, match=why):
        read_verdict(text, RUBRIC)


def test_a_reason_can_be_written_to_a_file() -> None:
    cut = verdict(4).replace('"reason": "', '"reason": "\\ud83d ')
    assert json.loads(cut)["reason"].startswith("\ud83d")
    assert read_verdict(cut, RUBRIC).reason.startswith("? ")


def test_the_score_is_a_weighted_mean() -> None:
    assert RUBRIC.score({"correct": 5, "reasoning": 0, "clarity": 5}) == pytest.approx((3 + 1) / 5)
    assert (RUBRIC.score(dict.fromkeys(CRITERIA, 5)), RUBRIC.score(dict.fromkeys(CRITERIA, 0))) == (1.0, 0.0)


# A judge.


def test_requests_hold_schema_seed_and_temperature(tmp_path: Path) -> None:
    with serving(honest) as server:
        judged = judge(tmp_path, server, sampling={"extra_body": {"top_k": 1}})(cases(RIGHT)).judged
    (body,) = server.bodies
    assert judged[0].verdict is not None
    assert (body["model"], body["temperature"], body["seed"], body["top_k"]) == ("scripted", 0.0, 0, 1)
    schema = body["response_format"]["json_schema"]["schema"]["properties"]["scores"]
    assert schema["required"] == list(CRITERIA)
    assert schema["properties"]["correct"]["enum"] == [0, 1, 2, 3, 4, 5]


def test_equal_cases_are_asked_once_and_then_come_from_the_disk(tmp_path: Path) -> None:
    with serving(honest) as server:
        model = judge(tmp_path, server)
        first = model(cases(RIGHT, WRONG, RIGHT))
        again = model(cases(WRONG, RIGHT))
    assert [one.verdict.scores["correct"] for one in first.judged if one.verdict] == [5, 0, 5]
    assert (first.calls, first.cache_hits, again.calls, again.cache_hits) == (2, 0, 0, 2)
    with serving([Answer(status=500)]) as dead:
        resumed = judge(tmp_path, dead)(cases(RIGHT, WRONG, RIGHT))
    assert (dead.bodies, resumed.judged) == ([], first.judged)


def test_a_fingerprint_is_of_all_that_decides(tmp_path: Path) -> None:
    base = read_judge(judge_file(tmp_path, "http://a/v1"))
    case = Case(WRONG, PROBLEM, "72")
    others = [
        {"model": "other"}, {"sampling": {"seed": 1}}, {"sampling": {"temperature": 0.5}},
        {"rubric": {"criteria": {"correct": {"description": "d"}}}},
    ]  # fmt: skip
    keys = {fingerprint(base, case)}
    for fields in others:
        keys.add(fingerprint(read_judge(judge_file(tmp_path, "http://a/v1", **fields)), case))
    keys |= {
        fingerprint(base, Case(*texts)) for texts in ((RIGHT, PROBLEM, "72"), (WRONG, "p", "72"), (WRONG, PROBLEM))
    }
    assert len(keys) == 1 + len(others) + 3
    moved = read_judge(judge_file(tmp_path, "http://b/v1", limits={"calls": 7, "timeout": 9}))
    assert fingerprint(moved, case) in keys, "neither an address nor a limit decides a verdict"


def test_a_torn_file_of_the_cache_is_asked_for_again(tmp_path: Path) -> None:
    with serving(honest) as server:
        model = judge(tmp_path, server)
        model(cases(RIGHT))
        (kept,) = (tmp_path / "verdicts").rglob("*.json")
        whole = kept.read_text()
        kept.write_text(whole[: len(whole) // 2])
        assert model(cases(RIGHT)).calls == 1
        assert kept.read_text() == whole
        assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_the_first_of_two_writers_has_the_verdict(tmp_path: Path) -> None:
    with serving(honest) as server:
        first, second = judge(tmp_path, server), judge(tmp_path, server)
    key = fingerprint(first.settings, cases(RIGHT)[0])
    kept = first.cache.put(key, read_verdict(verdict(4), RUBRIC), "m")
    assert second.cache.put(key, read_verdict(verdict(1), RUBRIC), "m") == kept == second.cache.get(key)


def test_an_answer_that_is_no_verdict_is_asked_for_again(tmp_path: Path) -> None:
    script = [Answer("Sure! It is full marks."), Answer(verdict(5)[:-9], finish_reason="length"), Answer(verdict(2))]
    with serving(script) as server:
        judgment = judge(tmp_path, server)(cases(WRONG))
    assert judgment.judged[0].verdict == read_verdict(verdict(2), RUBRIC)
    assert judgment.calls == 3
    questions = [body["messages"][0]["content"] for body in server.bodies]
    assert "no verdict: it was not one JSON object." in questions[1]
    assert "no verdict: it was cut off, so be brief." in questions[2]
    assert "full marks" not in "".join(questions), "what a judge has said is not put to it again"
    fences = {question.split("identifier ")[1][:16] for question in questions}
    assert len(fences) == 3


def test_a_server_without_schemas_is_asked_without(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return Answer(REFUSES_SCHEMA, status=400) if "response_format" in body else honest(number, body)

    with serving(script) as server:
        judgment = judge(tmp_path, server, limits={"concurrency": 1})(cases(RIGHT, WRONG, "a third"))
    assert judgment.failures == 0
    assert [("response_format" in body) for body in server.bodies] == [True, False, False, False]


def test_requests_run_side_by_side_up_to_a_limit(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return Answer(verdict(1), wait=0.05)

    with serving(script) as server:
        judge(tmp_path, server, limits={"concurrency": 3})(cases(*map(str, range(9))))
    assert server.most_at_once == 3


def test_a_failed_try_is_repeated(tmp_path: Path) -> None:
    retry = Answer(status=503, headers={"retry-after": "0.01"})
    with serving([retry, retry, Answer(verdict(4))]) as server:
        judgment = judge(tmp_path, server, limits={"tries": 3})(cases(WRONG))
    assert (judgment.failures, judgment.calls, len(server.bodies)) == (0, 3, 3)


def test_too_many_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    def script(number: int, body: dict[str, Any]) -> Answer:
        return Answer("no" if number < 3 or number > 4 else verdict(1))

    with serving(script) as server:
        model = judge(tmp_path, server, limits={"failures": 4, "asks": 1, "concurrency": 1})
        some = model(cases("a", "b", "c", "d"))
        assert [one.verdict is None for one in some.judged] == [True, True, True, False]
        assert some.judged[0].why == "of its answer: it was not one JSON object"
        with pytest.raises(JudgeError, match=r"no verdict on 4 responses in a row \(limits\.failures\)") as lost:
            model(cases(*"efghijklmnop"))
    assert isinstance(lost.value, ServerError)  # which saves a checkpoint
    assert len(server.bodies) < 13, "those that were not asked are not asked any more"


def test_a_spent_budget_leaves_rows_without_verdicts(tmp_path: Path) -> None:
    with serving(honest) as server:
        judgment = judge(tmp_path, server, limits={"calls": 2, "concurrency": 1})(cases("72", "a", "b"))
    assert [one.verdict is None for one in judgment.judged] == [False, False, True]
    assert judgment.judged[2].why == "all 2 calls are made (limits.calls)"
    assert len(server.bodies) == 2


def test_ranks_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = judge_file(tmp_path, "http://127.0.0.1:1/v1", limits={"calls": 10})
    assert Judge(read_judge(path)).budget.calls == 2


def test_a_refused_key_ends_the_run_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "pl4nted-key")
    with serving([Answer("no key pl4nted-key", status=401)]) as server:
        model = judge(tmp_path, server, api_key_env="JUDGES_KEY")
        with pytest.raises(JudgeError, match=r"refuses the key .*; look at JUDGES_KEY") as refused:
            model(cases(WRONG))
    assert server.headers[0]["authorization"] == "Bearer pl4nted-key"
    assert "pl4nted" not in f"{refused.value}{caplog.text}{model.settings}"


# Before a run.


def test_a_judge_that_answers_is_taken(tmp_path: Path) -> None:
    with serving([Answer(verdict(5))]) as server:
        judge(tmp_path, server).check()
        judge(tmp_path, server).check()
    assert len(server.bodies) == 1, "the second time the verdict is in the cache"


@pytest.mark.parametrize(
    ("script", "models", "words"),
    [
        ([Answer(verdict(5))], ("big", "small"), "serves no model 'scripted'. It serves: big, small; change model"),
        ([Answer("It is fine.")], ("scripted",), "gave no verdict on a first small problem: of its answer: it was not"),
        ([Answer("who?", status=403)], ("scripted",), "refuses the key .*; name its variable in api_key_env"),
        ([Answer("hm", status=422)], ("scripted",), "gave no verdict on a first small problem: .*422"),
    ],
)
def test_one_that_does_not_is_refused_in_a_line(
    script: list[Answer], models: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with serving(script, models) as server, pytest.raises(InputError, match=words) as refused:
        judge(tmp_path, server).check()
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"judge {server.url}")


def test_an_endpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with serving([Answer("")]) as server:
        model = judge(tmp_path, server)
    with pytest.raises(InputError, match=r"does not list its models: .*; start the server, or change url"):
        model.check()


# Its file.


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": None}, "model is missing"),
        ({"url": "localhost:8000"}, r"url must begin with http:// or https://, .*; got 'localhost:8000'"),
        ({"modle": "x"}, "unknown field 'modle'. Did you mean 'model'?"),
        ({"model": 7}, "model must be a text, got 7"),
        ({"api_key": "sk-1"}, "api_key: a key does not belong into a file: .* api_key_env"),
        ({"api_key_env": "NO_SUCH"}, "api_key_env: the environment has no variable 'NO_SUCH': export it"),
        ({"rubric": "none.yaml"}, r"rubric .*none\.yaml: there is no such file"),
        ({"rubric": {"scale": 5}}, "rubric: criteria: a rubric needs at least one, such as"),
        ({"rubric": {"criteria": {}}}, "rubric: criteria: a rubric needs at least one"),
        ({"rubric": {"criteria": ["correct"]}}, "rubric: criteria: expected a mapping of fields, got"),
        ({"rubric": {"criteria": {"a": {"weight": 1}}}}, "rubric: criteria: a: description is missing"),
        ({"rubric": {"criteria": {"a": {"description": "b", "weight": -1}}}}, "a: weight must be positive, got -1"),
        ({"rubric": {"criteria": {"a": {"description": "b", "weight": "x"}}}}, "a: weight must be a number, got 'x'"),
        ({"rubric": {"criteria": {"a": {"description": "b"}}, "scale": 0}}, "scale must be between 1 and 100, got 0"),
        (
            {"rubric": {"criteria": {"a": {"description": "b"}}, "threshold": 2}},
            "threshold must be above 0 and at most",
        ),
        ({"sampling": {"temperature": float("inf")}}, "sampling: temperature must be at least 0, got inf"),
        ({"sampling": {"seed": "a"}}, "sampling: seed must be a whole number, got 'a'"),
        ({"sampling": 3}, "sampling: expected a mapping of fields, got 3"),
        ({"limits": {"calls": 0}}, "limits: calls must be at least 1, got 0"),
        ({"limits": {"tries": True}}, "limits: tries must be a whole number, got True"),
        ({"limits": {"time_out": 1}}, "limits: unknown field 'time_out'. Did you mean 'timeout'?"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_a_fault_in_the_file_is_one_line(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = judge_file(tmp_path, "http://127.0.0.1:1/v1", **fields)
    with pytest.raises(InputError, match=words) as refused:
        read_judge(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value) or "none.yaml" in str(refused.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"judge .*missing\.yaml: there is no such file"):
        read_judge(tmp_path / "missing.yaml")
    (tmp_path / "list.yaml").write_text("- url\n")
    with pytest.raises(InputError, match="expected a mapping of fields"):
        read_judge(tmp_path / "list.yaml")
    (tmp_path / "torn.yaml").write_text("url: [http\nmodel: x\n")
    with pytest.raises(InputError, match="line") as refused:
        read_judge(tmp_path / "torn.yaml")
    assert "\n" not in str(refused.value)


def test_a_rubric_is_a_file_of_yaml_or_json_or_in_place(tmp_path: Path) -> None:
    rubric = {"criteria": {"kind": {"description": "It is kind.", "weight": 2}}, "reference": False, "reason": False}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(rubric))
    (tmp_path / "mine.json").write_text(json.dumps(rubric))
    read = [read_judge(judge_file(tmp_path, "http://a/v1", rubric=of)) for of in ("mine.yaml", "mine.json", rubric)]
    assert read[0] == read[1] == read[2]
    case, without = Case(WRONG, PROBLEM, "72"), Case(WRONG, PROBLEM, None)
    assert fingerprint(read[0], case) == fingerprint(read[0], without), "a reference that is not shown decides nothing"
    assert read_judge(judge_file(tmp_path, "http://a/v1")).rubric == RUBRIC


# The grader and the reward.


def test_reward_is_the_score_and_metrics_are_counted(tmp_path: Path) -> None:
    logged: dict[str, float] = {}
    columns: dict[str, list[Any]] = {}
    half = json.dumps({"reason": "half", "scores": {"correct": 5, "reasoning": 0, "clarity": 0}})
    script = [Answer(verdict(5)), Answer(half), Answer("no"), Answer("no"), Answer("no"), Answer(verdict(0))]
    with serving(script) as server:
        path = judge_file(tmp_path, server.url, limits={"concurrency": 1})
        reward = REWARDS.build("judge", judge_file=str(path))
        scores = reward(
            prompts=[PROBLEM] * 4, completions=[RIGHT, "b", "c", WRONG], answer=["72"] * 4,
            log_metric=logged.__setitem__, log_extra=columns.__setitem__,
        )  # fmt: skip
    assert reward.__name__ == "judge"
    assert [score for score in scores if not math.isnan(score)] == [1.0, 0.6, 0.0]
    assert all(type(score) is Score for score in scores)
    assert [score.correct for score in scores] == [True, True, None, False]
    assert logged.pop("judge/seconds") > 0
    assert logged == {
        "judge/calls": 6, "judge/cache_hits": 0, "judge/failures": 1, "judge/score/correct": pytest.approx(2 / 3),
        "judge/score/reasoning": pytest.approx(1 / 3), "judge/score/clarity": pytest.approx(1 / 3),
    }  # fmt: skip
    assert columns["judge_scores"][1:3] == [{"correct": 5, "reasoning": 0, "clarity": 0}, None]
    assert columns["extracted"][0].strip() == "72"
    assert "no verdict" not in columns["reason"][0]
    assert PROBLEM in server.bodies[0]["messages"][0]["content"]


def test_the_grader_counts_a_missing_verdict_as_incorrect(tmp_path: Path) -> None:
    with serving([Answer("no")]) as server:
        path = str(judge_file(tmp_path, server.url))
        grade = GRADERS.build("judge", judge_file=path)([RIGHT], ["72"])[0]
        assert judge_of(path) is judge_of(path), "a reward and a grader share one"
    assert (grade.correct, grade.failure, grade.answer) == (False, "no verdict", " 72 ")
    with pytest.raises(InputError, match=r"judge needs a file .*: --judge judge\.yaml with url"):
        GRADERS["judge"]([RIGHT], ["72"])


def test_a_reference_may_be_missing_or_several(tmp_path: Path) -> None:
    with serving(honest) as server:
        grader = GRADERS.build("judge", judge_file=str(judge_file(tmp_path, server.url)))
        grader(["72"] * 3, [None, ["72", "72 clips"], 72])
    questions = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted("REFERENCE" in question for question in questions) == [False, True, True]
    assert any("\n72 or 72 clips\n" in question for question in questions)
