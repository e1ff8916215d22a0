"""Which rows of a dataset are used, in what order, and what is said of those that are not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from tests.support.problems import load_problems, read_problems
from tests.support.tiny import tiny_tokenizer
from trl_ext.data.lengths import Room, rows_that_fit, too_long
from trl_ext.data.sample import stratified_order
from trl_ext.data.source import Source
from trl_ext.data.traces import load_traces
from trl_ext.recipes.preflight import note_overlap
from trl_ext.recipes.settings import Data

SUBJECTS = {"Algebra": 60, "Geometry": 30, "Number Theory": 10}  # rows of each, one after the other as MATH has them


@pytest.fixture(scope="module")
def sorted_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sorted") / "{split}.jsonl"
    rows = [
        {"problem": f"{subject} {n}?", "prompt": "p", "response": f"{subject} {n}", "answer": "1", "type": subject}
        for subject, count in SUBJECTS.items()
        for n in range(count)
    ]
    Path(str(path).format(split="test")).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- samples ----------------------------------------------------------------------------------------------------


def test_every_prefix_of_the_order_has_each_kind_in_proportion() -> None:
    kinds = [kind for kind, count in SUBJECTS.items() for _ in range(count)]
    order = stratified_order(kinds, seed=0)
    assert sorted(order) == list(range(100))
    for n in range(1, 101):
        counts = Counter(kinds[row] for row in order[:n])
        assert all(abs(counts[kind] - n * count / 100) <= 1.5 for kind, count in SUBJECTS.items()), n
    assert order == stratified_order(kinds, seed=0)
    other = stratified_order(kinds, seed=1)
    assert set(other[:20]) != set(order[:20])


def test_rows_of_one_kind_are_shuffled() -> None:
    order = stratified_order([()] * 100, seed=0)
    assert sorted(order) == list(range(100))
    assert max(order[:10]) > 50


def test_problem_limit_takes_a_sample_and_smaller_are_subsets(sorted_file: str) -> None:
    found = read_problems(sorted_file, "test", "question_only", n=20)
    assert Counter(found.rows["subject"]) == {"Algebra": 12, "Geometry": 6, "Number Theory": 2}
    assert found.rows["problem"][:10] == load_problems(sorted_file, "test", "question_only", n=10)["problem"]
    whole = read_problems(sorted_file, "test", "question_only", in_sample_order=True).rows
    assert whole["problem"][:20] == found.rows["problem"]
    lines = Path(sorted_file.format(split="test")).read_text().splitlines()
    assert [json.loads(lines[row])["problem"] for row in found.rows["row"]] == found.rows["problem"]
    again = read_problems(sorted_file, "test", "question_only", n=20, seed=5)
    assert again.rows["row"] == found.rows["row"], "of the training's seed it is independent"
    assert set(read_problems(sorted_file, "test", "question_only", n=20, sample_seed=5).rows["row"]) != set(
        found.rows["row"]
    )
    for words in ("20 problems of 100", "test.jsonl', split 'test'", "stratified by type with sample_seed 0"):
        assert words in found.source.line("validation")


def test_without_a_number_all_rows_stand_as_they_are_stored(sorted_file: str) -> None:
    found = read_problems(sorted_file, "test", "question_only")
    assert found.rows["row"] == list(range(100))
    assert found.source.order == "stored"
    assert "stratified" not in found.source.line("train")


def test_a_table_of_datasets_gives_the_same_sample(sorted_file: str, tmp_path: Path) -> None:
    Dataset.from_json(sorted_file.format(split="test")).to_parquet(tmp_path / "test.parquet")
    expected = load_problems(sorted_file, "test", "question_only", n=15)["row"]
    assert load_problems(str(tmp_path / "{split}.parquet"), "test", "question_only", n=15)["row"] == expected


def test_generated_problems_are_the_first_as_before() -> None:
    found = read_problems("mini_math", "validation", "r1_zero", n=5, seed=1)
    assert found.rows["problem"] == load_problems("mini_math", "validation", "r1_zero", n=9, seed=1)["problem"][:5]
    assert (found.source.order, found.source.available) == ("generated", None)


def test_a_number_of_traces_is_a_sample_too(sorted_file: str) -> None:
    traces = load_traces(sorted_file, "test", n=20)
    assert Counter(row["response"].rpartition(" ")[0] for row in traces)["Algebra"] == 12


def test_last_box_is_answer_and_multi_box_solutions_are_counted(tmp_path: Path) -> None:
    solutions = [r"$\boxed{1}$", r"either $\boxed{2}$ or $\boxed{3}$", r"\fbox{4}, so $\boxed{5}$."]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"problem": "?", "answer": solution}) + "\n" for solution in solutions))
    found = read_problems(str(path), "train", "question_only", answer_source="last_boxed")
    assert found.rows["answer"] == ["1", "3", "5"]
    assert found.source.several_boxes == ["line 2", "line 3"]
    said = "2 solutions with several boxes, of which the last is taken: line 2, line 3"
    assert said in found.source.line("train")


def test_validation_problems_that_are_trained_on_too_are_counted(sorted_file: str) -> None:
    train = load_problems(sorted_file, "test", "question_only", n=60)
    found = read_problems(sorted_file, "test", "question_only")
    note_overlap(Data(train, found.rows, {"validation": found.source}))
    assert found.source.also_in_training == 60
    assert "60 of them are in the training set too" in found.source.line("validation")


# --- lengths ----------------------------------------------------------------------------------------------------

PROMPTS = ["a b", "a b c a b", "a b c", "a b c a"]


def rows_of(prompts: list[str]) -> tuple[Dataset, Source]:
    numbers = [7 + n for n in range(len(prompts))]  # as in a sample
    return Dataset.from_list([{"prompt": p, "row": n} for p, n in zip(prompts, numbers, strict=True)]), Source(
        "{split}.jsonl", "train", 99, len(prompts), "sampled"
    )


def room(response: int) -> Room:
    return Room(10, "vllm_max_model_length", response, "sampling_max_tokens")


def test_prompt_with_no_room_for_its_response_is_refused() -> None:
    rows, source = rows_of(PROMPTS)
    assert rows_that_fit(rows, "train", source, tiny_tokenizer(), room(5), "refuse") is rows
    message = r"train, line 9 of 'train\.jsonl': its prompt of 5 tokens .* up to 6 .* into 10 "
    with pytest.raises(ValueError, match=message) as refused:
        rows_that_fit(rows, "train", source, tiny_tokenizer(), room(6), "refuse")
    for words in ("(vllm_max_model_length)", "1 of 4 rows", "longest by 1", "lower sampling_max_tokens", "--too_long"):
        assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rows_too_long_can_be_dropped_and_are_counted_and_listed() -> None:
    rows, source = rows_of(PROMPTS)
    kept = rows_that_fit(rows, "validation", source, tiny_tokenizer(), room(7), "drop")
    assert kept["prompt"] == ["a b", "a b c"]
    assert (source.rows, source.too_long) == (2, ["line 9", "line 11"])
    assert "validation: 2 problems of 99" in source.line("validation")
    assert "2 too long and left out: line 9, line 11" in source.line("validation")
    assert source.summary()["too_long"] == ["line 9", "line 11"]


def test_where_no_row_fits_leaving_them_out_is_refused() -> None:
    rows, source = rows_of(PROMPTS)
    with pytest.raises(ValueError, match="4 of 4 rows are too long"):
        rows_that_fit(rows, "train", source, tiny_tokenizer(), room(9), "drop")
    assert too_long([], tiny_tokenizer(), room(9)) == {}
