"""What of an evaluation's problems the model's run was trained on is said, from the run's own settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_evaluate import policy, settings
from trl_ext.data.traces import mini_math_traces
from trl_ext.recipes.contamination import contamination, contamination_line, overlaps, words_of
from trl_ext.recipes.evaluate import run_evaluation

__all__ = ["policy"]  # a fixture
LONG = "A farmer has 12 cows and 7 pigs and sells a third of the cows to a neighbor for $300 each day"


def test_overlap_is_found_whatever_the_punctuation() -> None:
    trained = [f"Once more: {LONG.upper()}; how much is left?", "What is $3 + 4$?"]
    problems = [LONG, "what is  3+4", "What is 4 + 3?", " ".join(LONG.split()[:12]), f"{LONG}!", "  "]
    assert words_of(r"\frac{1}{2}, $x$") == ("frac", "1", "2", "x")
    assert overlaps(problems, trained) == {0: "13 words in a row", 1: "word for word", 4: "13 words in a row"}
    assert overlaps(problems, [LONG]) == {0: "word for word", 4: "word for word"}
    assert overlaps(problems, []) == {}


def run_folder(folder: Path, **resolved: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "resolved.json").write_text(json.dumps({"train_split": "train", "seed": 0, **resolved}))
    return str(folder)


def rows(path: Path, problems: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in problems))
    return str(path.with_name(path.name.replace("train", "{split}")))


def test_the_runs_behind_a_model_are_looked_at(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "sft", traces=rows(tmp_path / "traces_train.jsonl", [LONG]), traces_split="train")
    second = run_folder(
        tmp_path / "grpo", dataset=rows(tmp_path / "gsm_train.jsonl", ["What is 2 + 2?"]), model_name_or_path=first
    )
    problems = ["What is 2+2?", "Another one", LONG]
    for model in (second, f"{second}/checkpoint-4"):
        Path(model).mkdir(exist_ok=True)
        seen = contamination(model, problems)
        assert seen is not None
        assert seen["problems"] == {"0": "word for word", "2": "word for word"}
        assert [text.partition(":")[0] for text in seen["checked"]] == ["grpo", "sft"]
    line = contamination_line(seen, 3)
    assert line.startswith("contamination: 2 of 3 problems are in the model's training data (2 word for word;")
    assert contamination("somebody/model", problems) is None
    (tmp_path / "gsm_train.jsonl").unlink()
    seen = contamination(second, problems)
    assert seen is not None
    assert "grpo: its training data cannot be read (no file " in contamination_line(seen, 3)
    assert seen["problems"] == {"2": "word for word"}


def test_traces_in_the_template_are_compared_as_problems(tmp_path: Path) -> None:
    model = run_folder(tmp_path / "sft", traces="mini_math", traces_split="train")
    prompt = mini_math_traces(4096, 0)[0]["prompt"]
    problem = prompt.partition("User: ")[2].partition("\n")[0]
    seen = contamination(model, [problem])
    assert seen is not None
    assert seen["problems"] == {"0": "word for word"}


@pytest.mark.moderate
def test_an_evaluation_says_so_and_writes_it_down(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = run_folder(tmp_path / "run", dataset="mini_math", train_problems=64)
    for path in Path(policy).iterdir():
        (Path(trained) / path.name).symlink_to(path)
    run_evaluation(settings(trained, tmp_path / "held_out", max_tokens=8))
    assert "contamination: 0 of 12 problems are in the model's training data." in capsys.readouterr().out
    run_evaluation(settings(trained, tmp_path / "trained_on", max_tokens=8, split="train"))
    assert "contamination: 12 of 12 problems" in capsys.readouterr().out
    summary = json.loads((tmp_path / "trained_on" / "summary.json").read_text())
    assert len(summary["contamination"]["problems"]) == 12
