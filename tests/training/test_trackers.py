"""What a run sends to TensorBoard, wandb and trackio, read back from the files that they have written."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, integration_utils

from tests.support.tiny import ends_early, make_trainer, prompts, tiny_sft
from tests.support.tiny import tiny_tokenizer as tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer, tokenized
from trl_ext.io import read_jsonl
from trl_ext.rewards.graders import Grade
from trl_ext.runs.folder import Run
from trl_ext.training.callbacks import GenerationsLog, Validation
from trl_ext.training.trackers import send_summary, send_table, tracker_runs_ended, trackers_last

FIGURES = {"step", "accuracy", "format_rate", "mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect",
           "entropy_estimate", "seconds"}  # fmt: skip
SUMMARY = {"validation_accuracy_after": 0.25, "ended_early": "collapse", "validations": [1, 2]}
TRACES = [{"prompt": f"{i % 9} + 1 =", "response": "a b"} for i in range(8)]


def some_correct(responses: Any, answers: Any) -> list[Grade]:
    return [Grade(i > 2, None, i % 4 == 3, "") for i, _ in enumerate(responses)]


def validated(path: Path, trainer: Any) -> Run:
    """A training of three steps that is validated before the first and after the second one and at the end.

    Of the first step's rollout two rows are logged, and in the end the summary.
    """
    run, sampling = Run(path, {}), {"batch_size": 16, "seed": 0}
    is_due = lambda state: state.global_step == 2  # noqa: E731
    trainer.add_callback(Validation(list(prompts()), some_correct, is_due, sampling, run, trainer))
    trainer.add_callback(GenerationsLog(path / "generations.jsonl", 100, trainer, rows=2))
    with tracker_runs_ended():
        trainer.train()
        send_summary(trainer, SUMMARY)
    return run


def grpo(path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(path / "events"))
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, ends_early, preset="grpo_clip", report_to=tracker)


def sft(path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(path / "events"))
    rows = tokenized(TRACES, tokenizer())[0]
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, rows, report_to=tracker, sampling_max_tokens=12)


@pytest.mark.moderate
@pytest.mark.parametrize("make", [grpo, sft])
def test_tensorboard_has_every_figure_of_every_validation(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = validated(tmp_path, make(tmp_path, "tensorboard", monkeypatch))
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    tags = {tag for tag in found.Tags()["scalars"] if tag.startswith("validation/")}
    assert tags == {f"validation/{name}" for name in FIGURES}
    for name in ("accuracy", "mean_tokens", "mean_tokens_correct", "mean_tokens_incorrect", "entropy_estimate"):
        drawn = [(event.step, event.value) for event in found.Scalars(f"validation/{name}")]
        assert drawn == [(entry["step"], pytest.approx(entry[name])) for entry in run.validations]
    assert [event.value for event in found.Scalars("validation/step")] == [0, 2, 3]
    assert [event.value for event in found.Scalars("validation/format_rate")] == pytest.approx([13 / 16] * 3)
    assert all(0.5 < entry["entropy_estimate"] < 3 for entry in run.validations)


def texts(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Step and text of every text of TensorBoard, by name."""
    found = EventAccumulator(str(path), size_guidance={"tensors": 0}).Reload()
    return {
        tag.removesuffix("/text_summary"): [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(tag)]
        for tag in found.Tags()["tensors"]
    }


@pytest.mark.moderate
def test_tensorboard_has_sections_the_rollouts_and_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = grpo(tmp_path, "tensorboard", monkeypatch)
    validated(tmp_path, trainer)
    scalars = EventAccumulator(str(tmp_path / "events")).Reload().Tags()["scalars"]
    assert {"train/loss", "train/reward", "train/completions/mean_length", "train/entropy"} <= set(scalars)
    assert {"sampling/entropy_estimate", "step/rows_trained"} <= set(scalars)
    assert not [name for name in scalars if name.startswith(("train/sampling/entropy", "train/step/"))]
    found = texts(tmp_path / "events")
    ((step, table),) = found["rollouts"]
    logged = read_jsonl(tmp_path / "generations.jsonl")
    assert (step, len(logged)) == (1, 2)
    head, _, *lines = table.splitlines()
    assert head.startswith("| response | ground_truth |")
    assert "rewards/ends_early" in head
    assert [line.removeprefix("| ").split(" | ")[0] for line in lines] == [f"` {row['response']} `" for row in logged]
    assert [step for step, _ in found["validation/responses"]] == [0, 2, 3]
    summary = {name: found.get(name) for name in scalars + list(found) if name.startswith("summary/")}
    assert summary == {"summary/validation_accuracy_after": None, "summary/ended_early": [(3, "collapse")]}
    writers = [c.tb_writer for c in trainer.callback_handler.callbacks if isinstance(c, TensorBoardCallback)]
    assert writers == [None]  # else its thread would stay


def test_names_of_ours_keep_their_section_and_trls_get_train() -> None:
    ours = (
        "validation/accuracy",
        "sampling/chi_square",
        "step/rows_trained",
        "dynamic_sampling/tries",
        "grader/timeouts",
    )
    trls = ("loss", "completions/mean_length", "sampling/importance_sampling_ratio/min", "eval_reward")
    sent = integration_utils.rewrite_logs(dict.fromkeys((*ours, *trls), 1.0))
    assert set(sent) == {*ours, *(f"train/{name}" for name in trls[:3]), "eval/reward"}


@pytest.mark.parametrize(
    ("value", "cell"),
    [("</think> 5", "` </think> 5 `"), ("a`b\nc", "`` a`b ↵ c ``"), (0.123456, "0.1235"), (None, ""), (True, "True")],
)
def test_a_responses_markup_is_shown_and_not_interpreted(value: object, cell: str) -> None:
    sent: list[tuple[str, str, int]] = []
    callback = TensorBoardCallback(SimpleNamespace(add_text=lambda *given: sent.append(given), flush=lambda: None))
    send_table([callback], "rollouts", [{"step": 9, "response": value, "per_token": {}, "rewards": {"mine": 1}}], 4)
    assert sent == [("rollouts", f"| response | rewards/mine | prompt |\n|---|---|---|\n| {cell} | 1 |  |", 4)]


def test_trackers_end_their_runs_after_the_final_validation() -> None:
    tracker, other = TensorBoardCallback(SimpleNamespace()), TrainerCallback()
    callbacks = [tracker, other]
    with trackers_last(callbacks):
        assert callbacks == [other, tracker]
    assert callbacks == [tracker, other]  # for another training, which they begin first


def records_of(folder: Path) -> list[Any]:
    """What stands in the only offline run of wandb, in its order: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("*.wandb")
    data, place, found, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no header begins that near to a block's end
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def by_key(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def test_an_offline_run_of_wandb_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = validated(tmp_path, grpo(tmp_path, "wandb", monkeypatch))
    assert wandb.run is None  # another run of this process begins its own
    wandb.teardown()  # its own process writes what it still holds
    records = records_of(tmp_path)
    history = [by_key(record.history.item) for record in records if record.HasField("history")]
    assert [row["train/global_step"] for row in history if "train/reward" in row] == [1, 2, 3]
    drawn = [(row["validation/step"], row["validation/accuracy"]) for row in history if "validation/accuracy" in row]
    assert drawn == [(entry["step"], entry["accuracy"]) for entry in run.validations]
    assert all(
        {f"validation/{name}" for name in FIGURES} <= set(row) for row in history if "validation/accuracy" in row
    )
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert (axes["validation/*"], axes["*"]) == ("validation/step", "train/global_step")
    (table,) = [row for row in history if "rollouts/path" in row]
    assert (table["rollouts/_type"], table["rollouts/nrows"]) == ("table-file", 2)
    (file,) = tmp_path.rglob(Path(table["rollouts/path"]).name)
    shown = json.loads(file.read_text())
    place = shown["columns"].index("response")
    assert [row[place] for row in shown["data"]] == [r["response"] for r in read_jsonl(tmp_path / "generations.jsonl")]
    (last,) = [row for row in history if "summary/ended_early" in row]  # wandb's summary is each name's last value
    assert (last["summary/ended_early"], last["summary/validation_accuracy_after"]) == ("collapse", 0.25)


def test_the_projects_file_of_trackio_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    trainer = grpo(tmp_path, "trackio", monkeypatch)
    trainer.args.run_name = (
        "mine"  # as a recipe has it: the final validation comes after transformers has ended the run
    )
    run = validated(tmp_path, trainer)
    assert trackio.context_vars.current_run.get() is None
    assert trackio.sqlite_storage.SQLiteStorage.get_runs("huggingface") == ["mine"]
    logged = trackio.sqlite_storage.SQLiteStorage.get_logs("huggingface", "mine")
    drawn = [(row["validation/step"], row["validation/accuracy"]) for row in logged if "validation/accuracy" in row]
    assert drawn == [(entry["step"], entry["accuracy"]) for entry in run.validations]
    assert [row["train/global_step"] for row in logged if "train/reward" in row] == [1, 2, 3]
    (table,) = [row["rollouts"] for row in logged if "rollouts" in row]
    texts = [row["response"] for row in read_jsonl(tmp_path / "generations.jsonl")]
    assert [row["response"] for row in table["_value"]] == texts
    assert {row["step"] for row in logged if "train/loss" in row} == {1, 2, 3}  # and not the number of logs
    assert [
        row["summary/validation_accuracy_after"] for row in logged if "summary/validation_accuracy_after" in row
    ] == [0.25]
