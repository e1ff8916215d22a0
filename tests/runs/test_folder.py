"""A run's folder: one run at a time, refusals before anything is touched, and what a resumed run finds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trl import GRPOConfig

from tests.recipes.test_grpo import DEFAULT, ON_A_CPU
from tests.runs.test_checkpoints import save
from trl_ext.errors import InputError
from trl_ext.evaluation.validation_conditions import validation_conditions
from trl_ext.recipes.cli import parse
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS as EXPERIMENT
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.sft import SFT_SETTINGS
from trl_ext.runs.checkpoints import write_manifest
from trl_ext.runs.clock import Clock
from trl_ext.runs.folder import Run, lock, next_free_folder, open_run
from trl_ext.runs.layout import RUN_RECORD
from trl_ext.runs.resume import SettingsKnowledge, cut_logs, differences, find_checkpoint, settings_of
from trl_ext.setting import OnResume, facts

KNOWN = SettingsKnowledge.of(GRPO_SETTINGS)
SETTINGS = {
    "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 10, "validated_on": "x",
    "validation_grader": "compatible", "validation_temperature": 1.0, "validation_max_tokens": 8,
    "validation_problems": 4, "validation_split": "validation",
}  # fmt: skip


def loadable(checkpoint: Path) -> Path:
    """With what a run needs to continue, in place of texts."""
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trl_ext_0.pt", "trl_ext_1.pt"):
        torch.save({}, checkpoint / name)
    write_manifest(checkpoint, 2)
    return checkpoint


def a_run(folder: Path, steps: int = 4, **record: Any) -> Path:
    """A folder with logs and a checkpoint; returns the checkpoint."""
    folder.mkdir(parents=True)
    for name in ("metrics.jsonl", "generations.jsonl"):
        (folder / name).write_text("".join(json.dumps({"step": i}) + "\n" for i in range(steps)))
    sizes = {name: (folder / name).stat().st_size for name in ("metrics.jsonl", "generations.jsonl")}
    checkpoint = loadable(save(folder, steps))
    kept = {"settings": SETTINGS, "wall_clock_s": 100.0, "validations": [{"step": 0}], "logs": sizes, **record}
    (checkpoint / RUN_RECORD).write_text(json.dumps(kept))
    return checkpoint


def opened(output: Path, resume: str | None = None, changed: bool = False, **settings: Any) -> tuple[Run, list[str]]:
    said: list[str] = []
    with (
        patch("trl_ext.runs.folder.print_line", said.append),
        open_run(output, {**SETTINGS, **settings}, KNOWN, resume, changed) as run,
    ):
        return run, said


def test_a_folder_that_holds_a_run_is_not_written_to_by_another(tmp_path: Path) -> None:
    assert opened(tmp_path / "run")[0].folder == tmp_path / "run"
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    a_run(tmp_path / "run-2")
    assert opened(tmp_path / "run")[0].folder == tmp_path / "run-3"


@pytest.mark.slow
def test_two_runs_started_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time; from filelock import FileLock\n"
            "os.mkdir(sys.argv[1]); held = FileLock(sys.argv[1] + '/_in_use'); held.acquire()\n"
            "print(sys.argv[1], flush=True); time.sleep(100)",
            str(tmp_path / "run"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == str(tmp_path / "run")
        folder, held = next_free_folder(tmp_path / "run")
        held.release()
        assert folder == tmp_path / "run-2"
        with pytest.raises(InputError, match=r"run' is in use by another run.*--output_dir"):
            lock(tmp_path / "run")
    finally:
        holder.kill()
        holder.wait()
    lock(tmp_path / "run").release()  # however it ended, the folder is free again


@pytest.mark.parametrize("resume", [None, "auto"])
def test_open_run_holds_its_folder(resume: str | None, tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    with open_run(tmp_path / "run", SETTINGS, KNOWN, resume, False) as run, pytest.raises(InputError, match="in use"):
        lock(run.folder)
    lock(run.folder).release()


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_that_cannot_be_written_is_refused(resume: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=r"cannot be written .*choose another --output_dir"):
        opened(tmp_path / "file" / "run", resume)


def test_auto_resumes_from_newest_intact_checkpoint_in_folder(tmp_path: Path) -> None:
    checkpoint = a_run(tmp_path / "run")
    torn = save(tmp_path / "run", 9)
    (torn / "model.safetensors").write_bytes(b"")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7}\n{"st')
    run, said = opened(tmp_path / "run", "auto")
    assert (run.folder, run.checkpoint) == (tmp_path / "run", checkpoint)
    assert run.validations == [{"step": 0}]
    assert run.clock.spent == 100.0
    assert [line.partition(" ")[0] for line in said] == ["skipped", "resumed"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    assert not torn.exists()


def test_a_resumed_run_counts_its_zero_variance_steps_further(tmp_path: Path) -> None:
    kept = Run(tmp_path, {}, zero_variance_steps=7).record()
    a_run(tmp_path / "run", without_spread=kept["without_spread"])
    assert opened(tmp_path / "run", "auto")[0].zero_variance_steps == 7


def test_a_resumed_run_knows_what_its_base_policy_took(tmp_path: Path) -> None:
    kept = Run(tmp_path, {}, seconds_to_make_policy=40.0).record()
    a_run(tmp_path / "run", seconds_to_make_policy=kept["seconds_to_make_policy"])
    run = opened(tmp_path / "run", "auto")[0]
    assert (run.seconds_to_make_policy, run.zero_variance_steps) == (40.0, 0)


def test_auto_without_a_checkpoint_is_a_fresh_run_and_says_so(tmp_path: Path) -> None:
    run, said = opened(tmp_path / "run", "auto")
    assert run.checkpoint is None
    assert said == [f"nothing to resume in {tmp_path / 'run'}: a fresh run"]


def test_missing_or_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = a_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"no such folder.*checkpoint-4.*--resume auto"):
        find_checkpoint(str(tmp_path / "run" / "checkpoint-5"), tmp_path / "run")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model.safetensors is missing.*--resume auto"):
        find_checkpoint(str(checkpoint), tmp_path / "run")


def test_changed_experiment_is_refused_with_its_differences(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"learning_rate: was 0.1, is 0.2[\s\S]*--resume_changed"):
        opened(tmp_path / "run", "auto", learning_rate=0.2, save_steps=7)
    assert opened(tmp_path / "run", "auto", changed=True, learning_rate=0.2)[0].checkpoint is not None


def test_changed_measurement_discards_earlier_validations(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"validation_temperature: was 1.0, is 0.0[\s\S]*--resume_changed"):
        opened(tmp_path / "run", "auto", validation_temperature=0.0)
    run, _ = opened(tmp_path / "run", "auto", changed=True, learning_rate=0.2)
    assert run.validations == [{"step": 0}]
    run, said = opened(tmp_path / "run", "auto", changed=True, validation_temperature=0.0)
    assert run.validations == []
    assert "validation_temperature" in said[0]
    assert "measured again" in said[0]


def test_validation_settings_are_recorded_as_used() -> None:
    def noted(*more: str, answer: str = "1") -> dict[str, Any]:
        task, _, config = parse(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, *more])
        return validation_conditions(task, config, [{"prompt": "1 + 0 =", "answer": answer}])

    plain = noted("--sampling_temperature", "0.5", "--sampling_max_tokens", "9")
    assert plain == noted("--validation_temperature", "0.5", "--validation_max_tokens", "9")
    assert (plain["validation_temperature"], plain["validation_max_tokens"]) == (0.5, 9)
    assert plain["validation_problems"] == 1
    assert plain != noted("--sampling_temperature", "0.5", "--sampling_max_tokens", "9", answer="2")


def test_checkpoint_of_the_model_alone_is_refused_or_asked_for(tmp_path: Path) -> None:
    checkpoint = a_run(tmp_path / "run")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (checkpoint / name).unlink()
    write_manifest(checkpoint, 2)
    with pytest.raises(InputError, match=r"no optimizer\.pt.*save_only_model\. Ask for that with --resume_changed, or"):
        opened(tmp_path / "run", "auto")
    assert opened(tmp_path / "run", "auto", changed=True)[0].checkpoint == checkpoint


def test_a_stock_checkpoint_resumes_in_a_new_folder(tmp_path: Path) -> None:
    stock = loadable(save(tmp_path / "stock", 3))
    run, said = opened(tmp_path / "run", str(stock))
    assert (run.folder, run.checkpoint, run.validations) == (tmp_path / "run", stock, [])
    assert "stock TRL" in said[0]


@pytest.mark.parametrize(
    ("changed", "differ"),
    [
        ({"max_steps": 20}, []),
        ({"max_steps": 20, "lr_scheduler_type": "cosine"}, ["lr_scheduler_type", "max_steps"]),
        ({"validate_every": 3, "save_steps": 5, "logging_steps": 7, "report_to": "wandb", "hub_model_id": "me/x"}, []),
        ({"beta": 0.1}, ["beta"]),
        ({"too_long": "refuse", "sample_seed": 0, "problems_are": "the first rows"}, []),
        ({"problems_are": "a stratified sample"}, ["problems_are"]),
        ({"validation_batch_size": 3, "final_validation_problems": 9}, []),
        ({"validation_grader": "strict", "validated_on": "y"}, ["validated_on", "validation_grader"]),
        (
            {"validation_temperature": 0.0, "validation_max_tokens": 9},
            ["validation_max_tokens", "validation_temperature"],
        ),
        ({"validation_problems": 9, "validation_split": "test"}, ["validation_problems", "validation_split"]),
    ],
    ids=[
        "longer",
        "another schedule's end",
        "bookkeeping",
        "another loss",
        "of a version before",
        "other rows",
        "the end's validation",
        "grader",
        "sampling",
        "problems",
    ],
)
def test_what_makes_another_experiment(changed: dict[str, Any], differ: list[str]) -> None:
    assert [found.name for found in differences(SETTINGS, {**SETTINGS, **changed}, KNOWN)] == differ


@pytest.mark.parametrize("recipe", [GRPO_SETTINGS, SFT_SETTINGS, EXPERIMENT], ids=["grpo", "sft", "expert iteration"])
def test_setting_added_later_does_not_refuse_a_checkpoint(recipe: tuple[type, ...]) -> None:
    known = SettingsKnowledge.of(recipe)
    means_nothing = {OnResume.MAY_CHANGE, OnResume.OF_PROCESS, OnResume.VALIDATION_AS_USED}
    for name, default in known.defaults.items():  # a record without it: that version did not have it
        assert differences({}, {name: default}, known) == []
        if known.meaning.get(name) not in means_nothing:
            (found,) = differences({}, {name: "another"}, known)
            assert found[:3] == (name, default, "another")


def test_a_run_of_version_0_2_resumes_without_its_foresee(tmp_path: Path) -> None:
    checkpoint = a_run(tmp_path / "run", settings={**SETTINGS, "foresee": "auto"})
    run, said = opened(tmp_path / "run", "auto", check_memory="false")
    assert (run.checkpoint, run.folder) == (checkpoint, tmp_path / "run")
    assert not any("foresee" in line for line in said)


def test_policy_rebuilt_elsewhere_is_equal_and_another_is_not(tmp_path: Path) -> None:
    first, again, another = ({"policy": str(tmp_path / name)} for name in ("first", "again", "another"))
    for settings, weights in ((first, "w"), (again, "w"), (another, "v")):
        folder = Path(settings["policy"])
        folder.mkdir()
        (folder / "model.safetensors").write_text(weights)
        (folder / "recipe.json").write_text(folder.name)
    assert differences({**SETTINGS, **first}, {**SETTINGS, **again}, KNOWN) == []
    for other in (another, {"policy": str(tmp_path / "removed")}):
        assert [found.name for found in differences({**SETTINGS, **first}, {**SETTINGS, **other}, KNOWN)] == ["policy"]
    (Path(again["policy"]) / "more.json").write_text("{}")
    assert differences({**SETTINGS, **first}, {**SETTINGS, **again}, KNOWN) != []


def test_what_may_change_when_a_run_is_resumed() -> None:
    """Of all settings of a GRPO run; each of the project's own says so at its field."""
    names = {f.name for part in GRPO_SETTINGS for f in dataclasses.fields(part)}
    free = {name for name in names if not differences({name: "a"}, {name: "b"}, KNOWN)}
    theirs = {f.name for f in dataclasses.fields(GRPOConfig)}
    ours = free - theirs
    said = {name: value for part in GRPO_SETTINGS for name, value in facts(part, lambda known: known.on_resume).items()}
    assert ours == {name for name in said if said[name] in (OnResume.MAY_CHANGE, OnResume.OF_PROCESS)} - theirs
    assert ours >= {
        "answer_column", "answer_source", "problem_column",  # the rows that they give are compared
        "check_memory", "collapse_threshold", "final_validation_problems", "hub_merge_adapter", "log_generations_every",
        "max_nonfinite_steps", "restore_best", "resume", "resume_changed", "reward_timeout",
        "stop_after_zero_variance_steps", "target_accuracy", "time_budget", "validate_every", "validation_batch_size",
    }  # fmt: skip
    assert free - ours > {"output_dir", "save_steps", "report_to", "vllm_gpu_memory_utilization", "hub_model_id"}
    assert not free & {"beta", "learning_rate", "seed", "max_steps", "skip_zero_advantage_rows"}
    longer = {"lr_scheduler_type": "constant", "max_steps": 1, "n_grpo_steps": 1, "num_train_epochs": 1.0}
    assert differences({**longer, "max_steps": 2, "n_grpo_steps": 2, "num_train_epochs": 2.0}, longer, KNOWN) == []
    of_validation = {found.name for found in differences(dict.fromkeys(names, "a"), dict.fromkeys(names, "b"), KNOWN)
                     if found.is_of_validation}  # fmt: skip
    assert of_validation == {
        "answer_format", "generation_kwargs", "min_p", "prompt", "repetition_penalty", "sampling_min_tokens", "stop",
        "system_prompt", "top_k", "top_p", "validation_grader", "validation_max_tokens", "validation_problems", "validation_split",
        "validation_samples", "validation_temperature",
    }  # fmt: skip


def test_every_setting_is_compared_and_no_token_is_kept() -> None:
    parts = parse(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, "--hub_token", "hf_secret"])
    settings = settings_of(parts, policy="p")
    assert "hf_secret" not in json.dumps(settings)
    assert {"dataset", "model_name_or_path", "beta", "stop", "policy"} <= set(settings)
    assert differences(settings, json.loads(json.dumps(settings)), KNOWN) == []
    again = settings_of(parse(GRPO_SETTINGS, "about", DEFAULT, [*ON_A_CPU, "--preset", "dapo"]), policy="p")
    assert {"preset", "policy_loss_options"} <= {found.name for found in differences(settings, again, KNOWN)}


def test_logs_are_cut_only_where_they_are_longer(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n")
    cut_logs(tmp_path, {"metrics.jsonl": 4, "generations.jsonl": 9})
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"
    cut_logs(tmp_path, {"metrics.jsonl": 40})
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"


def test_the_clock_continues_from_what_was_used() -> None:
    first = Clock(50.0)
    before = first.seconds()
    time.sleep(0.05)
    assert 0.04 < first.seconds() - before < 5
    assert 49 < before - Clock().seconds() + 0.1 < 51
