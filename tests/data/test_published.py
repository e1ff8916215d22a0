"""Benchmarks by name: each in the layout of each of its copies, and what is said of a copy that is another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets.exceptions import DatasetGenerationError

from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.published import BENCHMARKS, PUBLISHED, digest_of_problems
from trl_ext.evaluation.evaluator import grade_rows
from trl_ext.generation.completion import Completion
from trl_ext.rewards.graders import GRADERS

# Rows in the layout of each copy, with the answer that they come to. The problems are our own.
NUMBERS = {"025": "25", "27.0": "27", "-1.0": "-1", r"336^\circ": "336", "999": "999"}
LAYOUTS: dict[str, list[tuple[list[dict[str, Any]], list[str]]]] = {
    "gsm8k": [([{"question": f"{n} + 1?", "answer": f"{n}+1=<<{n}+1={n + 1}>>\n#### 1,00{n}"} for n in range(5)],
               [f"100{n}" for n in range(5)])],
    "math": [([{"problem": f"P{n}", "level": "Level 2", "type": "Algebra", "solution": rf"so $\boxed{{\frac{{{n}}}2}}$"}
               for n in range(5)], [rf"\frac{{{n}}}2" for n in range(5)])],
    "math500": [([{"problem": f"P{n}", "solution": r"$\boxed{9}$", "answer": f"{n}", "subject": "Algebra", "level": 1,
                   "unique_id": f"test/algebra/{n}.json"} for n in range(5)], [f"{n}" for n in range(5)])],
    "aime24": [
        ([{"id": n, "problem": f"P{n}", "solution": r"\boxed{0}", "answer": text, "url": "", "year": "2024"}
          for n, text in enumerate(NUMBERS)], list(NUMBERS.values())),
        ([{"ID": f"2024-I-{n}", "Problem": f"P{n}", "Solution": "", "Answer": n} for n in range(5)],
         [f"{n}" for n in range(5)]),
        ([{"id": n, "problem": f"P{n}", "solution": rf"\boxed{{{n}}}", "url": ""} for n in range(5)],
         [f"{n}" for n in range(5)]),
    ],
    "aime25": [
        ([{"problem": f"P{n}", "answer": text, "id": f"{n}"} for n, text in enumerate(NUMBERS)], list(NUMBERS.values())),
        ([{"id": n, "problem": f"P{n}", "answer": f"{n}", "solution": "", "url": "", "year": 2025} for n in range(5)],
         [f"{n}" for n in range(5)]),
        ([{"question": f"P{n}", "answer": text} for n, text in enumerate(NUMBERS)], list(NUMBERS.values())),
    ],
    "amc23": [([{"id": n, "answer": answer, "url": "", "question": f"P{n}"}
                for n, answer in enumerate(["27.0", "-1.0", "3", "12.0", "3159.0"])], ["27", "-1", "3", "12", "3159"])],
    "minerva": [
        ([{"question": f"Subproblem {n}: in m/s?", "answer": answer}
          for n, answer in enumerate(["2.5e6", "1.6e-19", "24.310", r"\frac{1}{2}m v^2", "x=3"])],
         ["2.5e6", "1.6e-19", "24.310", r"\frac{1}{2}m v^2", "x=3"]),
        ([{"problem": f"P{n}", "solution": rf"\boxed{{{n}e5}}", "idx": n} for n in range(1, 6)],
         [f"{n}e5" for n in range(1, 6)]),
    ],
    "olympiadbench": [
        ([{"id": n, "question": f"P{n}", "solution": ["..."], "final_answer": [answer], "context": context,
           "is_multiple_answer": "," in answer, "unit": None, "answer_type": kind, "error": error, "subfield": "Algebra"}
          for n, (answer, context, kind, error) in enumerate([
              ("$3,-3$", None, "Numerical", None), ("$(1,2),(2,1)$", "Let $x<y$.", "Tuple", "0.1"),
              ("2.50", None, "Numerical", "1e-1"), (r"$[0,1)\cup(2,3]$", None, "Interval", None),
              (r"$\frac{n+1}{2}$", None, "Expression", "nan")])],
         ["3,-3", "(1,2),(2,1)", "2.50", r"[0,1)\cup(2,3]", r"\frac{n+1}{2}"]),
    ],
}  # fmt: skip
EVERY_LAYOUT = [(name, place) for name, layouts in LAYOUTS.items() for place in range(len(layouts))]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> DatasetSettings:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DatasetSettings(dataset=name, benchmark_dir=str(folder), prompt="question_only")


def grades(rows: list[dict[str, Any]], answers: list[str], **options: Any) -> list[bool]:
    """Verdicts of the strict grader as the benchmark sets it up, on boxed answers."""
    grader = GRADERS.build("strict", answer_format="boxed", **options)
    completions = [Completion(rf"\boxed{{{answer}}}", 5, True) for answer in answers]
    return [row["outcome"] == "correct" for row in grade_rows(rows, completions, grader)]


def test_every_copy_of_every_benchmark_has_a_layout_here() -> None:
    assert LAYOUTS.keys() == BENCHMARKS.keys()
    for name, layouts in LAYOUTS.items():
        kinds = {mirror.columns for mirror in PUBLISHED[name].mirrors}
        assert len(layouts) >= len(kinds), name


@pytest.mark.parametrize(("name", "place"), EVERY_LAYOUT, ids=[f"{name}-{place}" for name, place in EVERY_LAYOUT])
def test_rows_in_the_layout_of_a_copy_are_read(name: str, place: int, tmp_path: Path) -> None:
    rows, answers = LAYOUTS[name][place]
    problems = write(tmp_path, name, rows).read("validation", None, 0)
    assert problems.rows["answer"] == answers
    assert all(problems.rows["problem"])
    assert problems.source.differs == f"5 rows, and {name} has {BENCHMARKS[name].rows}"
    assert "is not the benchmark's figure" in problems.source.line("validation")
    assert grades(problems.rows.to_list(), answers, **BENCHMARKS[name].grading) == [True] * 5


@pytest.mark.parametrize(
    ("name", "row", "answer", "correct"),
    [
        # OlympiadBench: in any order, within the row's absolute error, and nothing left out
        ("olympiadbench", 0, "-3, 3", True), ("olympiadbench", 0, r"\pm 3", True), ("olympiadbench", 0, "3", False),
        ("olympiadbench", 0, "3, -3, 0", False), ("olympiadbench", 1, "(2,1),(1,2)", True),
        ("olympiadbench", 1, "(1.05,2),(2,1)", False), ("olympiadbench", 2, "2.59", True),
        ("olympiadbench", 2, "2.61", False), ("olympiadbench", 3, r"[0,1) \cup (2,3]", True),
        ("olympiadbench", 3, "(0,1)", False), ("olympiadbench", 4, r"\frac{n}{2}+\frac12", True),
        ("olympiadbench", 4, r"\frac{n}{2}", False),
        # Minerva: 1e-5 relative, scientific notation however it is written
        ("minerva", 0, "2500000", True), ("minerva", 0, r"2.5\times 10^{6}", True), ("minerva", 0, "2.50001e6", True),
        ("minerva", 0, "2.501e6", False), ("minerva", 1, r"1.6\times10^{-19}", True), ("minerva", 1, "1.7e-19", False),
        ("minerva", 1, "0", False), ("minerva", 2, "24.31", True), ("minerva", 3, r"\frac{mv^2}{2}", True),
        ("minerva", 4, "3", True),
        # AIME, AMC: a number, however it is padded
        ("aime24", 0, "25", True), ("aime24", 0, "025", True), ("aime24", 0, "26", False), ("amc23", 0, "27", True),
        ("amc23", 1, "1", False),
        # MATH and GSM8K: equal values in any form
        ("math", 1, "0.5", True), ("math", 1, r"\frac{2}{4}", True), ("gsm8k", 1, "1,001", True),
    ],
)  # fmt: skip
def test_answers_are_graded_as_by_the_authors(name: str, row: int, answer: str, correct: bool, tmp_path: Path) -> None:
    problems = write(tmp_path, name, LAYOUTS[name][0][0]).read("validation", None, 0)
    assert grades([problems.rows[row]], [answer], **BENCHMARKS[name].grading) == [correct]


def test_copies_are_tried_in_order_and_each_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, answers = LAYOUTS["aime24"][2]
    whole = [{**rows[n % 5], "problem": f"P{n}"} for n in range(30)]
    tables: dict[str, Any] = {
        "HuggingFaceH4/aime_2024": PermissionError("Dataset 'HuggingFaceH4/aime_2024' is gated:\nask for access"),
        "Maxwell-Jia/AIME_2024": LAYOUTS["aime24"][0][0],
        "math-ai/aime24": whole,
    }

    def read(dataset: str, split: str, config: str | None, revision: str | None) -> list[dict[str, Any]]:
        assert len(str(revision)) == 40
        if isinstance(tables[dataset], Exception):
            raise tables[dataset]
        return tables[dataset]

    monkeypatch.setattr("trl_ext.data.published.read_table", read)
    settings = DatasetSettings(dataset="aime24", prompt="question_only")
    problems = settings.read("validation", None, 0)
    assert (problems.source.dataset, problems.source.split) == ("math-ai/aime24", "test")
    assert problems.rows["answer"][:5] == answers
    assert not problems.source.differs
    assert "read in place of HuggingFaceH4/aime_2024: Dataset" in problems.source.line("validation")
    tables["HuggingFaceH4/aime_2024"] = DatasetGenerationError("a cut file")
    assert settings.read("validation", None, 0).source.passed_over[0] == "HuggingFaceH4/aime_2024: a cut file"
    tables["HuggingFaceH4/aime_2024"] = PermissionError("it is gated: ask for access")
    tables["math-ai/aime24"] = whole[:29]
    with pytest.raises(ValueError) as refused:
        settings.read("validation", None, 0)
    said = str(refused.value)
    assert "\n" not in said
    assert "is gated: ask for access" in said
    assert "'Maxwell-Jia/AIME_2024' has no column 'Problem'" in said
    assert "29 rows, and aime24 has 30" in said
    assert "--benchmark_dir FOLDER with aime24.jsonl" in said


def test_without_a_network_one_copy_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def read(dataset: str, *_: object) -> None:
        tried.append(dataset)
        raise ValueError("no network") from ConnectionError()

    monkeypatch.setattr("trl_ext.data.published.read_table", read)
    with pytest.raises(ValueError, match=r"aime25 cannot be read\. math-ai/aime25: no network; a local copy"):
        DatasetSettings(dataset="aime25").read("validation", None, 0)
    assert tried == ["math-ai/aime25"]


@pytest.mark.parametrize("place", ["math500.jsonl", "math500/test.jsonl", "math500/validation.json"])
def test_a_local_copy_lies_where_it_is_looked_for(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in LAYOUTS["math500"][0][0]))
    settings = DatasetSettings(dataset="math500", benchmark_dir=str(tmp_path))
    assert len(settings.read("validation", None, 0).rows) == 5
    with pytest.raises(ValueError, match=r"no copy of amc23 in .*amc23\.jsonl"):
        DatasetSettings(dataset="amc23", benchmark_dir=str(tmp_path)).read("validation", None, 0)


def test_problems_are_known_by_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = LAYOUTS["math500"][0][0]
    texts = [row["problem"] for row in rows]
    known = digest_of_problems(texts)
    assert known == digest_of_problems([f" {text}\n" for text in reversed(texts)])
    assert known != digest_of_problems([*texts[:-1], "another"])
    settings = write(tmp_path, "math500", rows)
    for digest, differs in ((known, ""), ("0" * 64, "its problems are not those of math500 as they were published")):
        monkeypatch.setitem(BENCHMARKS, "math500", type(BENCHMARKS["math500"])(5, "", "", digest=digest))
        assert settings.read("validation", None, 0).source.differs == differs
