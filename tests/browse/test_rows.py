"""Rows of every kind of file in one form, and both graders' verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_ext.browse.command import browse, main, sources_with_distinct_names
from trl_ext.browse.rows import Source, plain_row, read_rows, sources_in, verdict_of
from trl_ext.browse.second_opinion import disagree, grade_twice
from trl_ext.io import write_jsonl

GENERATION = {
    "step": 20, "prompt": "1+1?", "response": "</think> <answer> 2 </answer>", "ground_truth": "2", "tokens": 9,
    "entropy_estimate": 0.5, "token_entropy": 0.25, "advantage": 1.5, "finish_reason": "stop", "extracted": "2",
    "correct": True, "reason": "same text", "format_reward": 1.0, "answer_reward": 1.0, "rewards": {"r1_zero": 1.0},
    "reward": 1.0,
}  # fmt: skip
SAMPLE = {
    "number": 3, "problem_id": 1, "sample": 1, "prompt": "1+1?", "answer": "2", "level": 4, "format_reward": 1.0,
    "answer_reward": 0.0, "reward": 0.0, "extracted": "3", "reason": "different value", "response": "3", "tokens": 1,
    "finish_reason": "length", "logp": -1.0, "entropy_estimate": 0.5, "outcome": "format_only",
}  # fmt: skip
NOWHERE = Source(Path("x"), "x")


def test_training_evaluation_and_rollout_rows_take_one_form(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "generations.jsonl", [GENERATION])
    write_jsonl(tmp_path / "samples.jsonl", [SAMPLE])
    for step in (10, 2):
        folder = tmp_path / "expert_iteration" / f"step_{step}"
        folder.mkdir(parents=True)
        write_jsonl(folder / "rollouts.jsonl", [{"question": 0, **SAMPLE}, {"question": 1, **SAMPLE}])
        write_jsonl(folder / "kept.jsonl", [{"question": 1, **SAMPLE}])
    (tmp_path / "resolved.json").write_text('{"answer_format": "boxed"}')
    found = sources_in(tmp_path)
    assert [(source.name, source.step, source.answer_format) for source in found] == [
        ("generations.jsonl", None, "boxed"), ("samples.jsonl", None, "boxed"),
        ("expert iteration", 2, "boxed"), ("expert iteration", 10, "boxed"),
    ]  # fmt: skip
    training, sample, rollout, _ = (next(read_rows(source)) for source in found)
    assert (training["step"], training["verdict"], training["cut"], training["truth"]) == (20, "correct", False, "2")
    assert (training["entropy"], training["rewards"], training["advantage"]) == (0.25, {"r1_zero": 1.0}, 1.5)
    assert training["more"] == {}
    assert (sample["step"], sample["verdict"], sample["cut"], sample["truth"]) == (None, "format_only", True, "2")
    assert sample["rewards"] == {"format_reward": 1.0, "answer_reward": 0.0}
    assert sample["more"] == {"number": 3, "problem_id": 1, "sample": 1, "level": 4}
    assert (rollout["step"], rollout["more"]["question"]) == (2, 0)
    assert [row["kept"] for row in read_rows(found[2])] == [False, True]
    assert training["kept"] is None


@pytest.mark.parametrize(
    ("row", "rewards", "verdict"),
    [
        ({"outcome": "neither", "correct": True}, {}, "neither"),
        ({"correct": True, "format_reward": 1.0}, {}, "correct"),
        ({"correct": True, "format_reward": 0.0}, {}, "neither"),
        ({"correct": False}, {"format_reward": 1.0}, "format_only"),
        ({}, {"format_reward": 0.0, "answer_reward": 0.0}, "neither"),
        ({}, {"answer_reward": 1.0}, "correct"),
        ({"correct": False}, {}, "unknown"),
        ({"reward": 1.0}, {"length": 1.0}, "unknown"),
    ],
)
def test_a_verdict_is_what_the_row_says_or_unknown(row: dict[str, Any], rewards: dict[str, Any], verdict: str) -> None:
    assert verdict_of(row, rewards) == verdict


def test_values_that_json_lacks_become_text() -> None:
    row = plain_row({"response": "", "reward": float("nan"), "x": [float("inf"), 1.0]}, NOWHERE)
    assert (row["reward"], row["more"]) == ("nan", {"x": ["inf", 1.0]})
    json.dumps(row, allow_nan=False)


def test_a_conversation_is_shown_message_by_message() -> None:
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    assert (
        plain_row({"prompt": messages[:1], "response": messages}, NOWHERE)["response"] == "user: 1+1?\n\nassistant: 2"
    )


def test_a_torn_last_line_is_left_out_and_a_torn_middle_is_named(tmp_path: Path) -> None:
    path, line = tmp_path / "generations.jsonl", json.dumps(GENERATION)
    path.write_text(f"{line}\n{line[:50]}")
    assert len(list(read_rows(Source(path, "x")))) == 1
    path.write_text(f"{line}\n{line[:50]}\n{line}\n")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        list(read_rows(Source(path, "x")))
    path.write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"generations.jsonl', line 1: not a rollout.*field 'response'"):
        list(read_rows(Source(path, "x")))


def test_the_graders_disagree_where_only_one_says_correct() -> None:
    responses = {"2": "2", "3": "2", "10%": "10", "2,1": "1,2", "x": None}
    rows = [
        plain_row({"response": f"</think> <answer> {said} </answer>", "answer": truth}, NOWHERE)
        for said, truth in responses.items()
    ]
    grade_twice(rows, "r1_zero")
    assert [row["graders"]["strict"][0] for row in rows[:2]] == [True, False]
    assert [row["graders"]["compatible"][0] for row in rows[:2]] == [True, False]
    assert "graders" not in rows[4]  # it has no reference answer
    assert [row["graders"]["strict"][0] for row in rows[2:4]] == [False, True]
    assert [row["graders"]["compatible"][0] for row in rows[2:4]] == [True, False]
    assert [disagree(row) for row in rows] == [False, False, True, True, False]


def test_rows_of_an_unknown_answer_format_are_not_graded() -> None:
    for answer_format in (None, "my_format.py:read"):
        row = plain_row(GENERATION, NOWHERE)
        grade_twice([row], answer_format)
        assert "graders" not in row
        assert not disagree(row)


def test_command_says_what_it_wrote_and_what_a_folder_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "generations.jsonl", [GENERATION])
    main([str(tmp_path)])
    assert f"{tmp_path / 'rollouts.html'}: 1 rollouts of 1 problems" in capsys.readouterr().out
    for place, what in ((tmp_path / "nowhere", "does not exist"), (tmp_path.parent, "has nothing to show")):
        with pytest.raises(SystemExit, match=f"error: .*{what}; give the folder of a run or an evaluation"):
            main([str(place)])


def test_rows_of_several_runs_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "generations.jsonl", [GENERATION])
    said = browse([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    assert said.startswith(f"{tmp_path / 'both.html'}: 2 rollouts of 1 problems")


def test_runs_and_files_of_one_name_are_named_by_parents(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "c/other"):
        (tmp_path / name).mkdir(parents=True)
        write_jsonl(tmp_path / name / "generations.jsonl", [GENERATION])
    runs = [tmp_path / name for name in ("a/run", "b/run", "c/other")]
    assert [source.name for source in sources_with_distinct_names(runs)] == [
        "a/run: generations.jsonl", "b/run: generations.jsonl", "other: generations.jsonl"
    ]  # fmt: skip
    files = [run / "generations.jsonl" for run in runs[:2]]
    assert [source.name for source in sources_with_distinct_names(files)] == [
        "a/run/generations.jsonl",
        "b/run/generations.jsonl",
    ]
    assert len(sources_with_distinct_names([runs[0], runs[0]])) == 1


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("generations.jsonl", '{"response": "x", "rewards": [0.1]}', r"generations.jsonl', line 1: 'rewards' is"),
        ("generations.jsonl", f'{{"response": "x", "a": {"[" * 3000}{"]" * 3000}}}', r"generations.jsonl', line 1: "),
        ("expert_iteration/step_old/rollouts.jsonl", '{"response": "x"}', "step_old' names no step"),
    ],
)
def test_odd_files_end_in_one_line_that_names_them(tmp_path: Path, name: str, line: str, said: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(line + "\n")
    with pytest.raises(SystemExit, match=f"error: .*{said}"):
        main([str(tmp_path)])


def test_a_question_may_be_a_conversation(tmp_path: Path) -> None:
    row = {"question": [{"role": "user", "content": "1+1?"}], "response": "2"}
    for name, rows in (("rollouts.jsonl", [row, {**row, "response": "3"}]), ("kept.jsonl", [row])):
        write_jsonl(tmp_path / name, rows)
    assert [row["kept"] for row in read_rows(Source(tmp_path / "rollouts.jsonl", "x"))] == [True, False]


def test_turns_of_tools_are_kept_and_checked() -> None:
    told = {"role": "tool", "text": "6", "tokens": 2, "tool": ["calculator"], "outcome": ["ok"]}
    said = [{"role": "assistant", "text": "2*3", "tokens": 3}, told, {"role": "assistant", "text": "so 6", "tokens": 2}]
    source = Source(Path("a.jsonl"), "a")
    plain = plain_row({"response": "2*3so 6", "turns": said, "calls": 1}, source)
    assert (plain["turns"], plain["more"]) == (said, {"calls": 1})
    assert plain_row({"response": "6", "turns": said[:1]}, source)["turns"] is None
    assert plain_row({"response": "6"}, source)["turns"] is None
    with pytest.raises(ValueError, match="a turn has role, text and tokens, a tool's tool and outcome"):
        plain_row({"response": "6", "turns": [{"role": "assistant"}, told]}, source)
