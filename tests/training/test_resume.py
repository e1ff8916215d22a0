"""A resumed run is the run that was never interrupted, bit-identically: metrics, rollouts, weights, optimizer."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.recipes.test_grpo import ROOT
from tests.support.tiny import ends_early, make_trainer, prompts, save_tiny, tiny_model, tiny_sft, weight_difference
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import NotSavedError, ServerError
from trl_ext.hosts.shutdown_timeout import TIMEOUT
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer
from trl_ext.runs.checkpoints import checkpoints, find_corruption, newest
from trl_ext.training.preemption import StopOnSigterm
from trl_ext.training.stopping import TimeBasedLRDecay, TimeBudget

STEPS = 7
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS, "optim": "adamw_torch", "learning_rate": 0.01}
OFF_POLICY = {"steps_per_generation": 8, "num_iterations": 2}  # four optimizer steps per rollout
OF_KINDS = Dataset.from_list([{**row, "subject": "ab"[i % 2], "level": 1 + i % 3} for i, row in enumerate(prompts())])
RUNS: dict[str, dict[str, Any]] = {
    "on_policy": {"preset": "grpo_clip"},
    "in_the_middle_of_a_rollout": {"preset": "grpo_clip", **OFF_POLICY},
    "between_two_logs": {"preset": "grpo_clip", "logging_steps": 3, "log_completions": True, **OFF_POLICY},
    "over_epochs": {"preset": "dr_grpo", "train_dataset": prompts(8)},
    "over_epochs_off_policy": {"preset": "dapo", "train_dataset": prompts(8), **OFF_POLICY},
    "plain_batches": {
        "preset": "grpo_clip", "skip_zero_advantage_rows": False, "dynamic_micro_batches": False, "reuse_log_probs": False,
        **OFF_POLICY,
    },
    "decaying_schedule": {"preset": "rloo", "lr_scheduler_type": "cosine", "warmup_steps": 2},
    "kl_penalty": {"preset": "grpo_clip", "beta": 0.1, **OFF_POLICY},
    "trls_loss": {**OFF_POLICY},
    "dynamic_sampling": {"preset": "grpo_clip", "dynamic_sampling_tries": 3, "train_dataset": OF_KINDS, **OFF_POLICY},
    "per_token": {"preset": "grpo_clip", "advantage": "discounted", **OFF_POLICY},
    "adaptive_entropy": {
        "preset": "grpo_clip", "use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.1, **OFF_POLICY,
    },
    "settled_problems": {"preset": "grpo_clip", "uninformative_keep_prob": 0.1, "train_dataset": OF_KINDS, **OFF_POLICY},
}  # fmt: skip
SECONDS = (
    "step_time",
    "rollout_time",
    "sync_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def history(trainer: Any) -> str:
    """Everything logged but seconds, as text, in which NaN equals NaN."""
    return json.dumps(
        [{k: v for k, v in e.items() if k not in SECONDS} for e in trainer.state.log_history], sort_keys=True
    )


def made(path: Path, reward: Any = ends_early, **settings: Any) -> Any:
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, reward, **{**SAVING, **settings})


def assert_same_end(first: Any, second: Any) -> None:
    assert history(first) == history(second)
    assert weight_difference(first.model, second.model) == 0
    assert first.last_rollout == second.last_rollout
    states = [trainer.optimizer.state_dict()["state"] for trainer in (first, second)]
    for name, state in states[0].items():
        assert all(torch.equal(value, states[1][name][key]) for key, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_resumed_after_any_step_a_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    settings = {"model": str(save_tiny(tmp_path / "tiny")), **RUNS[name]}
    whole = made(tmp_path / "whole", **settings)
    whole.train()
    steps = range(1, STEPS + 1) if name in ("in_the_middle_of_a_rollout", "over_epochs_off_policy") else (5, STEPS)
    for step in steps:
        again = made(tmp_path / f"from_{step}", **settings)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same_end(whole, again)


@pytest.mark.slow
def test_run_resumed_within_a_rollout_is_bit_identical(tmp_path: Path) -> None:
    settings = {**RUNS["between_two_logs"], "max_steps": 4}
    whole = made(tmp_path / "whole", **settings)
    whole.train()
    assert len({json.dumps(row["response"]) for row in whole.last_rollout}) > 4
    again = made(tmp_path / "again", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_end(whole, again)


@pytest.mark.slow
def test_resumed_run_has_uninterrupted_choices_and_rates(tmp_path: Path) -> None:
    class Tick(TrainerCallback):
        """10 s a step; resumed, a run's clock continues."""

        def __init__(self, now: float) -> None:
            self.now = now

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.now += 10.0

        def seconds(self) -> float:
            return self.now

    def decaying(name: str, now: float) -> Any:
        trainer, clock = made(tmp_path / name, **RUNS["settled_problems"], max_steps=6), Tick(now)
        limit = TimeBudget(trainer, cast(Any, clock), 100.0)
        for callback in (clock, limit, TimeBasedLRDecay(limit, 1.0)):
            trainer.add_callback(callback)
        return trainer

    whole, again = decaying("whole", 0.0), decaying("again", 30.0)
    whole.train()
    assert not all(whole._problems.curriculum.informative.values())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert_same_end(whole, again)
    assert again._problems.curriculum.state_dict() == whole._problems.curriculum.state_dict()
    rates = [entry["learning_rate"] for entry in again.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01, 0.01, 0.009, 0.008, 0.007, 0.006])


@pytest.mark.slow
def test_a_resumed_adapter_is_bit_identical(tmp_path: Path) -> None:
    def lora(path: Path) -> Any:
        adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return made(path, peft_config=adapter, preset="grpo_clip", model=base, **OFF_POLICY)

    base = str(save_tiny(tmp_path / "base"))  # an adapter remembers where its model is

    whole, again = lora(tmp_path / "whole"), lora(tmp_path / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert_same_end(whole, again)


@pytest.mark.slow
def test_an_adapter_trained_further_resumes_bit_identically(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    model.peft_config["default"].base_model_name_or_path = str(save_tiny(tmp_path / "base"))
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    model.save_pretrained(tmp_path / "adapter")

    def further(path: Path) -> Any:
        settings = {"preset": "grpo_clip", "beta": 0.1, **OFF_POLICY}  # the reference is the adapter as it was
        return made(path, model=str(tmp_path / "adapter"), **settings)

    whole, again = further(tmp_path / "whole"), further(tmp_path / "again")
    assert set(whole.model.peft_config) == {"default", "ref"}
    assert weight_difference(whole.model, again.model) == 0
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert_same_end(whole, again)
    again.save_final_model()
    again.save_final_model()  # into a folder that has all of it
    saved = load_file(tmp_path / "again" / "adapter_model.safetensors")
    trained = again.model.base_model.model.model.norm.modules_to_save.default.weight
    assert saved["base_model.model.model.norm.weight"].equal(trained.data)
    assert not (tmp_path / "again" / "ref").exists()


@pytest.mark.slow
def test_a_stock_checkpoint_resumes_here_and_ours_in_stock_trl(tmp_path: Path) -> None:
    def trained(trainer_class: Any, config_class: Any, path: Path, resume: Path | None = None) -> Any:
        trainer = make_trainer(trainer_class, config_class, path, ends_early, **SAVING)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return trainer

    stock = trained(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    ours = trained(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "ours")
    taken_over = trained(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "a", tmp_path / "stock" / "checkpoint-3")
    given_back = trained(GRPOTrainer, GRPOConfig, tmp_path / "b", tmp_path / "ours" / "checkpoint-3")
    for trainer in (taken_over, given_back):  # without axes and on-policy all four are one run
        assert weight_difference(stock.model, trainer.model) == 0
        assert trainer.state.global_step == STEPS
    assert weight_difference(stock.model, ours.model) == 0


@pytest.mark.slow
def test_stock_checkpoint_within_a_rollout_gets_a_new_rollout(
    tmp_path: Path,
) -> None:
    settings = {**SAVING, **OFF_POLICY, "max_steps": 3}
    make_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock", ends_early, **settings).train()
    ours = made(tmp_path / "ours", preset="grpo_clip", **OFF_POLICY, max_steps=5)
    ours.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-3"))
    assert ours._step == 5 * 4
    assert ours._step % 16 == 4  # the rollout that follows began where an uninterrupted run begins it


@pytest.mark.slow
def test_checkpoint_within_a_rollout_resumes_with_new_batching(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"preset": "grpo_clip", "model": str(save_tiny(tmp_path / "tiny")), **OFF_POLICY, "max_steps": 1}
    made(tmp_path / "first", **settings).train()
    other = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    again = made(tmp_path / "again", **{**settings, **other, "max_steps": 3})
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert again.state.global_step == 3
    assert "within a rollout of 8 micro-batches of 4 rows, now there are 4 of 8" in caplog.text


@pytest.mark.slow
def test_checkpoint_of_other_micro_batches_gets_a_new_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else a row would be trained on with another one's old log-probabilities."""
    settings = {"preset": "grpo_clip", "model": str(save_tiny(tmp_path / "tiny")), **OFF_POLICY}
    made(tmp_path / "first", **settings, max_steps=1).train()
    again = made(tmp_path / "again", **settings, max_steps=2, dynamic_micro_batches=False, share_prompt_prefix=False)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert again.state.global_step == 2
    assert "the checkpoint's steps were planned otherwise: the remaining ones use a new rollout" in caplog.text


@pytest.mark.slow
def test_how_long_a_checkpoint_takes_is_known_to_a_resumed_run(tmp_path: Path) -> None:
    whole, again = (made(tmp_path / name, max_steps=1) for name in ("whole", "again"))
    whole.seconds_to_save = 1000.0
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert again.seconds_to_save == 1000.0


# --- what is kept, and when saving goes wrong -------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_are_whole_and_limited_in_number_plus_best(tmp_path: Path) -> None:
    trainer = made(tmp_path, preset="grpo_clip", save_total_limit=2)
    trainer.best_step = 2
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-7", "checkpoint-6", "checkpoint-2"]
    assert all(find_corruption(path) is None for path in checkpoints(tmp_path))
    assert not list(tmp_path.glob("_saving*"))


@pytest.mark.slow
def test_lost_server_leaves_the_state_before_the_step(tmp_path: Path) -> None:
    trainer = made(tmp_path, preset="grpo_clip", max_steps=1, save_steps=100)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-1")  # of the end of the training

    def lose() -> None:
        trainer.skipped_steps = 9  # as a step that has begun changes the state
        raise ServerError("lost")

    with pytest.raises(ServerError, match="lost"), trainer.saving_last_step():
        lose()
    assert find_corruption(tmp_path / "checkpoint-1") is None
    saved = torch.load(tmp_path / "checkpoint-1" / "trl_ext_0.pt", weights_only=True)
    assert saved["skipped_steps"] == 0


@pytest.mark.slow
def test_trainers_own_best_model_is_found_at_the_end(tmp_path: Path) -> None:
    judged = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": prompts(4), "num_generations_eval": 4}
    judged |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "save_total_limit": 1}
    trainer = made(tmp_path, preset="grpo_clip", max_steps=5, per_device_eval_batch_size=4, **judged)
    trainer.train()
    best = trainer.state.best_global_step
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    weights = trainer.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in saved.items())


@pytest.mark.slow
def test_unwritable_checkpoint_costs_neither_run_nor_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = made(tmp_path / "whole", preset="grpo_clip")
    whole.train()
    save = torch.save
    files = []

    def full(value: Any, path: Any, **kwargs: Any) -> None:
        files.append(path)
        if "checkpoint-3" in str(path):
            raise OSError(28, "No space left on device")
        save(value, path, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    trainer = made(tmp_path / "run", preset="grpo_clip")
    trainer.train()
    assert any("checkpoint-3" in str(path) for path in files)
    assert trainer.failed_saves == 1
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"checkpoint-{i}" for i in (7, 6, 5, 4, 2, 1)]
    words = ("no checkpoint at step 3", "No space left on device", "checkpoint-2", "--save_total_limit")
    assert all(word in caplog.text for word in words)
    assert weight_difference(whole.model, trainer.model) == 0


@pytest.mark.slow
def test_no_checkpoint_is_started_without_disk_space_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(path: Any) -> Any:
        return usage._replace(free=1000)

    trainer = made(tmp_path, preset="grpo_clip")
    monkeypatch.setattr("trl_ext.training.faults.shutil.disk_usage", nearly_full)
    trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]  # of whose size nothing was known
    assert trainer.failed_saves == STEPS - 1
    assert "1e-06 GB free" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "is_warning"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), True),
        (TypeError("Object of type device is not JSON serializable"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (RuntimeError("some tensors share memory"), False),
    ],
    ids=["quota", "safetensors", "torch", "type", "file", "other"],
)
def test_only_disk_faults_let_a_run_continue_uncheckpointed(
    error: Exception, is_warning: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = made(tmp_path, preset="grpo_clip", max_steps=1)

    def fail() -> dict[str, Any]:
        raise error

    trainer.run_record = fail
    if is_warning:
        trainer.train()
        assert str(error) in caplog.text
    else:
        with pytest.raises(type(error)) as raised:
            trainer.train()
        assert raised.value is error
    assert (trainer.failed_saves, checkpoints(tmp_path)) == (int(is_warning), [])


FULL = """
import resource, sys
from tests.training.test_resume import made
from pathlib import Path
trainer = made(Path(sys.argv[1]), preset="grpo_clip")
save = trainer._save_checkpoint
def limited(*args):
    if trainer.state.global_step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    save(*args)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trainer._save_checkpoint = limited
trainer.train()
print("failed", trainer.failed_saves)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_disk_refusing_writes_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert "failed 1" in done.stdout
    assert "no checkpoint at step 3" in done.stderr
    assert [path.name for path in checkpoints(tmp_path)] == [f"checkpoint-{i}" for i in (7, 6, 5, 4, 2, 1)]
    assert newest(tmp_path) == (tmp_path / "checkpoint-7", [])


@pytest.mark.moderate
def test_trained_model_is_whole_or_error_names_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path, preset="grpo_clip", max_steps=1)
    trainer.train()
    trainer.save_final_model()
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "checkpoint-1" / "model.safetensors").read_bytes()
    assert not (tmp_path / "_saving").exists()

    def full(folder: str, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_model", full)
    with pytest.raises(NotSavedError, match=r"No space left on device.*last checkpoint is .*checkpoint-1; make room"):
        trainer.save_final_model()
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "_saving").exists()


class CountingEngine:
    """An engine that only counts how often it was given the weights."""

    seconds_syncing = 0.0
    syncs = 0

    def sync_weights(self) -> None:
        self.syncs += 1

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        return None, [[9, 1] for _ in prompts], [[[0.0], [0.0]] for _ in prompts], None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_engine_gets_best_weights_before_the_last_validation(method: str, tmp_path: Path) -> None:
    rows = [{"input_ids": [9, 7, 10, 8, 3, 1], "completion_mask": [0, 0, 0, 0, 1, 1]}] * 8
    sft = functools.partial(tiny_sft, ExtSFTTrainer, ExtSFTConfig, rows=rows, **SAVING)
    trainer = made(path=tmp_path) if method == "grpo" else sft(path=tmp_path)
    trainer.train()
    trainer.use_vllm, trainer.vllm_generation = True, CountingEngine()
    trainer.invalidate_engine_weights()  # a new engine has none
    for syncs in (1, 1):  # no step in between
        trainer.completion_ids(["9 + 0 ="])
        assert trainer.vllm_generation.syncs == syncs
    trainer.restore_weights(tmp_path / "checkpoint-2")
    trainer.completion_ids(["9 + 0 ="])
    assert trainer.vllm_generation.syncs == 2


# --- a run that is told to stop ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_and_resumes_identically(tmp_path: Path) -> None:
    calls: list[int] = []

    def told_to_stop(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return ends_early(completions)

    told_to_stop.__name__ = "ends_early"
    settings = {"preset": "grpo_clip", "save_steps": 100, "logging_steps": 2, **OFF_POLICY}
    whole = made(tmp_path / "whole", **settings)  # which seeds the generator that it then trains with
    whole.train()
    stopped = made(tmp_path / "run", told_to_stop, **settings)
    before = signal.getsignal(signal.SIGTERM)
    with stopped.stopping_on_sigterm():
        stopped.train()
    assert signal.getsignal(signal.SIGTERM) == before
    assert (stopped.stop_signal, stopped.state.global_step) == (signal.SIGTERM, 5)  # the second rollout's first step
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-5"]
    again = made(tmp_path / "run", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert_same_end(whole, again)


@pytest.mark.parametrize(
    ("allowed", "launched", "needed", "is_said"),
    [(None, True, 33.0, True), ("30", True, 33.0, True), ("34", True, 33.0, False), (None, False, 33.0, False),
     (None, True, 29.0, False)],
    ids=["torchs own 30 s", "as little", "longer", "no launcher", "a quick one"],
)  # fmt: skip
def test_checkpoint_slower_than_the_launcher_warns_once(
    allowed: str | None, launched: bool, needed: float, is_said: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv(TIMEOUT, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in ((TIMEOUT, allowed), ("TORCHELASTIC_RUN_ID", "none" if launched else None)):
        if value is not None:
            monkeypatch.setenv(name, value)
    accelerator = SimpleNamespace(device="cpu", is_main_process=True, gather=lambda mine: mine)
    trainer = SimpleNamespace(seconds_to_save=0.0, accelerator=accelerator)
    listener, now = StopOnSigterm(trainer), [100.0]
    monkeypatch.setattr("trl_ext.training.preemption.time", SimpleNamespace(monotonic=lambda: now[0]))
    for seconds in (0.0, 3.0, 2.0):  # between two looks; nothing was saved so far
        now[0] += seconds
        listener.has_come()
    assert caplog.text == ""
    trainer.seconds_to_save = needed - 3.0
    listener.has_come()
    listener.has_come()
    assert caplog.text.count(f"Set {TIMEOUT}=120 where the launcher is started") == is_said
    assert (f"up to {needed:.0f} s, and torch's launcher kills its processes after 30 s" in caplog.text) is is_said
