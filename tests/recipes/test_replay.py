"""An evaluation's summary says all that it takes to measure it again, and `--replay` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.test_benchmarks import asked, copies
from tests.recipes.test_evaluate import policy, settings
from tests.recipes.test_grpo import ROOT
from trl_ext.errors import InputError
from trl_ext.recipes.benchmarks import run_evaluations
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.replay import replay_of, summary_asked_for

__all__ = ["copies", "policy"]  # fixtures


def test_the_flag_is_taken_away_with_its_file() -> None:
    for given in (["x", "--replay", "a.json", "--seed", "1"], ["x", "--replay=a.json", "--seed", "1"]):
        assert summary_asked_for(given) == Path("a.json")
        assert given == ["x", "--seed", "1"]
    assert summary_asked_for(["x", "--seed", "1"]) is None
    for missing in (["x", "--replay"], ["x", "--replay", "--seed"]):
        with pytest.raises(InputError, match=r"--replay needs the summary\.json"):
            summary_asked_for(missing)


@pytest.mark.slow
def test_a_replay_draws_the_same_samples_and_says_so(policy: str, tmp_path: Path) -> None:
    run_evaluation(settings(policy, tmp_path / "run", samples=2, temperature=0.8))
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["first_prompt"].endswith("<think>")
    assert list(summary["end_tokens"].values()) == ["<|endoftext|>"]
    assert (summary["dtype"], summary["settings"]["batch_size"]) == ("float32", 5)
    assert {"weights", "tokenizer", "rows"} <= set(summary["made_from"])
    command = [sys.executable, str(ROOT / "recipes" / "evaluate.py"), f"--replay={path}"]
    again = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert f"accuracy {summary['accuracy']:.4f}, and {summary['accuracy']:.4f} there" in again
    assert "24 of 24 responses are the same" in again
    assert (tmp_path / "runs" / "run-replayed" / "samples.jsonl").read_text() == (
        path.parent / "samples.jsonl"
    ).read_text()
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert other.returncode == 1
    assert "holds an evaluation of other settings (seed: 0 there, 1 now)" in other.stderr
    path.write_text(json.dumps(summary | {"made_from": summary["made_from"] | {"weights": "others"}}))
    other = subprocess.run(
        [*command, "--output_dir", "elsewhere"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "what was measured had another" in other.stderr


@pytest.mark.moderate
def test_a_benchmark_is_replayed_by_its_summary(
    policy: str, tmp_path: Path, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_evaluations(asked(policy, tmp_path / "run", copies, benchmark=["math500"], max_tokens=12))
    run, config = replay_of(tmp_path / "run" / "math500" / "summary.json")
    (again,) = parse((Evaluation,), "about", config, ["--output_dir", str(tmp_path / "again")])
    run(again)
    assert "6 of 6 responses are the same" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "[]", "{}", "{", '{"settings": 3}'])
def test_what_cannot_be_replayed_is_one_line(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=f"^--replay {path}: "):
        replay_of(path)
