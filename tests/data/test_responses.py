"""A file of somebody else's responses: its fields under any names, and every line checked before one is graded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trl_ext.data.responses import fields_of, read_responses

PLAIN = {"prompt": "1 + 1?", "response": "2", "truth": "2"}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "theirs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_lines_become_rows_with_problems_and_samples_counted(tmp_path: Path) -> None:
    other = {"prompt": "2 + 2?", "response": "4", "truth": 4, "level": "Level 3", "subject": "Sums", "tokens": 7}
    rows = read_responses(written(tmp_path, PLAIN, other, PLAIN | {"response": "3"}), [], "as_is")
    assert [(row["number"], row["problem_id"], row["sample"]) for row in rows] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    assert rows[1] == {
        "prompt": "2 + 2?", "response": "4", "answer": "4", "problem": "2 + 2?", "level": 3, "subject": "Sums",
        "tokens": 7, "finish_reason": None, "verdict": None, "number": 1, "problem_id": 1, "sample": 0,
    }  # fmt: skip
    assert rows[2]["response"] == "3"


def test_a_log_of_lm_eval_is_read_by_paths(tmp_path: Path) -> None:
    line = {
        "doc": {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, "exact_match": 1.0, "resps": [["It is 2"]],
        "arguments": {"gen_args_0": {"arg_0": "Question: 1 + 1?\nAnswer:"}}, "a.b": 1,
    }  # fmt: skip
    fields = (
        "prompt=arguments.gen_args_0.arg_0 response=resps.0.0 truth=doc.answer verdict=exact_match problem=doc.question"
    )
    (row,) = read_responses(written(tmp_path, line), fields.split(), "after_hashes")
    assert (row["prompt"], row["response"], row["answer"]) == ("Question: 1 + 1?\nAnswer:", "It is 2", "2")
    assert (row["verdict"], row["problem"]) == (True, "1 + 1?")
    assert read_responses(written(tmp_path, line), [*fields.split(), "truth=a.b"], "as_is")[0]["answer"] == "1"


@pytest.mark.parametrize(
    ("row", "fields", "words"),
    [
        ({"prompt": "x", "truth": "2"}, [], r"line 2: no field 'response'; there is: prompt, truth"),
        (PLAIN | {"response": None}, [], r"line 2: 'response' is 'None', not a text"),
        (PLAIN | {"prompt": ["x"]}, [], r"line 2: 'prompt' is .*, not a text"),
        (PLAIN | {"truth": ""}, [], r"line 2: 'truth' is '', in which answer_source as_is finds no answer"),
        (PLAIN | {"truth": None}, [], r"line 2: 'truth' is 'None'"),
        (PLAIN | {"output": [{"text": 5}]}, ["response=output.0.text"], r"'output.0.text' \(the response\) is '5'"),
        (PLAIN | {"output": []}, ["response=output.0"], r"no field 'output.0' \(the response\); there is: a list"),
        (PLAIN | {"ok": "yes"}, ["verdict=ok"], r"'ok' \(the verdict\) is 'yes', and not true, false, 1 or 0"),
        (PLAIN | {"ok": None}, ["verdict=ok"], r"'ok' \(the verdict\) is null"),
        (PLAIN | {"tokens": -1}, [], r"'tokens' is '-1', and not a whole number"),
        (PLAIN | {"finish_reason": "eos"}, [], r"'finish_reason' is 'eos', and not stop or length"),
        ([1], [], r"line 2: not a JSON object"),
    ],
)
def test_a_line_that_cannot_be_graded_is_named(row: Any, fields: list[str], words: str, tmp_path: Path) -> None:
    first = {"ok": 1, "output": [{"text": "2"}, "2"], **PLAIN}
    if fields == ["response=output.0"]:
        first["output"] = ["2"]
    with pytest.raises(ValueError, match=words):
        read_responses(written(tmp_path, first, row), fields, "as_is")


def test_a_missing_or_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        read_responses(tmp_path / "not_there.jsonl", [], "as_is")
    with pytest.raises(ValueError, match="has no rows"):
        read_responses(written(tmp_path), [], "as_is")


@pytest.mark.parametrize(
    ("given", "words"), [("response", "of the form name=field"), ("truht=x", "Did you mean 'truth'")]
)
def test_fields_are_named_in_pairs(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fields_of([given])
    assert fields_of(["truth=target"])["truth"] == "target"


def test_half_a_surrogate_pair_can_be_written_to_a_file(tmp_path: Path) -> None:
    rows = read_responses(
        written(tmp_path, PLAIN | {"response": "\ud83d 2", "truth": ["\ud83d\ude00", "2"]}), [], "as_is"
    )
    assert rows[0]["response"] == "\ufffd 2"
    assert rows[0]["answer"] == ["\U0001f600", "2"]
