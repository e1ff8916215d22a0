"""Many runs: each once, with the arguments that it was asked for, and a failure that names its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trl_ext.errors import InputError
from trl_ext.tools.experiments.sweep import _environment, run_all

SCRIPT = """
import json, os, sys
output = sys.argv[sys.argv.index("--output_dir") + 1]
os.makedirs(output)
if "fail" in sys.argv:
    sys.exit("no good")
threads = os.environ.get("OMP_NUM_THREADS")
json.dump({"value": sys.argv[1], "threads": threads, "pid": os.getpid()}, open(f"{output}/summary.json", "w"))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "recipe.py").write_text(SCRIPT)
    return str(tmp_path / "recipe.py")


def test_every_run_is_done_once_and_returns_its_summary_by_name(tmp_path: Path, script: str) -> None:
    commands = {"a": [script, "1"], "b": [script, "2"]}
    first = run_all(commands, tmp_path / "runs", jobs=2)
    assert {name: summary["value"] for name, summary in first.items()} == {"a": "1", "b": "2"}
    assert first["a"]["threads"] is not None
    known: list[list[str]] = []
    again = run_all({**commands, "c": [script, "3"]}, tmp_path / "runs", on_end=lambda found: known.append([*found]))
    assert known == [["a", "b"], ["a", "b", "c"]]
    assert (again["a"], again["b"]) == (first["a"], first["b"])
    assert again["c"]["value"] == "3"
    assert "$ " in (tmp_path / "runs" / "c.log").read_text()


def test_what_was_done_with_other_arguments_is_refused(tmp_path: Path, script: str) -> None:
    run_all({"a": [script, "1"]}, tmp_path / "runs")
    with pytest.raises(InputError, match=r"runs/a was run with other arguments: recipe\.py 1"):
        run_all({"a": [script, "2"]}, tmp_path / "runs")


def test_failed_run_is_named_and_the_rest_is_left_for_next_time(tmp_path: Path, script: str) -> None:
    commands = {"a": [script, "1"], "b": [script, "fail"], "c": [script, "3"], "d": [script, "4"]}
    with pytest.raises(InputError, match=r"a run failed: see the end of .*b\.log"):
        run_all(commands, tmp_path / "runs")
    assert "no good" in (tmp_path / "runs" / "b.log").read_text()
    assert not (tmp_path / "runs" / "d").exists()
    other = {name: [script, name] for name in ("b", "d")}  # what is not done may be asked for in another way
    assert run_all(other, tmp_path / "runs" / "again")["d"]["value"] == "d"


def test_keep_going_reports_failures_runs_the_rest_and_retries(tmp_path: Path, script: str) -> None:
    commands = {"a": [script, "1"], "b": [script, "fail"], "c": [script, "3"]}
    found = run_all(commands, tmp_path / "runs", keep_going=True)
    assert (found["a"]["value"], found["b"], found["c"]["value"]) == ("1", {"failed": "no good"}, "3")
    mended = run_all({**commands, "b": [script, "2"]}, tmp_path / "runs" / "again", keep_going=True)
    assert mended["b"]["value"] == "2"


def test_parallel_runs_get_a_share_of_the_cores_and_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shares = [_environment("recipes/grpo_math.py", slot, 3) for slot in range(3)]
    assert [(share["OMP_NUM_THREADS"], share["CUDA_VISIBLE_DEVICES"]) for share in shares] == [
        ("2", "0"), ("2", "1"), ("2", "0"),
    ]  # fmt: skip
    alone = _environment("recipes/grpo_math.py", 0, 1)
    assert (alone["CUDA_VISIBLE_DEVICES"], alone.get("OMP_NUM_THREADS")) == ("0", os.environ.get("OMP_NUM_THREADS"))
    assert "CUDA_VISIBLE_DEVICES" not in _environment("recipes/leaderboard.py", 0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert _environment("recipes/grpo_math.py", 1, 2)["CUDA_VISIBLE_DEVICES"] == "1"
