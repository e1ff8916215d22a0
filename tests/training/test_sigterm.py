"""SIGTERM ends what a process is sampling within seconds, and the resumed run is the one that was never told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grpo.test_distributed import environment_of_ranks
from tests.recipes.test_grpo import RECIPE, SMALL, TINY_RUN, rows
from tests.support.launch import Marked, ended, wait_for
from trl_ext.generation.interruption import SamplingStopped, StopRequest, sampling, stop_if_told, to_the_end
from trl_ext.generation.progress import advance
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.checkpoints import checkpoints, find_corruption
from trl_ext.runs.layout import record_in

SECONDS, TO_EXIT = 10.0, 30.0  # until the run has ended, and until the interpreter has on a busy machine
SLOW = """
import os, pathlib, time
from trl_ext.generation.progress import SamplingProgress
from trl_ext.rewards.graders import GRADERS

usual = SamplingProgress.advance

def slowly(self, tokens, finished=0):
    usual(self, tokens, finished)
    if self.purpose == os.environ.get("SLOW") and self.tokens > 40:
        pathlib.Path("is_slow").touch()
        time.sleep(3)

SamplingProgress.advance = slowly

def reward(completions, **_):
    return [len(set(completion)) / 40 for completion in completions]

grader = GRADERS.build("compatible")
"""


class Program(Marked):
    """A recipe in a process of its own, which samples slowly where `slow` says."""

    def __init__(self, folder: Path, recipe: Path, *arguments: str, slow: str = "") -> None:
        super().__init__()
        self.folder, self.said = folder, folder / "said.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(recipe), *arguments], cwd=folder, stdout=said, stderr=subprocess.STDOUT,
                env={**environment_of_ranks(), **self.environment, "SLOW": slow}, start_new_session=True,
            )  # fmt: skip

    def printed(self) -> str:
        return self.said.read_text(errors="replace")

    def told_to_stop(self) -> int:
        """Its exit status, after SIGTERM came when it was sampling slowly."""
        wait_for(lambda: (self.folder / "is_slow").exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.printed()[-3000:]
        self.process.terminate()
        wait_for(lambda: "stopped by SIGTERM" in self.printed(), SECONDS)
        return self.process.wait(TO_EXIT)


@contextlib.contextmanager
def program(folder: Path, recipe: Path, *arguments: str, slow: str = "") -> Iterator[Program]:
    folder.mkdir(exist_ok=True)
    with ended(Program(folder, recipe, *arguments, slow=slow)) as run:
        yield run


class Runs:
    """A run of four steps in epochs of two, told to stop here and there, and the same run left alone."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
        (folder / "slow.py").write_text(SLOW)
        given = {
            **TINY_RUN, "model_name_or_path": str(policy), "train_problems": 8, "validate_every": 2, "bf16": False,
            "sampling_max_tokens": 40, "sampling_min_tokens": 30, "save_strategy": "steps", "save_steps": 100,
            "reward": f"{folder / 'slow.py'}:reward", "validation_grader": f"{folder / 'slow.py'}:grader",
            "learning_rate": 0.01, "warmup_steps": 0, **settings,
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(given))
        self.arguments = ("--config", str(folder / "run.yaml"), "--output_dir", "run", "--resume", "auto")
        with program(folder / "whole", RECIPE, *self.arguments) as run:
            assert run.process.wait(200) == 0, run.printed()[-3000:]

    def check(self, slow: str, step: int, owes_validation: bool = False) -> None:
        """The run that was told to stop after this step resumes to the same end."""
        cut = self.folder / slow.replace(" ", "_")
        with program(cut, RECIPE, *self.arguments, slow=slow) as run:
            assert run.told_to_stop() == 128 + signal.SIGTERM, run.printed()[-3000:]
            assert f"stopped by SIGTERM after step {step}; the run is in run up to checkpoint-{step}" in run.printed()
        (checkpoint,) = checkpoints(cut / "run")
        assert find_corruption(checkpoint) is None
        record = record_in(checkpoint)
        assert record is not None
        assert record["owes_validation"] is owes_validation
        with program(cut, RECIPE, *self.arguments) as run:
            assert run.process.wait(200) == 0, run.printed()[-3000:]
        assert (cut / "run" / "model.safetensors").read_bytes() == self.weights()
        assert logged(cut) == logged(self.folder / "whole")

    def weights(self) -> bytes:
        return (self.folder / "whole" / "run" / "model.safetensors").read_bytes()


def logged(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in the order of steps, but for seconds and the totals of a process."""
    kept = [
        {name: value for name, value in row.items() if not any(word in name for word in ("time", "second", "clock"))}
        for row in rows(folder / "run" / "metrics.jsonl")
        if "train_loss" not in row
    ]
    return sorted(kept, key=lambda row: (row["step"], json.dumps(row, sort_keys=True)))


@pytest.fixture(scope="module")
def by_hf_generate(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("hf"), use_vllm="false")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "step", "owes_validation"),
    [
        ("rollout after step 3", 3, False),
        pytest.param("rollout after step 2", 2, False, marks=pytest.mark.nightly),
        ("validation after step 2", 2, True),
    ],
    ids=["in an epoch", "at the start of an epoch", "validation"],
)
def test_sigterm_ends_sampling_by_hf_generate_and_run_resumes(
    by_hf_generate: Runs, slow: str, step: int, owes_validation: bool
) -> None:
    by_hf_generate.check(slow, step, owes_validation)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_sigterm_ends_a_rollout_by_vllm_and_run_resumes(tmp_path: Path) -> None:
    runs = Runs(tmp_path, use_vllm="true", vllm_enforce_eager=True)
    runs.check("rollout after step 3", 3)


@pytest.mark.nightly
@pytest.mark.slow
def test_sigterm_in_first_validation_ends_run_without_checkpoint(by_hf_generate: Runs, tmp_path: Path) -> None:
    with program(tmp_path, RECIPE, *by_hf_generate.arguments, slow="validation after step 0") as run:
        assert run.told_to_stop() == 128 + signal.SIGTERM, run.printed()[-3000:]
    assert "stopped by SIGTERM after step 0; partial output is in run" in run.printed()
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["false", pytest.param("true", marks=(pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)))]
)
def test_sigterm_in_an_evaluation_keeps_graded_samples(engine: str, by_hf_generate: Runs, tmp_path: Path) -> None:
    recipe, given = RECIPE.with_name("evaluate.py"), yaml.safe_load((by_hf_generate.folder / "run.yaml").read_text())
    arguments = [
        "--model_name_or_path", given["model_name_or_path"], "--grader", given["validation_grader"], "--problems", "6",
        "--batch_size", "4", "--max_tokens", "30", "--min_tokens", "30", "--use_vllm", engine, "--output_dir", "run",
        "--vllm_enforce_eager", "true",
    ]  # fmt: skip
    (tmp_path / "cut").mkdir()
    # The first batch has 120 tokens, so that the second one is slow.
    (by_hf_generate.folder / "slow.py").write_text(SLOW.replace("> 40", "> 130"))
    with program(tmp_path / "cut", recipe, *arguments, slow="sampling") as run:
        assert run.told_to_stop() == 128 + signal.SIGTERM, run.printed()[-3000:]
    assert "stopped by SIGTERM; 4 graded samples are in run; the same command" in run.printed()
    for folder in (tmp_path / "cut", tmp_path / "whole"):
        with program(folder, recipe, *arguments) as run:
            assert run.process.wait(200) == 0, run.printed()[-3000:]
    assert rows(tmp_path / "cut" / "run" / "samples.jsonl") == rows(tmp_path / "whole" / "run" / "samples.jsonl")


# --- the request itself -----------------------------------------------------------------------------------------


def test_handler_raises_only_while_an_engine_samples() -> None:
    request, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    done: list[str] = []
    with request.listening():
        os.kill(os.getpid(), signal.SIGTERM)  # not listened for by an engine: noted
        assert request.received
    assert signal.getsignal(signal.SIGTERM) == before
    request = StopRequest()
    with request.listening(), request.ending_sampling():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        began = time.monotonic()
        with pytest.raises(SamplingStopped), sampling():
            time.sleep(20)  # a pass over long prompts
        assert time.monotonic() - began < SECONDS
        with pytest.raises(SamplingStopped), sampling():  # the next engine's call does not begin
            done.append("sampled")
        with to_the_end(), sampling():
            advance(1)
            done.append("to the end")
        os.kill(os.getpid(), signal.SIGTERM)  # again, in the midst of saving: only noted
    with sampling():
        advance(1)
    assert done == ["to the end"]


def test_request_lost_by_a_handler_is_found_after_the_token() -> None:
    request = StopRequest()
    with request.ending_sampling():
        stop_if_told()
        request.received = True  # as where the handler's exception came in a `__del__`
        with pytest.raises(SamplingStopped):
            advance(1)
