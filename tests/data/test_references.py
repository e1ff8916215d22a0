"""Reference answers are graded against themselves before a model loads: what nothing can match is said or refused."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from trl_ext.data.references import Checker, check_references, first_rank
from trl_ext.data.source import Source

GSM8K = ["3 + 4 = <<3+4=7>>7 eggs.\n#### 7", "She has 2 * 5 = 10 left.\n#### 10"]
MATH = [r"The sum is $3 + 4 = \boxed{7}$.", r"Half of it, so $\boxed{\frac{1}{2}}$."]
PROSE = "The farmer has seven eggs in the morning, of which she eats three, and so four are left for the market. " * 3


def rows_of(answers: list[Any]) -> tuple[Dataset, Source]:
    rows = Dataset.from_list([{"answer": answer, "row": 20 - n} for n, answer in enumerate(answers)])
    return rows, Source("mine.jsonl", "train", 99, len(answers), "sampled")


def checked(
    answers: list[Any], grader: str = "strict", answer_format: str = "r1_zero", source: str = "as_is"
) -> Source:
    rows, found = rows_of(answers)
    check_references(rows, "train", found, Checker(grader, answer_format, source), quiet=True)
    return found


@pytest.mark.parametrize("answer_format", ["r1_zero", "boxed"])
@pytest.mark.parametrize("grader", ["strict", "compatible"])
def test_answers_as_public_datasets_have_them_are_usable(grader: str, answer_format: str) -> None:
    answers = ["7", "-1", r"\frac{1}{2}", r"\text{Evelyn}", r"(-\infty, 3]", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"]
    for given in (answers, [["2", "-2"], ["0"]], MATH):
        assert checked(given, grader, answer_format).unusable == []


@pytest.mark.parametrize("grader", ["strict", "compatible"])
def test_full_solutions_are_refused_naming_the_answer_source(grader: str) -> None:
    with pytest.raises(ValueError) as refused:
        checked([*GSM8K, "5"], grader)
    said = str(refused.value)
    for words in (
        "train: 2 of 3 reference answers of 'mine.jsonl' cannot be matched",
        f"the {grader} grader",
        r"line 20: 'She has 2 * 5 = 10 left.\n#### 10' (a solution, in which after_hashes finds '10')",
        "With --answer_source after_hashes 2 of them can be",
    ):
        assert words in said, said
    assert "\n" not in said


def test_a_few_are_listed_and_not_refused() -> None:
    found = checked(["1", GSM8K[0], "2", r"3 \heartsuit 4 ?", "5"])
    assert [line.partition(":")[0] for line in found.unusable] == ["line 18", "line 20"]
    assert "(it cannot be read as an answer, so that only the same text matches it)" in found.unusable[0]
    assert "2 reference answers that hardly any response can match: line 18: " in found.line("train")
    assert found.summary()["unusable"] == found.unusable


@pytest.mark.parametrize("grader", ["strict", "compatible"])
def test_where_no_source_would_do_the_column_is_to_be_looked_at(grader: str) -> None:
    with pytest.raises(ValueError, match="No answer_source makes them usable: look at --answer_column"):
        checked([PROSE, PROSE, "5"], grader)


def test_an_answer_that_its_format_cannot_hold_is_listed() -> None:
    found = checked(["1", "2", r"\left\{ 1, 2", "3"], answer_format="boxed")
    assert len(found.unusable) == 1
    assert "strict does not accept it for itself" in found.unusable[0]


def test_countdown_and_generated_answers_are_not_checked() -> None:
    assert checked(["24: 3 8", "10: 5 5"], "countdown").unusable == []
    rows, _ = rows_of(GSM8K)
    generated = Source("mini_math", "train", None, 2, "generated")
    check_references(rows, "train", generated, Checker("strict", "r1_zero", "as_is"), quiet=True)
    assert generated.unusable == []


def test_the_first_ranks_refusal_is_raised() -> None:
    def refuse() -> None:
        raise ValueError("row 3 is empty")

    with pytest.raises(ValueError, match="row 3 is empty"):
        first_rank(refuse)
    first_rank(lambda: None)
