"""What may go wrong while a run trains: each fault is caused here, and the run reports it and loses nothing."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, RECIPE, ROOT
from tests.support.tiny import ends_early, make_trainer, tiny_model, tiny_tokenizer
from tests.training.test_resume import SAVING, made
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.recipes.cli import is_out_of_memory, parse, start
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.preflight import check_tokenizer
from trl_ext.rewards.guard import RewardError, guarded
from trl_ext.runs.checkpoints import checkpoints, find_corruption
from trl_ext.training.callbacks import ZeroVarianceWarning
from trl_ext.training.faults import NonFiniteError


def test_guard_leaves_a_reward_that_answers_as_it_is() -> None:
    @lambda function: guarded(function, 5.0)
    def mine(prompts: Any, completions: Any, **_: Any) -> list[float | None]:
        return [1.0, None, True, torch.tensor(0.5)][: len(completions)]

    assert mine.__name__ == "mine"
    assert mine(prompts=["p"] * 4, completions=["c"] * 4) == [1.0, None, True, torch.tensor(0.5)]
    assert mine(["p"], ["c"]) == [1.0]


# --- rewards ----------------------------------------------------------------------------------------------------


def raises(completions: list[str], **_: Any) -> list[float]:
    raise LookupError("no such thing")


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def no_list(completions: list[str], **_: Any) -> Any:
    return 1.0


def no_number(completions: list[str], **_: Any) -> list[Any]:
    return [0.0, "good", *completions[2:]]


def hangs(completions: list[str], **_: Any) -> list[float]:
    time.sleep(1000)
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (raises, "reward 'raises' raised LookupError: no such thing"),
        (too_few, "reward 'too_few' returned 15 rewards for 16 completions"),
        (no_list, "reward 'no_list' returned 1.0, not a list of 16 rewards"),
        (no_number, "reward 'no_number' returned 'good' for completion 1, not a number or None"),
        (hangs, "reward 'hangs' took longer than 0.5 s for 16 completions .--reward_timeout"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_faulty_reward_function_is_named_and_checkpoint_is_kept(reward: Any, words: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def from_the_third_on(completions: list[str], **kwargs: Any) -> Any:
        calls.append(1)
        return reward(completions=completions) if len(calls) > 2 else ends_early(completions)

    from_the_third_on.__name__ = reward.__name__
    trainer = made(tmp_path, from_the_third_on, preset="grpo_clip", reward_timeout=0.5)
    with pytest.raises(RewardError, match=words):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]
    assert all(find_corruption(path) is None for path in checkpoints(tmp_path))


def test_reward_times_out_as_configured_and_handler_is_restored() -> None:
    began, handler = time.monotonic(), signal.getsignal(signal.SIGURG)
    with pytest.raises(RewardError, match=r"took longer than 0.2 s for 1 completions"):
        guarded(hangs, 0.2)(prompts=["p"], completions=["c"])
    assert 0.2 <= time.monotonic() - began < 1.9
    assert signal.getsignal(signal.SIGURG) is handler


def test_rewards_that_are_all_equal_for_long_are_warned_about(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"), TrainerControl()
    callback = ZeroVarianceWarning(patience=3)
    state = TrainerState(is_world_process_zero=True)

    def logged(*fractions: float) -> int:
        caplog.clear()
        for fraction in fractions:
            callback.on_log(args, state, control, logs={"frac_reward_zero_std": fraction, "reward": 0.0})
            callback.on_log(args, state, control, logs={"validation/accuracy": 0.5})
        return len(caplog.records)

    with caplog.at_level(logging.WARNING):
        assert logged(1.0, 1.0, 0.9, 1.0, 1.0) == 0
        assert logged(1.0) == 1
        assert "equal for 3 logged steps (mean reward 0)" in caplog.text
        for hint in ("generations.jsonl", "rewards/format_reward", "--sampling_temperature", "--group_size"):
            assert hint in caplog.text
        assert logged(1.0, 1.0) == 0
        assert logged(1.0) == 1  # and again


# --- gradients that are not finite ------------------------------------------------------------------------------


def explodes(at: set[int]) -> Any:
    """A reward that is infinite for one row of those rollouts."""
    calls: list[int] = []

    def ends_early_or_infinite(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        rewards = ends_early(completions)
        return [math.inf, *rewards[1:]] if len(calls) in at else rewards

    return ends_early_or_infinite


@pytest.mark.slow
def test_step_with_infinite_gradient_is_skipped_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"preset": "grpo_clip", "advantage": "raw"}
    trainer = made(tmp_path, explodes({3}), **settings)
    trainer.train()
    weights = [torch.load(path / "optimizer.pt")["state"][0] for path in reversed(checkpoints(tmp_path))]
    assert torch.equal(weights[1]["exp_avg"], weights[2]["exp_avg"])  # the third step changed nothing
    assert not torch.equal(weights[2]["exp_avg"], weights[3]["exp_avg"])
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert (trainer.skipped_steps, trainer.skipped_in_a_row) == (1, 0)
    report = json.loads((tmp_path / "nonfinite_step_3_rank_0.json").read_text())
    assert (report["step"], len(report["rows"])) == (3, 16)
    assert report["rows"][0]["reward"] == math.inf
    assert report["parameters"]
    assert {"prompt", "response", "ground_truth", "rewards"} <= set(report["rows"][0])
    logged = [entry.get("skipped_steps") for entry in trainer.state.log_history]
    assert logged[:4] == [None, None, 1, None]
    assert "step 3 is skipped" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("source", ["group_std", "batch_std", "max_rl", "own"])
def test_nonfinite_reward_or_advantage_skips_the_step_by_name(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "own.py"
    file.write_text("def centered(reward):\n    return reward * float('nan')\n")
    advantage, reward = (f"{file}:centered", ends_early) if source == "own" else (source, explodes({1}))
    trainer = made(tmp_path, reward, preset="grpo_clip", advantage=advantage, max_steps=1)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert trainer.skipped_steps == 1
    assert all(map(torch.equal, before, trainer.model.parameters()))
    words = "advantage '.*:centered' is not finite" if source == "own" else "reward 'ends_early_or_infinite' is not"
    assert re.search(rf"step 1 is skipped: its gradient has norm nan, because {words}.* of 16 completions", caplog.text)


@pytest.mark.slow
def test_too_many_skipped_steps_end_run_with_checkpoints_intact(tmp_path: Path) -> None:
    trainer = made(tmp_path, explodes({2, 3, 5, 6, 7}), preset="grpo_clip", advantage="raw", max_steps=20)
    with pytest.raises(NonFiniteError, match=r"3 optimizer steps in a row, up to step 7, .*nonfinite_step_7_rank_0"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)][:1] == ["checkpoint-6"]
    assert trainer.skipped_steps == 5


@pytest.mark.slow
def test_the_count_of_steps_left_out_survives_an_interruption(tmp_path: Path) -> None:
    made(tmp_path, explodes({2}), preset="grpo_clip", advantage="raw", max_steps=3).train()
    again = made(tmp_path, preset="grpo_clip", advantage="raw", max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.skipped_steps == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_nonfinite_steps": 0}, "max_nonfinite_steps must be at least 1, got 0"),
        ({"reward_timeout": 0}, "reward_timeout must be positive seconds, got 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **{**SAVING, **settings})


# --- model and tokenizer ----------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_not_the_models_is_refused() -> None:
    shape, tokenizer = tiny_model().config, tiny_tokenizer()
    with pytest.raises(
        ValueError, match=r"token id 18 \('abcdef'\) is outside the model's vocabulary \(size 18\): tokenizer and model"
    ):
        check_tokenizer(tokenizer, shape, "a/model", None)
    shape.vocab_size = 19
    check_tokenizer(tokenizer, shape, "a/model", None)
    tokenizer.pad_token = None
    check_tokenizer(tokenizer, shape, "a/model", None)  # TRL pads with EOS
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no EOS token, .*give --stop"):
        check_tokenizer(tokenizer, shape, "a/model", None)
    with pytest.raises(ValueError, match="neither a pad nor an EOS token"):
        check_tokenizer(tokenizer, shape, "a/model", ["stop"])


# --- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


def test_an_error_that_is_none_of_memory_is_not_called_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(sys, "argv", ["grpo_math.py", "--output_dir", str(tmp_path)])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))  # a launcher of several ranks sets it
    with pytest.raises(SystemExit) as ended:  # this file is nobody's of the project: a fault of the user's own
        start(fail, GRPO_SETTINGS, "about", DEFAULT)
    reported = json.loads((tmp_path / "error.json").read_text())["message"]
    assert reported["message"] == "RuntimeError: size mismatch"
    assert "in fail" in reported["extraInfo"]["py_callstack"]
    assert "error: RuntimeError: size mismatch" in str(ended.value.code)
    assert "memory" not in str(ended.value.code).splitlines()[-1]


LITTLE_MEMORY = """
import resource, runpy, sys
import trl_ext.recipes.run
import matplotlib.pyplot
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 400 * 2**20
train = trl_ext.recipes.run.RecipeRun.train
def train_with_little(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    train(*args, **kwargs)
trl_ext.recipes.run.RecipeRun.train = train_with_little
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce the limit")
def test_out_of_memory_names_the_settings_to_lower(tmp_path: Path) -> None:
    """A real allocation that is refused, in a process whose address space is limited."""
    wide = ["--rollout_batch_size", "8192", "--train_batch_size", "8192", "--micro_train_batch_size", "8192"]
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, str(RECIPE), *wide, *ON_A_CPU, "--validation_problems", "8"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    said = next(line for line in done.stderr.splitlines() if "error: out of memory." in line)
    for setting in ("--micro_train_batch_size", "--sampling_max_tokens", "--vllm_gpu_memory_utilization"):
        assert setting in said
    assert list((tmp_path / "runs" / "grpo_math").glob("config.yaml"))


@pytest.mark.moderate
def test_the_settings_named_exist() -> None:
    _, _, config = parse(GRPO_SETTINGS, "about", DEFAULT, ON_A_CPU)
    for name in ("micro_train_batch_size", "sampling_max_tokens", "vllm_gpu_memory_utilization", "max_nonfinite_steps"):
        assert hasattr(config, name)
