"""The main recipe under `accelerate launch`: every configuration that runs on a CPU, both engines, and faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.grpo.test_distributed import by_accelerate, environment_of_ranks
from tests.recipes.test_grpo import RECIPE, ROOT, SMALL, TINY_RUN, rows
from tests.recipes.test_sft_and_pipeline import SMALL_EI
from tests.support.launch import Marked, ended, wait_for
from trl_ext.mini.policy import make_base_policy
from trl_ext.runs.checkpoints import checkpoints, find_corruption, step_of

TWO_RANKS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("two_cpu*.yaml"))
LAUNCHES = [(config, engine) for config in ["one_cpu", *TWO_RANKS] for engine in ("generate", "vllm")]
LAUNCHES.remove(("one_cpu", "generate"))  # test_recipe.py
# The one that does all at once; what ranks and engines compute is held exactly by tests/grpo/test_distributed.py and
# tests/generation/test_vllm.py.
EACH_PUSH = ("two_cpu_ranks_zero3", "vllm")
VLLM = ["--use_vllm", "--vllm_max_model_length", "128", "--vllm_enforce_eager", "true"]
A_MINUTE = 60


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML file for a run of four small steps."""
    folder = tmp_path_factory.mktemp("launch")
    policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**TINY_RUN, "model_name_or_path": str(policy)}))
    return path


class Launch(Marked):
    """A recipe being run."""

    def __init__(self, folder: Path, config: str, *arguments: str, recipe: Path = RECIPE) -> None:
        super().__init__()
        launcher = by_accelerate(config)
        environment = {**environment_of_ranks(), **self.environment}
        self.said = folder / "said.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *launcher, str(recipe), *arguments, "--output_dir", str(folder / "run")],
                cwd=folder, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 200) -> int:
        return self.process.wait(seconds)

    def printed(self) -> str:
        return self.said.read_text(errors="replace")


@contextlib.contextmanager
def launched(folder: Path, config: str, *arguments: str, recipe: Path = RECIPE) -> Iterator[Launch]:
    with ended(Launch(folder, config, *arguments, recipe=recipe)) as run:
        yield run


def steps(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    return [row["step"] for row in rows(path) if "loss" in row] if path.exists() else []


@pytest.mark.nightly
@pytest.mark.distributed
def test_expert_iteration_runs_on_two_ranks_under_zero3(settings: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(settings.read_text())["model_name_or_path"]
    grader = {"validation_grader": f"{ROOT / 'tests' / 'recipes' / 'test_sft_and_pipeline.py'}:anything"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**SMALL_EI, **grader, "model_name_or_path": model}))
    script = RECIPE.with_name("expert_iteration.py")
    with launched(tmp_path, "two_cpu_ranks_zero3", "--config", "small.yaml", recipe=script) as run:
        assert run.wait() == 0, run.printed()[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["hardware"]["processes"] == 2
    assert steps(tmp_path) == list(range(1, summary["validations"][-1]["step"] + 1))
    assert len(steps(tmp_path)) >= 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("config", "engine"),
    [
        pytest.param(
            *launch,
            marks=[
                *([pytest.mark.vllm] if launch[1] == "vllm" else []),
                *([] if launch == EACH_PUSH else [pytest.mark.nightly]),
            ],
        )
        for launch in LAUNCHES
    ],
)
def test_the_main_recipe_runs(config: str, engine: str, settings: Path, tmp_path: Path) -> None:
    with launched(tmp_path, config, "--config", str(settings), *(VLLM if engine == "vllm" else [])) as run:
        assert run.wait() == 0, run.printed()[-3000:]
    folder = tmp_path / "run"
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert all(row["grad_norm"] >= 0 for row in rows(folder / "metrics.jsonl") if "loss" in row)
    logged = rows(folder / "metrics.jsonl")
    assert any(row.get("sync_time", 0) > 0 for row in logged) is (engine == "vllm")
    assert ("rollouts by colocated vLLM: as asked for" in run.printed()) is (engine == "vllm")
    assert ("rollouts by HF generate: there is no GPU" in run.printed()) is (engine == "generate")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["hardware"]["processes"] == (1 if config == "one_cpu" else 2)
    assert (folder / "model.safetensors").stat().st_size > 10_000
    assert not run.alive()


# --- faults -----------------------------------------------------------------------------------------------------


def breaking(folder: Path, how: str) -> str:
    """A user's own reward that goes wrong on the second rank, in the third rollout."""
    (folder / "mine.py").write_text(
        "import os, signal, time\n"
        "calls = []\n"
        "def reward(completions, **_):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3 and os.environ['RANK'] == '1':\n"
        f"        {how}\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    return f"{folder / 'mine.py'}:reward"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("config", "how", "words"),
    [
        (
            "two_cpu_ranks_zero3",
            "raise LookupError('no such thing')",
            ["LookupError: no such thing", "mine.py"],
        ),
        pytest.param(
            "two_cpu_ranks_ddp", "os.kill(os.getpid(), signal.SIGKILL)", ["SIGKILL"], marks=pytest.mark.nightly
        ),
    ],
    ids=["raises", "killed"],
)
def test_dead_rank_ends_the_other_and_the_first_is_reported(
    config: str, how: str, words: list[str], settings: Path, tmp_path: Path
) -> None:
    arguments = ["--config", str(settings), "--reward", breaking(tmp_path, how)]
    with launched(tmp_path, config, *arguments) as run:
        wait_for(lambda: steps(tmp_path) or run.process.poll() is not None)
        assert run.wait(A_MINUTE) != 0
        assert not run.alive()
    cause = run.printed().partition("Root Cause")[2]
    assert all(word in cause for word in words), cause
    assert re.search(r"on rank 1|rank +: 1", cause)  # of the same second, either rank can be the first
    assert "error_file: <N/A>" not in cause or "SIGKILL" in words
    assert steps(tmp_path) == [1, 2]


@pytest.mark.nightly
@pytest.mark.distributed
def test_ctrl_c_ends_both_ranks_and_leaves_whole_files(settings: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(settings), "--max_steps", "100000", "--log_generations_every", "1"]
    with launched(tmp_path, "two_cpu_ranks_ddp", *arguments) as run:
        wait_for(lambda: len(steps(tmp_path)) > 3)
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
        assert run.wait(A_MINUTE) != 0
        wait_for(lambda: not run.alive(), A_MINUTE)
    folder = tmp_path / "run"
    assert len(steps(tmp_path)) > 3
    assert len(rows(folder / "generations.jsonl")) > 3
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 100000
    assert {path.name for path in folder.iterdir()} == {
        "_in_use", "config.yaml", "resolved.json", "metrics.jsonl", "generations.jsonl",
    }  # fmt: skip
    assert "interrupted; partial output is in" in run.printed()


@pytest.mark.distributed
def test_sigterm_saves_a_checkpoint_on_two_ranks_and_run_resumes(settings: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(settings), "--lr_scheduler_type", "constant", "--resume", "auto", "--max_steps"]
    with launched(tmp_path, "two_cpu_ranks_ddp", *arguments, "100000") as run:
        wait_for(lambda: len(steps(tmp_path)) > 3)
        run.process.terminate()  # what a scheduler does
        assert run.wait(A_MINUTE) != 0
        wait_for(lambda: not run.alive(), A_MINUTE)
    (checkpoint,) = checkpoints(tmp_path / "run")
    assert find_corruption(checkpoint) is None
    assert steps(tmp_path)[-1] == step_of(checkpoint)
    assert "stopped by SIGTERM after step" in run.printed()
    more = step_of(checkpoint) + 2
    with launched(tmp_path, "two_cpu_ranks_ddp", *arguments, str(more)) as run:
        assert run.wait() == 0, run.printed()[-3000:]
    assert steps(tmp_path) == [*range(1, more + 1)]


SLOW_SAVING = """
import time
from trl_ext.training import trainer
write = trainer.write_manifest
def slowly(*arguments):
    time.sleep(6)
    write(*arguments)
trainer.write_manifest = slowly
def reward(completions, **_):
    return [float(len(c)) for c in completions]
"""


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize(("allowed", "survives"), [("3", False), ("60", True)])
def test_slow_checkpoint_survives_sigterm_if_the_launcher_waits(
    allowed: str, survives: bool, settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(SLOW_SAVING)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", allowed)
    saving = ["--save_strategy", "steps", "--save_steps", "3", "--max_steps", "100000"]
    arguments = ["--config", str(settings), "--reward", f"{tmp_path / 'mine.py'}:reward", *saving]
    with launched(tmp_path, "two_cpu_ranks_ddp", *arguments) as run:
        wait_for(lambda: len(steps(tmp_path)) > 3)
        run.process.terminate()
        assert run.wait(A_MINUTE) != 0
        wait_for(lambda: not run.alive(), A_MINUTE)
    saved = [step_of(path) for path in checkpoints(tmp_path / "run")]
    assert all(find_corruption(path) is None for path in checkpoints(tmp_path / "run"))
    assert saved[-1] == 3
    assert (saved[0] == steps(tmp_path)[-1] > 3) is survives
    assert ("stopped by SIGTERM after step" in run.printed()) is survives
    assert ("Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in run.printed()) is not survives


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.vllm
def test_engine_start_failure_names_setting_and_ends_processes(settings: Path, tmp_path: Path) -> None:
    too_long = ["--use_vllm", "--vllm_max_model_length", "100000"]
    with launched(tmp_path, "two_cpu_ranks_zero2", "--config", str(settings), *too_long) as run:
        assert run.wait() != 0
        wait_for(lambda: not run.alive(), A_MINUTE)
    assert "vLLM did not start" in run.printed()
    assert "lower vllm_max_model_length" in run.printed()
