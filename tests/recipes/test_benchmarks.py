"""A model on benchmarks by name: one engine, a folder and a line of the table for each, as each is usually graded."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.recipes.test_evaluate import policy
from tests.recipes.test_grpo import ROOT
from tests.support.problems import load_problems
from trl_ext.errors import InputError
from trl_ext.evaluation.benchmark_table import figures_of, latex_table, text_table, write_tables
from trl_ext.evaluation.evaluator import Report
from trl_ext.io import read_jsonl, write_jsonl
from trl_ext.recipes.benchmarks import _of_benchmark, default_config, run_best_of_ns, run_evaluations
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.registry import UnknownName
from trl_ext.rewards.graders import equality_of

__all__ = ["policy"]  # a fixture


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Problems that a tiny policy can read, in the layouts of two benchmarks."""
    rows = load_problems("mini_math", "validation", "r1_zero", n=6).to_list()
    folder = tmp_path / "copies"
    folder.mkdir()
    for name, row in (
        ("gsm8k", lambda problem: {"question": problem["problem"], "answer": f"so #### {problem['answer']}"}),
        ("math500", lambda problem: {key: problem[key] for key in ("problem", "answer", "level", "subject")}),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row(problem)) + "\n" for problem in rows))
    return folder


def asked(policy: str, folder: Path, copies: Path, **more: Any) -> Evaluation:
    fixed = {"max_tokens": 40, "batch_size": 8, "use_vllm": "false", "benchmark": ["gsm8k,math500"]}
    return Evaluation(model_name_or_path=policy, output_dir=str(folder), benchmark_dir=str(copies), **{**fixed, **more})


@pytest.mark.moderate
def test_each_benchmark_has_a_folder_and_a_line(
    policy: str, tmp_path: Path, copies: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sampler = [], Evaluation.sampler

    def counted(self: Evaluation, *args: Any) -> Any:
        made.append(self.dataset)
        return sampler(self, *args)

    monkeypatch.setattr(Evaluation, "sampler", counted)
    settings = asked(policy, tmp_path / "run", copies, samples=4)
    reports = run_evaluations(settings)
    printed = capsys.readouterr().out
    assert len(made) == 1, "one engine for all"
    figures = json.loads((tmp_path / "run" / "benchmarks.json").read_text())["benchmarks"]
    table = list(csv.reader((tmp_path / "run" / "benchmarks.csv").open()))
    assert [row[0] for row in table] == ["benchmark", "gsm8k", "math500", "mean"]
    for name, report in reports.items():
        rows = read_jsonl(tmp_path / "run" / name / "samples.jsonl")
        right = [row["outcome"] == "correct" for row in rows]
        assert len(rows) == len(report.rows) == 24
        assert figures[name]["avg@k"] == sum(right) / 24
        assert (figures[name]["problems"], figures[name]["k"]) == (6, 4)
        assert figures[name]["low"] <= figures[name]["avg@k"] <= figures[name]["high"]
        assert figures[name]["pass@k"] == sum(any(right[4 * p : 4 * p + 4]) for p in range(6)) / 6
        assert f"6 rows, and {name} has" in printed
    assert {path.suffix for path in (tmp_path / "run").glob("benchmarks.*")} == {".json", ".csv", ".md", ".tex", ".png"}
    run_evaluations(settings)
    assert len(made) == 1, "what has ended is shown"
    assert capsys.readouterr().out.count("shown, not measured again") == 2


def test_what_nobody_gave_is_as_is_usual_for_the_benchmark(policy: str, tmp_path: Path) -> None:
    def of(name: str, **given: Any) -> Evaluation:
        return _of_benchmark(Evaluation(model_name_or_path=policy, benchmark=[name], output_dir="x", **given), name)

    assert (of("aime24").samples, of("gsm8k").samples) == (32, 1)
    assert of("aime24", temperature=0.0).samples == 1
    assert of("aime24", samples=4).samples == 4
    minerva = of("minerva")
    assert (minerva.grader, minerva.worked_out, minerva.numeric_tolerance) == ("strict", False, 1e-5)
    assert of("minerva", numeric_tolerance=0.01).numeric_tolerance == 0.01
    assert of("minerva", worked_out=True).worked_out is True
    course = of("math", grader="compatible")
    assert (course.grader, course.worked_out) == ("compatible", None)
    assert (minerva.dataset, minerva.split, minerva.output_dir) == ("minerva", "validation", "x/minerva")
    assert minerva.prompt == "r1_zero"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    for path in Path(policy).glob("*"):
        if not (tmp_path / "chat" / path.name).exists():
            (tmp_path / "chat" / path.name).symlink_to(path)
    settings = Evaluation(model_name_or_path=str(tmp_path / "chat"), benchmark=["gsm8k"])
    assert (_of_benchmark(settings, "gsm8k").prompt, _of_benchmark(settings, "gsm8k").answer_format) == (
        "chat",
        "boxed",
    )
    settings = Evaluation(model_name_or_path=str(tmp_path / "chat"), benchmark=["gsm8k"], prompt="question_only")
    assert _of_benchmark(settings, "gsm8k").prompt == "question_only"
    chat = Evaluation(model_name_or_path="x", benchmark=["gsm8k"], chat_template_kwargs="enable_thinking=false")
    assert (chat.prompt, chat.answer_format) == ("chat", "boxed")


def evaluated(folder: Path, correct: dict[str, list[bool]]) -> Path:
    """A folder as an evaluation of benchmarks leaves it."""
    for name, flags in correct.items():
        (folder / name).mkdir(parents=True)
        rows = [row(i, 0, "1", flag) | {"problem": f"P{i}"} for i, flag in enumerate(flags)]
        write_jsonl(folder / name / "samples.jsonl", rows)
    figures = {name: figures_of(Report(read_jsonl(folder / name / "samples.jsonl")), None) for name in correct}
    write_tables(folder, figures, folder.name)
    return folder


@pytest.mark.moderate
def test_two_models_are_compared_on_benchmarks(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "a", {"gsm8k": [True] * 5 + [False] * 15, "aime24": [False] * 9 + [True]})
    second = evaluated(tmp_path / "b", {"gsm8k": [True] * 15 + [False] * 5, "aime24": [False] * 9 + [True]})
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), str(first), str(second)]
    out = tmp_path / "compared"
    said = subprocess.run([*command, "--output_dir", str(out)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in said.splitlines() if line.startswith(("gsm8k", "aime24"))]
    assert lines[0][:5] == ["gsm8k", "20", "25.0", "75.0", "+50.0"]
    assert lines[0][-3:] == ["10", "0", "0.002"]
    assert lines[1][:5] == ["aime24", "10", "10.0", "10.0", "+0.0"]
    assert {path.suffix for path in out.iterdir()} == {".csv", ".md", ".tex", ".png"}
    assert r"\toprule" in (out / "compared.tex").read_text()
    (first / "benchmarks.json").unlink()
    for arguments, refused in (
        (["--benchmark", "gsm8k", "--output_dir", str(tmp_path / "no")], "has no benchmarks.json with gsm8k"),
        (["--benchmark", "amc23"], "amc23 has no samples.jsonl: run recipes/evaluate.py"),
        (["--benchmark", "amc"], "unknown benchmark 'amc'. Did you mean 'amc23'?"),
    ):
        failed = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert refused in failed.stderr
        assert "Traceback" not in failed.stderr


@pytest.mark.moderate
def test_best_of_n_has_its_curves_for_each_benchmark(policy: str, tmp_path: Path, copies: Path) -> None:
    fixed = {"max_tokens": 20, "use_vllm": "false", "benchmark_dir": str(copies), "output_dir": str(tmp_path / "run")}
    settings = BestOfN(model_name_or_path=policy, samples=2, at=[1, 2], benchmark=["gsm8k", "math500"], **fixed)
    run_best_of_ns(settings)
    for name in ("gsm8k", "math500"):
        assert json.loads((tmp_path / "run" / name / "best_of_n.json").read_text())["samples"] == 2
        assert (tmp_path / "run" / name / "best_of_n.png").exists()
    assert json.loads((tmp_path / "run" / "benchmarks.json").read_text())["benchmarks"].keys() == {"gsm8k", "math500"}
    run_best_of_ns(BestOfN(model_name_or_path=policy, samples=2, at=[1, 2], benchmark=["gsm8k"], **fixed))
    assert json.loads((tmp_path / "run" / "benchmarks.json").read_text())["benchmarks"].keys() == {"gsm8k", "math500"}
    assert _of_benchmark(BestOfN(benchmark=["gsm8k"]), "gsm8k").samples == 16
    with pytest.raises(ValueError, match="first_from is an evaluation of one dataset"):
        BestOfN(benchmark=["gsm8k"], first_from="runs/x")


@pytest.mark.parametrize("said", [{"dataset": "gsm8k"}, {"split": "test"}, {"answer_column": "x"}, {"responses": "x"}])
def test_what_a_benchmark_says_is_not_said_twice(said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(ValueError, match=f"^{name} is what --benchmark math500,aime24 says"):
        Evaluation(benchmark=["math500", "aime24"], **said)


def test_a_benchmark_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"unknown benchmark 'aime26'. Did you mean 'aime2\d'\? Known: aime24, "):
        Evaluation(benchmark=["math500,aime26"])


def test_all_inputs_are_checked_before_an_engine_starts(
    policy: str, tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluation, "sampler", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(InputError, match="no copy of aime25 in"):
        run_evaluations(asked(policy, tmp_path / "run", copies, benchmark=["gsm8k", "aime25"]))


def test_the_recipes_default_file_follows_the_flags() -> None:
    recipe = Path("recipes/evaluate.py")
    assert default_config(recipe, ["--benchmark=gsm8k"]).name == "evaluate_benchmarks.yaml"
    assert default_config(recipe, ["--dataset", "gsm8k", "--benchmark_dir", "x"]).name == "evaluate.yaml"


def row(problem: int, sample: int, answer: str | None, correct: bool, tokens: int = 10) -> dict[str, Any]:
    return {
        "problem_id": problem, "sample": sample, "extracted": answer, "tokens": tokens, "finish_reason": "stop",
        "outcome": "correct" if correct else "neither", "level": problem, "subject": "",
    }  # fmt: skip


def test_figures_follow_from_the_samples() -> None:
    equal = equality_of("strict")
    assert equality_of("mine.py:grader") is None
    rows = [
        row(0, 0, "1/2", True, 5), row(0, 1, "3", False, 9), row(0, 2, "0.5", True, 8), row(0, 3, "3", False, 30),
        row(1, 0, None, False), row(1, 1, "7", False), row(1, 2, "7.0", False), row(1, 3, "8", True, 40),
    ]  # fmt: skip
    figures = figures_of(Report(rows, 4), equal)
    assert (figures["problems"], figures["k"], figures["avg@k"], figures["pass@k"]) == (2, 4, 3 / 8, 1.0)
    assert figures["maj@k"] == (0.0 + 1 / 3) / 2  # two of "3"; then 7, 7.0 and 8 with one vote each
    assert figures["cons@k"] == (1 / 2 + 0.0) / 2  # halves against threes; sevens against one eight
    assert figures["by_level"] == {"0": 0.5, "1": 0.25}
    assert [(group["longest"], group["accuracy"]) for group in figures["by_length"]] == [
        (8, 1.0), (10, 0.0), (10, 0.0), (40, 0.5),
    ]  # fmt: skip
    one = figures_of(Report(rows[::4], 1), equal)
    assert (one["pass@k"], one["maj@k"], one["cons@k"]) == (None, None, None)
    assert figures_of(Report(rows, 4), None)["cons@k"] is None


def test_the_tables_have_the_figures_in_percent() -> None:
    figures = {name: figures_of(Report([row(0, 0, "1", True), row(1, 0, "2", False)]), None) for name in ("a_b", "c")}
    lines = text_table(figures).splitlines()
    assert lines[0].split()[:4] == ["benchmark", "problems", "k", "avg@k"]
    assert lines[1].split() == ["a_b", "2", "1", "50.0", "9.5", "to", "90.5", "10", "0.0"]
    assert lines[-1].split() == ["mean", "50.0"]
    latex = latex_table(("model", "95 %"), [["a_b", "1"]])
    assert latex.splitlines()[2:5] == [r"model & 95 \% \\", r"\midrule", r"a\_b & 1 \\"]
