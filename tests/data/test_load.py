"""Any dataset becomes the same rows, or is refused before a model loads."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.support.problems import load_problems, read_problems
from trl_ext.data import dataset
from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.load import ANSWER_SOURCES
from trl_ext.registry import UnknownName

COLUMNS = ["prompt", "answer", "problem", "level", "subject", "row"]
ROWS = [
    {"problem": "1 + 1?", "answer": " 2 ", "level": "Level 3", "type": "Algebra"},
    {"problem": "{x} - x?", "answer": "0", "level": "Level ?", "type": "Counting"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write(rows: list[dict[str, Any]], name: str = "train.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def write_csv(rows: list[dict[str, Any]]) -> str:
    with Path("train.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return "train.csv"


def write_parquet(rows: list[dict[str, Any]]) -> str:
    Dataset.from_list(rows).to_parquet("train.parquet")
    return "train.parquet"


def write_json(rows: list[dict[str, Any]]) -> str:
    return write(rows, "train.json")


@pytest.mark.parametrize("written", [write, write_json, write_csv, write_parquet])
def test_every_kind_of_file_gives_the_same_rows(written: Any) -> None:
    rows = load_problems(written(ROWS), "train", "question_only").to_list()
    assert rows == [
        {"prompt": "1 + 1?", "answer": "2", "problem": "1 + 1?", "level": 3, "subject": "Algebra", "row": 0},
        {"prompt": "{x} - x?", "answer": "0", "problem": "{x} - x?", "level": 0, "subject": "Counting", "row": 1},
    ]


def test_the_prompt_is_the_template_with_the_problem_in_it() -> None:
    (row, _) = load_problems(write(ROWS), "train", "r1_zero").to_list()
    assert row["prompt"].endswith("User: 1 + 1?\nAssistant: <think>")


def test_the_split_is_put_into_the_path() -> None:
    write(ROWS[1:], "validation.jsonl")
    write(ROWS)
    assert load_problems("{split}.jsonl", "validation", "question_only")["answer"] == ["0"]
    assert load_problems("{split}.jsonl", "train", "question_only")["answer"] == ["2", "0"]


def test_columns_and_the_place_of_the_answer_can_be_named() -> None:
    name = write([{"question": "1 + 1?", "solution": "Adding, 1,002.\n#### 1,002", "subject": "Sums", "level": 2}])
    load = {"problem_column": "question", "answer_column": "solution", "answer_source": "after_hashes"}
    assert load_problems(name, "train", "question_only", **load).to_list() == [
        {"prompt": "1 + 1?", "answer": "1002", "problem": "1 + 1?", "level": 2, "subject": "Sums", "row": 0}
    ]


def test_a_number_as_answer_is_its_text() -> None:
    assert load_problems(write([{"problem": "0?", "answer": 0}]), "train", "question_only")["answer"] == ["0"]


def test_a_list_of_accepted_answers_stays_one() -> None:
    listed = [{"problem": "x^2 = 4?", "answer": ["2", " -2"]}, {"problem": "0?", "answer": ["0"]}]
    assert load_problems(write(listed), "train", "question_only")["answer"] == [["2", "-2"], ["0"]]


@pytest.mark.parametrize("answer", [[], ["2", " "], {"value": "2"}])
def test_a_row_without_an_answer_in_its_list_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="line 1: no answer in 'answer'"):
        load_problems(write([{"problem": "2?", "answer": answer}]), "train", "question_only")


@pytest.mark.parametrize(
    ("source", "text", "answer"),
    [
        ("as_is", " 4 ", "4"),
        ("as_is", "  ", None),
        ("last_boxed", r"\boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("last_boxed", r"Thus \fbox{5}.", "5"),
        ("last_boxed", r"so $x = \boxed 7$.", "7"),
        ("last_boxed", "4", None),
        ("after_hashes", "3 #### 4 #### 5", "5"),
        ("after_hashes", "#### 1,234,567", "1234567"),
        ("after_hashes", "#### ", None),
        ("after_hashes", "4", None),
    ],
)
def test_where_an_answer_is_found(source: str, text: str, answer: str | None) -> None:
    assert ANSWER_SOURCES[source](text) == answer


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {"problem_column": "text"}, "has no column 'text'. It has: problem, answer, level, type"),
        (ROWS, {"answer_column": "solution"}, "has no column 'solution'. It has: problem, answer, level, type"),
        ([ROWS[0], {"problem": " ", "answer": "1"}], {}, "'train.jsonl', line 2: 'problem' is ' ', not a text"),
        ([ROWS[0], {"problem": None, "answer": "1"}], {}, "line 2: 'problem' is None, not a text"),
        ([{"problem": 3, "answer": "1"}], {}, "line 1: 'problem' is 3, not a text"),
        ([ROWS[0], {"problem": "1?", "answer": None}], {}, "line 2: no answer in 'answer': 'None'"),
        ([ROWS[0], {"problem": "1?", "answer": " "}], {}, "line 2: no answer in 'answer': ' '"),
        ([ROWS[0], {"problem": "1?", "answer": float("nan")}], {}, "line 2: no answer in 'answer': 'nan'"),
        ([ROWS[0], {"problem": "1?", "answer": float("inf")}], {}, "line 2: no answer in 'answer': 'inf'"),
        (ROWS, {"answer_source": "last_boxed"}, "line 1: no answer in 'answer': ' 2 '"),
        (
            [{"problem": "1?", "answer": "So one. #### 1"}],
            {"answer_source": "last_boxed"},
            "line 1: no answer in 'answer': 'So one. #### 1' (--answer_source after_hashes finds one)",
        ),
    ],
)
def test_a_missing_column_or_answer_is_refused_with_its_place(
    rows: list[dict[str, Any]], options: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load_problems(write(rows), "train", "question_only", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"problem": "1?", "answer": "1"', r"'train\.jsonl', line 2: not JSON: Expecting"),
        ("", r"'train\.jsonl', line 2: not JSON"),
        pytest.param(
            '{"answer": ' + "[" * 3000,
            r"'train\.jsonl', line 2: not JSON: lists or objects are nested too deeply",
            id="nested",
        ),
        pytest.param(
            '{"answer": ' + "7" * 5000 + "}",
            r"'train\.jsonl', line 2: not JSON: a number has more than 4,300 digits",
            id="number",
        ),
        ('["1?", "1"]', r"'train\.jsonl', line 2: not a JSON object"),
        ('{"answer": "1"}', r"'train\.jsonl', line 2: 'problem' is None, not a text"),
    ],
)
def test_a_torn_or_empty_line_is_refused_with_its_number(line: str, message: str) -> None:
    good = json.dumps(ROWS[0])
    Path("train.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=message):
        load_problems("train.jsonl", "train", "question_only")


UNENCODABLE = {
    "x.jsonl": (
        rb'{"problem": "p", "answer": "1"}',
        rb'{"problem": "p \ud835", "answer": "1"}',
        "line 2: field 'problem'",
    ),
    "raw.jsonl": (b'{"problem": "p \xed\xa0\xb5", "answer": "1"}', b"", "line 1: field 'problem'"),
    "in.jsonl": (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', b"", "line 1: field 'messages.0.content'"),
    "key.jsonl": (rb'{"a\udfff": 1}', b"", "line 1: field"),
    "x.csv": (b"problem,answer", b"p \xff,1", "cannot be read as .csv"),
}


def test_a_text_that_utf8_cannot_hold_is_named(tmp_path: Path) -> None:
    for name, (first, second, place) in UNENCODABLE.items():
        (tmp_path / name).write_bytes(first + b"\n" + second + b"\n")
        with pytest.raises(ValueError, match=re.escape(place)) as refused:
            load_problems(str(tmp_path / name), "train", "r1_zero")
        assert name in str(refused.value)
    (tmp_path / "whole.jsonl").write_text(json.dumps({"problem": "\U0001d400 \ufffd", "answer": "1"}))
    assert load_problems("whole.jsonl", "train", "r1_zero")[0]["problem"] == "\U0001d400 \ufffd"


FILES = [write, write_json, write_csv, write_parquet]
CONTROL = {"\0": "'\\x00'", "\x0crac{1}{2}": 'as JSON has for "\\f', "\x08inom": 'as JSON has for "\\b'}


@pytest.mark.parametrize("written", FILES)
@pytest.mark.parametrize("text", CONTROL)
def test_control_characters_are_named_by_place_and_field(written: Any, text: str) -> None:
    name = written([ROWS[1], {**ROWS[0], "answer": f"5{text}"}])
    with pytest.raises(ValueError, match=rf"{re.escape(name)}', (?:line 2|row 1): no answer in 'answer'") as refused:
        load_problems(name, "train", "r1_zero")
    assert CONTROL[text] in str(refused.value)
    name = written([ROWS[1], {**ROWS[0], "problem": "1\0"}])
    with pytest.raises(ValueError, match=r"(?:line 2|row 1): 'problem' has the control character '\\x00'$"):
        load_problems(name, "train", "r1_zero")


@pytest.mark.parametrize("written", [write, write_json, write_parquet])
@pytest.mark.parametrize("answer", [True, False, [True]])
def test_a_boolean_is_no_answer(written: Any, answer: Any) -> None:
    name = written([{"problem": "Is it?", "answer": answer}])
    with pytest.raises(ValueError, match=r"(?:line 1|row 0): no answer in 'answer': .*true and false are no texts"):
        load_problems(name, "train", "r1_zero")


def test_a_cell_of_a_table_is_the_text_that_is_written_there() -> None:
    answers = ["007", "1e3", "0.10", "True", "12345678901234567890123", "[1, 2]", "-0"]
    name = write_csv([{"problem": str(n), "answer": answer} for n, answer in enumerate(answers)])
    assert load_problems(name, "train", "question_only")["answer"] == answers


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"problem,answer\np,1,3\n", "cannot be read as .csv: row 0 has more cells than the head's 2"),
        ("x.csv", b"problem,answer\np,1\nq\n", "cannot be read as .csv: row 1 has fewer cells than the head's 2"),
        ("x.csv", b'problem,answer\n"p,1\n', "cannot be read as .csv: unexpected end of data"),
        ("x.parquet", b"PAR1", "cannot be read as .parquet: Parquet file size is 4 bytes"),
        ("x.json", b"[1]", "cannot be read as .json: row 0 is no JSON object: '1'"),
        ("x.json", b"[]", "has no column 'problem'. It has: no rows"),
        ("x.json", rb'[{"problem": "p \ud835", "answer": "1"}]', "row 0: field 'problem' has half of a surrogate pair"),
        ("x.jsonl", b'{"problem": "\xff"}', "line 1: not JSON: byte 0xff is no UTF-8, after '{\"problem\": \"'"),
        ("x.jsonl", b'{"problem": "p", "answer": 1}\n{"problem": "p"}', "line 2: no answer in 'answer': 'None' (the row"),
        ("x.jsonl", b'{"problem": "p", "answer": 1}\n{"answer": 1}', "line 2: 'problem' is None, not a text (the row has"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_is_called_is_named(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load_problems(name, "train", "r1_zero")
    assert str(refused.value).startswith(f"'{name}'")


def test_a_recognized_format_names_its_broken_row(tmp_path: Path) -> None:
    countdown = {"target": 3, "nums": [1, 2]}
    chat = {"messages": [{"role": role, "content": "The final answer is: 1."} for role in ("user", "assistant")]}
    broken = [(countdown, {"target": None, "nums": [1]}), (countdown, {"target": 3, "nums": 1}), (countdown, {})]
    for first, row in [*broken, (chat, {"messages": [1]}), (chat, {"messages": None})]:
        (tmp_path / "x.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=r"x.jsonl', line 2: not a row of this format"):
            load_problems(str(tmp_path / "x.jsonl"), "train", "r1_zero")


def test_a_long_answer_is_shown_by_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"problem": "p", "answer": "9" * 100_000}))
    assert len(read_problems("x.jsonl", "train", "r1_zero").source.line("train")) < 500


def test_the_row_of_another_format_is_named_by_its_number() -> None:
    Path("train.csv").write_text("problem,answer\n1?,1\n2?,\n")
    with pytest.raises(ValueError, match=r"'train\.csv', row 1: no answer in 'answer'"):
        load_problems("train.csv", "train", "question_only")


def test_a_file_without_rows_is_refused() -> None:
    Path("train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"has no column 'problem'\. It has: no rows"):
        load_problems("train.jsonl", "train", "question_only")


def test_answers_of_several_types_in_one_file_are_taken() -> None:
    rows = [{"problem": "1?", "answer": 1}, {"problem": "2?", "answer": "2"}, {"problem": "x?", "answer": ["3", 4]}]
    assert load_problems(write(rows), "train", "question_only")["answer"] == [["1"], ["2"], ["3", "4"]]


def test_a_text_with_unicode_line_ends_is_one_row() -> None:
    rows = [{"problem": "1\u2028?\x85", "answer": "1"}]
    Path("train.jsonl").write_text(json.dumps(rows[0], ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_problems("train.jsonl", "train", "question_only")["problem"] == ["1\u2028?\x85"]


SOLUTION = {"solution": r"Half: $\boxed{\frac{1}{2}}$.", "problem": "Half?"}


@pytest.mark.parametrize(
    "fields",
    [
        {"level": "Level 3", "type": "Algebra"},
        {"level": 3, "subject": "Algebra", "unique_id": "test/algebra/3.json", "answer": r"\frac{1}{2}"},
    ],
)
def test_a_dataset_repository_with_subjects_as_configurations(fields: dict[str, Any], tmp_path: Path) -> None:
    for subject in ("algebra", "geometry"):
        folder = tmp_path / "math" / subject
        folder.mkdir(parents=True)
        (folder / "test.jsonl").write_text(json.dumps({**SOLUTION, **fields}) + "\n")
    configs = [
        {"config_name": s, "data_files": [{"split": "test", "path": f"{s}/test.jsonl"}]}
        for s in ("algebra", "geometry")
    ]
    (tmp_path / "math" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    where = {"answer_column": "solution", "answer_source": "last_boxed", "dataset_config": "algebra,geometry"}
    rows = load_problems(str(tmp_path / "math"), "test", "question_only", **where).to_list()
    expected = {"problem": "Half?", "prompt": "Half?", "answer": r"\frac{1}{2}", "level": 3, "subject": "Algebra"}
    assert rows == [{**expected, "row": 0}, {**expected, "row": 1}]
    with pytest.raises(ValueError, match=r"math': Unknown split \"tset\"\. Should be one of \['test'\]"):
        load_problems(str(tmp_path / "math"), "tset", "question_only", **where)


def test_a_dataset_that_the_hub_does_not_give_has_a_local_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no/such.*; a local copy works as well: --dataset 'FOLDER/\{split\}.jsonl'"):
        load_problems("no/such", "test", "question_only")


def test_what_cannot_be_found_is_named() -> None:
    with pytest.raises(ValueError, match=r"no file 'absent_train\.jsonl' \(working directory: "):
        load_problems("absent_{split}.jsonl", "train", "question_only")
    write(ROWS)
    write(ROWS, "validation.jsonl")
    with pytest.raises(ValueError, match=r"no file 'tset\.jsonl' .*there are files for the splits: train, validation$"):
        load_problems("{split}.jsonl", "tset", "question_only")
    with pytest.raises(UnknownName, match=r"unknown answer source 'boxed'\. Did you mean 'last_boxed'"):
        load_problems("absent.jsonl", "train", "question_only", answer_source="boxed")
    with pytest.raises(ValueError, match="unknown prompt"):
        load_problems("absent.jsonl", "train", "question_onl")
    with pytest.raises(ValueError, match="mini_math is endless: say how many rows"):
        load_problems("mini_math", "train", "r1_zero")


def test_mini_math_has_the_same_columns_and_follows_its_seed() -> None:
    first, again, other = (load_problems("mini_math", "validation", "r1_zero", n=20, seed=seed) for seed in (1, 1, 2))
    assert first.column_names == COLUMNS
    assert len(first) == 20
    assert first["prompt"] == again["prompt"]
    assert first["prompt"] != other["prompt"]
    assert all(level > 0 for level in first["level"])


# Published datasets, as they are downloaded.

DOWNLOADED = [
    ({"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 1,005"}, "2 + 3?", "1005"),
    ({"problem": "P", "solution": r"so \boxed{\frac{1}{2}}.", "level": "Level 3", "subject": "Algebra"}, "P", r"\frac{1}{2}"),
    ({"problem": "P", "solution": r"so $\boxed 4$.", "level": "Level 3", "type": "Algebra"}, "P", "4"),
    ({"target": 98, "nums": [44, 19, 35]}, "Using the numbers 44, 19, 35, make an expression that equals 98.", "98: 44 19 35"),
    (
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.\n\nFinal Answer: The final "
                      "answer is $72$. I hope it is correct."}]},
        "Why?", "72",
    ),
    ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": r"\boxed{7}"}], "id": "1"}, "Q", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "problem", "answer"), DOWNLOADED)
def test_published_files_are_recognized_by_columns(
    row: dict[str, Any], problem: str, answer: str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    found = read_problems(str(tmp_path / "x.jsonl"), "test", "r1_zero")
    assert found.rows[0]["problem"].startswith(problem)
    assert found.rows[0]["answer"] == answer
    line = found.source.line("validation")
    assert "is the problem" in line
    assert f"; the first: {problem[:20]!r}"[:-1] in line
    assert line.endswith(f"-> {answer!r}")


def test_columns_that_are_asked_for_are_not_second_guessed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"problem": "P", "answer": "3", "solution": r"\boxed{4}"}) + "\n")
    assert load_problems(str(path), "test", "r1_zero")[0]["answer"] == "3"
    path.write_text(json.dumps({"question": "P", "answer": "#### 4"}) + "\n")
    asked = load_problems(str(path), "test", "r1_zero", problem_column="question", answer_source="as_is")
    assert asked[0]["answer"] == "#### 4"
    path.write_text(json.dumps({"question": "P", "answer": "4"}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: no answer in 'answer': '4'"):
        load_problems(str(path), "test", "r1_zero")


def test_presets_are_hub_datasets_with_their_held_out_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(dataset: str, split: str, config: str | None, revision: str | None) -> list[dict[str, Any]]:
        asked.append((dataset, split, config))
        return [{"question": "P", "answer": "#### 4"}] * 1319

    monkeypatch.setattr("trl_ext.data.published.read_table", read)
    for split in ("train", "validation", "test"):
        assert load_problems("gsm8k", split, "r1_zero")[0]["answer"] == "4"
    load_problems("countdown_tasks", "train", "r1_zero")
    assert asked == [
        ("openai/gsm8k", "train", "main"), ("openai/gsm8k", "test", "main"), ("openai/gsm8k", "test", "main"),
        ("Jiayi-Pan/Countdown-Tasks-3to4", "train", None),
    ]  # fmt: skip


def test_options_and_seed_are_those_of_problems_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dataset, "make_base_policy", lambda **given: asked.append(given))
    settings = DatasetSettings(dataset="arithmetic", dataset_options="longest=5,incorrect=equal")
    assert max(settings.read("train", 50, 0).rows["level"]) == 5
    assert max(text.count(",") for text in settings.read("train", 50, 0).rows["problem"]) == 4
    settings.base_policy(3)
    DatasetSettings(dataset="countdown").base_policy(1)
    DatasetSettings(base_policy_seed=0).base_policy(1)
    assert asked == [
        {"seed": 3, "task": "arithmetic", "options": {"longest": 5, "incorrect": "equal"}},
        {"seed": 1, "task": "mini_math", "options": None},
        {"seed": 0, "task": "mini_math", "options": None},
    ]
    for options in ("longest=2", "length=9"):
        with pytest.raises(
            ValueError, match=r"longest must be at least 5|unknown option of embedded task 'arithmetic'"
        ):
            DatasetSettings(dataset="arithmetic", dataset_options=options)
