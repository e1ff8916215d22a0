"""Traces to fine-tune on: mini-MATH's are wrong as often as they should be, a file's are checked, sets are nested."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trl_ext.data.traces import (
    INCORRECT_FRACTION,
    first_unique,
    load_traces,
    mini_math_traces,
    only_correct,
    unique,
    with_answers,
)
from trl_ext.generation.prompts import format_prompt, load_prompt
from trl_ext.mini.problems import mini_math
from trl_ext.rewards import GRADERS
from trl_ext.rewards.graders import Grade

TRACES = mini_math_traces(600)
PERFECT = mini_math_traces(600, incorrect_fraction=0)  # of the same problems
TRACE = re.compile(r" (.+) </think> <answer> (.+) </answer>")


def parts(row: dict[str, Any]) -> tuple[str, str]:
    """A response's working and its answer."""
    found = TRACE.fullmatch(row["response"])
    assert found is not None, row
    return found[1], found[2]


# mini-MATH.


def test_two_in_five_traces_are_incorrect_by_the_strict_grader() -> None:
    grade = GRADERS.build("strict", answer_format="r1_zero")
    verdicts = grade([row["response"] for row in TRACES], [row["answer"] for row in TRACES])
    right = [parts(row)[1] == row["answer"] for row in TRACES]
    assert [verdict.correct for verdict in verdicts] == right
    assert all(verdict.well_formed for verdict in verdicts)
    assert right.count(False) / len(right) == pytest.approx(INCORRECT_FRACTION, abs=0.06)  # three standard deviations
    assert INCORRECT_FRACTION == 0.4


def test_the_share_of_wrong_traces_can_be_set() -> None:
    assert all(parts(row)[1] == row["answer"] for row in PERFECT)
    assert all(parts(row)[1] != row["answer"] for row in mini_math_traces(100, incorrect_fraction=1))


def test_traces_are_r1_zero_solutions_of_training_problems() -> None:
    problems = mini_math("train", 600)
    assert [row["prompt"] for row in TRACES] == [format_prompt(load_prompt("r1_zero"), p["problem"]) for p in problems]
    assert [(*parts(row), row["answer"]) for row in PERFECT] == [
        (problem["solution"], problem["answer"], problem["answer"]) for problem in problems
    ]


def test_incorrect_trace_errs_in_its_last_number_and_its_answer() -> None:
    numbers = re.compile(r"\d+")
    spoiled = [(row, true) for row, true in zip(TRACES, PERFECT, strict=True) if row != true]
    changes = set()
    for row, true in spoiled:
        (working, answer), (solution, truth) = parts(row), parts(true)
        assert row["answer"] == truth  # by which it is graded
        assert working == solution.removesuffix(truth) + answer
        assert numbers.sub("#", answer) == numbers.sub("#", truth)
        *same, was = numbers.findall(truth)
        *still, now = numbers.findall(answer)
        assert same == still
        assert int(now) >= 2  # neither a denominator of 0 or 1 nor a root that simplifies
        changes.add(int(now) - int(was))
    assert changes == {*range(-9, 10)} - {0}


def test_traces_are_reproducible_by_seed() -> None:
    assert mini_math_traces(40) == TRACES[:40]
    other = mini_math_traces(40, seed=1)
    assert not {row["prompt"] for row in other} >= {row["prompt"] for row in TRACES[:40]}
    wrong = [[parts(row)[1] != row["answer"] for row in rows] for rows in (TRACES[:40], other)]
    assert wrong[0] != wrong[1]


def test_mini_maths_traces_are_loaded_each_only_once() -> None:
    loaded = load_traces("mini_math", "train", n=600)
    assert len(loaded) < len(TRACES)
    assert loaded == unique(TRACES)
    assert load_traces("mini_math", "train", n=20, seed=3) == unique(mini_math_traces(20, 3))


# A file.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(rows: Sequence[dict[str, Any]], name: str = "train.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("folder")
def test_trace_file_is_read_by_column_names_and_split_once() -> None:
    write(
        [
            {"question": "p", "trace": "r", "truth": "1", "level": 3},
            {"question": "q", "trace": "r", "truth": None},
            {"question": "p", "trace": "r", "truth": "1"},
            {"question": "p", "trace": "s"},
            {"question": "p", "trace": "t", "truth": 0},
        ],
        "mine_held_out.jsonl",
    )
    columns = {"prompt_column": "question", "response_column": "trace", "answer_column": "truth"}
    assert load_traces("mine_{split}.jsonl", "held_out", **columns) == [  # type: ignore[arg-type]
        {"prompt": "p", "response": "r", "answer": "1"},
        {"prompt": "q", "response": "r"},
        {"prompt": "p", "response": "s"},
        {"prompt": "p", "response": "t", "answer": 0},
    ]


@pytest.mark.usefixtures("folder")
def test_trace_columns_default_to_prompt_response_and_answer() -> None:
    write([{"prompt": "p", "response": "r", "answer": "1"}])
    assert load_traces("train.jsonl", "train") == [{"prompt": "p", "response": "r", "answer": "1"}]


GOOD = {"prompt": "p", "response": "r"}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "p", "response": "r"}], r"no column 'prompt'\. It has: question, response"),
        ([{"prompt": "p", "trace": "r"}], r"no column 'response'\. It has: prompt, trace"),
        ([], r"no column 'prompt'\. It has: no rows"),
        ([GOOD, GOOD, {**GOOD, "prompt": 3}], "'train.jsonl', row 2: 'prompt' is 3, not a text"),
        ([GOOD, {**GOOD, "response": None}], "'train.jsonl', row 1: 'response' is None, not a text"),
        ([GOOD, {"prompt": "p"}], "'train.jsonl', row 1: 'response' is None, not a text"),
        ([{**GOOD, "response": " \n"}], r"'train.jsonl', row 0: 'response' is ' \\n', not a text"),
    ],
)
def test_trace_file_with_missing_column_or_non_text_is_refused(rows: list[dict[str, Any]], message: str) -> None:
    write(rows)
    with pytest.raises(ValueError, match=message):
        load_traces("train.jsonl", "train")


# Which of them.


def trace(prompt: str, response: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, **more}


def test_of_equal_traces_the_first_stays_where_it_was() -> None:
    rows = [
        trace("p", "r", n=0),
        trace("p", "s", n=1),
        trace("p", "r", n=2),
        trace("q", "r", n=3),
        trace("p", "s", n=4),
    ]
    assert [row["n"] for row in unique(rows)] == [0, 1, 3]
    assert [row["n"] for row in unique(iter(rows))] == [0, 1, 3]
    assert unique([]) == []


def test_rows_without_answer_take_that_of_the_same_prompt() -> None:
    rows = [trace("p", "r"), trace("q", "s", answer="9"), trace("o", "t", answer="8")]
    joined = with_answers(rows, {"p": "1", "q": "2"}, "somewhere")
    assert [row["answer"] for row in joined] == ["1", "9", "8"]  # its own comes first
    assert "answer" not in rows[0]
    assert [{**row, "answer": None} for row in joined] == [{**row, "answer": None} for row in rows]


def test_traces_without_an_answer_are_refused_with_their_count() -> None:
    rows = [trace("p", "r"), trace("x" * 100 + "end", "r"), trace("y", "r"), trace("z", "r", answer="1")]
    with pytest.raises(ValueError, match=f"2 of 4 traces have no answer .* in 'math', split 'a'.*'{'x' * 77}end'$"):
        with_answers(rows, {"p": "1"}, "'math', split 'a'")


def test_correct_filter_grades_each_trace_by_its_own_answer() -> None:
    def grade(responses: Sequence[str], truths: Sequence[Any]) -> list[Grade]:
        pairs = zip(responses, truths, strict=True)
        return [Grade(True, response, response == truth, "") for response, truth in pairs]

    rows = [trace("a", "1", answer="1"), trace("b", "1", answer="2"), trace("c", "2", answer="2")]
    assert only_correct(rows, grade) == [rows[0], rows[2]]


def test_a_smaller_set_is_the_beginning_of_a_larger_one() -> None:
    rows = [trace(str(i), "r") for i in range(10)]
    full = first_unique(rows, "full", seed=0)
    assert sorted(row["prompt"] for row in full) == [row["prompt"] for row in rows]
    assert full != rows
    assert [row["prompt"] for row in rows] == list("0123456789")
    for count in (1, 4, 10):
        assert first_unique(rows, str(count), seed=0) == full[:count]
    assert first_unique(rows, "full", seed=1) != full


def test_more_traces_than_there_are_are_refused() -> None:
    rows = [trace(str(i), "r") for i in range(10)]
    with pytest.raises(ValueError, match="num_unique_examples is 11 and there are 10 unique traces; or say full"):
        first_unique(rows, "11", seed=0)
