"""A stored result is shown or continued only for the weights, tokenizer, rows and settings that it was made from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.tiny import save_tiny
from trl_ext.errors import InputError
from trl_ext.io import read_jsonl, write_jsonl
from trl_ext.recipes.best_of_n import BestOfN, run_best_of_n
from trl_ext.recipes.evaluate import Evaluation, run_evaluation

ROWS = [{"problem": f"{n} + 1 =", "answer": str(n + 1)} for n in range(4)]


def exchange_weights(model: Path) -> None:
    """Weights of the same names and sizes, in a file of the same time."""
    path = model / "model.safetensors"
    weights = {name: weight + 0.01 * (name == "model.norm.weight") for name, weight in load_file(path).items()}
    before = path.stat()
    save_file(weights, path, {"format": "pt"})
    assert path.stat().st_size == before.st_size


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda folder: exchange_weights(folder / "model"), "weights differs"),
    "configuration": (lambda folder: edit(folder / "model" / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'),
                      "configuration of the model differs"),
    "tokenizer": (lambda folder: edit(folder / "model" / "tokenizer.json", '"stop"', '"step"'), "tokenizer differs"),
    "an answer": (lambda folder: edit(folder / "rows.jsonl", '"answer": "4"', '"answer": "5"'), "rows differs"),
    "a level": (lambda folder: edit(folder / "rows.jsonl", '"answer": "1"', '"answer": "1", "level": 2'), "rows differs"),
    "the grader's file": (lambda folder: edit(folder / "grade.py", "None, False", "None, True"), "grader differs"),
}  # fmt: skip


def inputs(folder: Path) -> Path:
    save_tiny(folder / "model")
    write_jsonl(folder / "rows.jsonl", ROWS)
    (folder / "grade.py").write_text(
        "from trl_ext.rewards.graders import Grade\n\n\ndef mine(responses, answers):\n    return [Grade(True, None, False, '') for _ in responses]\n"
    )
    return folder


def settings(folder: Path, kind: Any = Evaluation, **more: Any) -> Any:
    given = {
        "dataset": str(folder / "rows.jsonl"), "prompt": "question_only", "grader": f"{folder}/grade.py:mine",
        "max_tokens": 6, "batch_size": 2, "use_vllm": "false", "stop": [], "output_dir": str(folder / "run"),
    }  # fmt: skip
    return kind(model_name_or_path=str(folder / "model"), **{**given, **more})


def test_evaluation_is_not_shown_or_continued_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (change, words) in CHANGES.items():
        for kind in (Evaluation, BestOfN):
            folder = inputs(tmp_path / kind.__name__ / name)
            more = {} if kind is Evaluation else {"samples": 2, "at": [1, 2]}
            run: Any = run_evaluation if kind is Evaluation else run_best_of_n
            run(settings(folder, kind, **more))
            assert "not measured again" not in capsys.readouterr().out
            run(settings(folder, kind, **more))
            assert re.search(
                r"shown, not measured again: the evaluation of \d{4}-\d\d-\d\d \d\d:\d\d UTC, of the same "
                "weights, tokenizer, rows and settings",
                capsys.readouterr().out,
            )
            change(folder)
            for state in ("finished", "unfinished"):
                if state == "unfinished":  # as if it had been interrupted after its first batch
                    rows = read_jsonl(folder / "run" / "samples.jsonl")
                    write_jsonl(folder / "run" / "samples.rank0.jsonl", rows[:2])
                    (folder / "run" / "samples.jsonl").unlink()
                    (folder / "run" / "summary.json").unlink()
                with pytest.raises(InputError, match=rf"run holds an? {state} evaluation.* and its {words} from"):
                    run(settings(folder, kind, **more))
