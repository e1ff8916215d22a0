"""Benchmarks measured while a run trains: each at its own cadence, once, and counted into the budget."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.recipes.test_benchmarks import copies
from tests.recipes.test_evaluate import policy
from tests.recipes.test_grpo import GRPO_SETTINGS, ROOT
from tests.support.recipe import run_recipe
from trl_ext.data.dataset import DatasetSettings
from trl_ext.generation.completion import Completion
from trl_ext.generation.interruption import SamplingStopped
from trl_ext.io import read_jsonl
from trl_ext.recipes.cli import parse
from trl_ext.registry import UnknownName
from trl_ext.training.benchmarks import BenchmarkValidation, MeasuredBenchmark, parse_benchmarks

__all__ = ["copies", "policy"]  # fixtures


def test_benchmarks_have_options_of_their_own() -> None:
    expected = [MeasuredBenchmark("math500", 100, None, 40), MeasuredBenchmark("aime24", samples=8)]
    assert parse_benchmarks(["math500:problems=100,every=40", "aime24:samples=8"]) == expected
    assert parse_benchmarks(["math500:problems=100,every=40,aime24:samples=8"]) == expected
    assert parse_benchmarks(["gsm8k,amc23"]) == [MeasuredBenchmark("gsm8k"), MeasuredBenchmark("amc23")]
    assert parse_benchmarks([]) == []
    for wrong, said in (
        ("math50", "unknown benchmark"),
        ("math500:problem=3", "unknown option of a benchmark 'problem'"),
    ):
        with pytest.raises(UnknownName, match=said):
            parse_benchmarks([wrong])
    for misplaced in (":samples=4", "samples=4", "samples=4,math500", "math500:"):
        with pytest.raises(ValueError, match="an option, name=number, stands after a benchmark's name"):
            parse_benchmarks([misplaced])
    for value in ("0", "-1", "x", ""):
        with pytest.raises(ValueError, match="every has to be a whole number above 0"):
            parse_benchmarks([f"gsm8k:every={value}"])


@pytest.mark.slow
def test_benchmarks_are_measured_before_between_and_at_the_end(
    policy: str, tmp_path: Path, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--model_name_or_path", policy, "--output_dir", str(tmp_path / "run"), "--benchmark_dir", str(copies),
        "--validation_benchmarks", "gsm8k:problems=4,every=3", "math500:samples=2", "--max_steps", "4",
        "--validate_every", "2", "--validation_problems", "4", "--train_problems", "32", "--rollout_batch_size", "8",
        "--group_size", "4", "--train_batch_size", "8", "--sampling_max_tokens", "16", "--use_vllm", "false",
        "--save_steps", "2", "--disable_tqdm", "false",
    ]  # fmt: skip
    run_recipe(*parse(GRPO_SETTINGS, "about", ROOT / "recipes" / "grpo_math.yaml", arguments))
    rows = read_jsonl(tmp_path / "run" / "benchmarks.jsonl")
    measured = [(row["benchmark"], row["step"], row["problems"], row["k"]) for row in rows]
    assert measured == [
        ("gsm8k", 0, 4, 1), ("math500", 0, 6, 2), ("math500", 2, 6, 2), ("gsm8k", 3, 4, 1), ("math500", 4, 6, 2),
        ("gsm8k", 4, 4, 1),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {name: row["step"] for name, row in summary["benchmarks"].items()} == {"gsm8k": 4, "math500": 4}
    logged = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "benchmark/math500/avg@k" in row]
    assert [row["benchmark/math500/avg@k"] for row in logged] == [
        row["avg@k"] for row in rows if row["benchmark"] == "math500"
    ]
    printed = capsys.readouterr().out
    assert "gsm8k: 4 problems of 6" in printed
    assert "math500 at step    2/4: avg@2 " in printed


class FakeTrainer:
    """What the callback asks of a trainer, with an answer that is always right."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.stop_signal: int | None = None
        self.restored_step: int | None = None
        self.args = SimpleNamespace(temperature=1.0, disable_tqdm=True)
        self.logged: list[dict[str, Any]] = []
        self.stops_after = stops_after

    @contextlib.contextmanager
    def stopping_early(self) -> Iterator[None]:
        try:
            yield
        except SamplingStopped:
            self.stop_signal = signal.SIGTERM

    def sample(self, prompts: list[str], **sampling: Any) -> list[Completion]:
        if self.stops_after == len(self.logged):
            raise SamplingStopped
        return [Completion(r"\boxed{1}", 3, True) for _ in prompts]

    def log_now(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)


def callback(trainer: FakeTrainer, folder: Path) -> BenchmarkValidation:
    rows = {name: [{"prompt": "1?", "answer": "1", "level": 0, "subject": ""}] for name in ("gsm8k", "amc23")}
    build = functools.partial(DatasetSettings(prompt="question_only").build)
    benchmarks = parse_benchmarks(["gsm8k:every=3", "amc23:samples=2"])

    def is_due(state: Any) -> bool:
        return bool(state.global_step % 2 == 0)

    sampling = {"temperature": None, "batch_size": 8, "max_tokens": 8, "seed": 0}
    return BenchmarkValidation(benchmarks, rows, build, is_due, sampling, folder, cast(Any, trainer))


def test_what_an_interruption_prevented_is_measured_when_resumed(tmp_path: Path) -> None:
    state = SimpleNamespace(global_step=6, max_steps=9, is_world_process_zero=True)
    interrupted = callback(FakeTrainer(stops_after=1), tmp_path)
    interrupted.on_step_end(cast(Any, None), cast(Any, state), cast(Any, None))
    interrupted.on_train_end(None, cast(Any, state), cast(Any, None))  # stopped: nothing more
    assert [row["benchmark"] for row in read_jsonl(tmp_path / "benchmarks.jsonl")] == ["gsm8k"]
    resumed = callback(FakeTrainer(), tmp_path)
    resumed.on_train_begin(None, cast(Any, state), cast(Any, None))
    state.global_step = 7
    resumed.on_step_end(cast(Any, None), cast(Any, state), cast(Any, None))
    resumed.on_train_end(None, cast(Any, state), cast(Any, None))
    rows = read_jsonl(tmp_path / "benchmarks.jsonl")
    assert [(row["benchmark"], row["step"]) for row in rows] == [
        ("gsm8k", 6), ("amc23", 6), ("gsm8k", 7), ("amc23", 7),
    ]  # fmt: skip
    assert [row["avg@k"] for row in rows] == [1.0] * 4
    assert resumed.seconds_to_end() == max(rows[0]["seconds"], rows[2]["seconds"]) + max(
        rows[1]["seconds"], rows[3]["seconds"]
    )


def test_restored_weights_are_measured_as_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(global_step=6, max_steps=6, is_world_process_zero=True)
    trainer = FakeTrainer()
    measured = callback(trainer, tmp_path)
    measured.on_step_end(cast(Any, None), cast(Any, state), cast(Any, None))
    trainer.restored_step = 2
    measured.on_train_end(None, cast(Any, state), cast(Any, None))
    rows = read_jsonl(tmp_path / "benchmarks.jsonl")
    assert [(row["benchmark"], row["step"], row.get("weights_of_step")) for row in rows] == [
        ("gsm8k", 6, None), ("amc23", 6, None), ("gsm8k", 6, 2), ("amc23", 6, 2),
    ]  # fmt: skip
    measured.benchmarks = []
    monkeypatch.setattr("trl_ext.training.benchmarks.run_on_main_and_broadcast", lambda *_: pytest.fail("ranks wait"))
    measured.on_step_end(cast(Any, None), cast(Any, state), cast(Any, None))
