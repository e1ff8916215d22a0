"""A stored result is shown or continued only for the weights, tokenizer, rows and settings that it was made from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.recipes.test_grpo import SMALL
from tests.support.tiny import WORDS, save_tiny, tiny_tokenizer
from trl_ext.errors import InputError
from trl_ext.io import digest_of_files, read_jsonl, write_jsonl
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.best_of_n import BestOfN, run_best_of_n
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.runs.fingerprint import fingerprint_of_model
from trl_ext.runs.resume import SettingsKnowledge, differences
from trl_ext.tools.experiments.pipeline.record import load_or_create, write_record
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage
from trl_ext.tools.experiments.sweep import run_all

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
    tiny_tokenizer(WORDS[:-1]).save_pretrained(folder / "model")  # with its additional word as many as the model has
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


@pytest.mark.slow
def test_evaluation_is_not_shown_or_continued_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (change, words) in CHANGES.items():
        for kind in (Evaluation, BestOfN) if name in ("weights", "an answer") else (Evaluation,):
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


@pytest.mark.slow
def test_samples_of_another_model_are_not_taken_over(tmp_path: Path) -> None:
    folder = inputs(tmp_path)
    run_evaluation(settings(folder))
    exchange_weights(folder / "model")
    more = {"samples": 2, "at": [1, 2], "first_from": str(folder / "run"), "output_dir": str(tmp_path / "other")}
    with pytest.raises(InputError, match=r"run holds a finished evaluation.* its weights differs from"):
        run_best_of_n(settings(folder, BestOfN, **more))
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_place_of_a_model_is_not_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same files in a folder of another name: nothing is measured again, and a run is resumed."""
    folder = inputs(tmp_path)
    run_evaluation(settings(folder))
    (folder / "model").rename(folder / "moved")
    moved = str(folder / "moved") + "/"
    shown = dataclasses.replace(settings(folder), model_name_or_path=moved)
    capsys.readouterr()
    run_evaluation(shown)
    assert "shown, not measured again" in capsys.readouterr().out
    more = {"samples": 2, "at": [1, 2], "first_from": str(folder / "run"), "output_dir": str(tmp_path / "other")}
    run_best_of_n(dataclasses.replace(settings(folder, BestOfN, **more), model_name_or_path=moved))
    before = {"policy": "a", "model_name_or_path": "a", "policy_is": fingerprint_of_model(moved)}
    now = {**before, "policy": moved, "model_name_or_path": moved}
    known = SettingsKnowledge.of(GRPO_SETTINGS)
    assert differences(before, now, known) == []
    assert len(differences({**before, "policy_is": {"weights": "others"}}, now, known)) == 3
    assert len(differences({**before, "policy_is": None}, {**now, "policy_is": None}, known)) == 2
    exchange_weights(folder / "moved")
    with pytest.raises(InputError, match="its weights differs from what is there now"):
        run_evaluation(shown)


@pytest.mark.parametrize("named", ["/", "base", "~/base"], ids=["absolute", "relative", "home"])
def test_an_adapters_fingerprint_is_its_models_too(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)  # another place than the run's
    base, adapter = save_tiny(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    config = {"base_model_name_or_path": str(base) if named == "/" else named, "revision": None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))

    def changed(change: Callable[[], object]) -> set[str]:
        before = fingerprint_of_model(str(adapter))
        assert fingerprint_of_model(str(adapter)) == before
        change()
        after = fingerprint_of_model(str(adapter))
        return {name for name in after if before[name] != after[name]}

    assert changed(lambda: exchange_weights(base)) == {"weights"}
    assert changed(lambda: edit(base / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1')) == {
        "configuration"
    }
    assert changed(lambda: edit(base / "tokenizer.json", '"stop"', '"step"')) == {"tokenizer"}
    assert changed(lambda: tiny_tokenizer().save_pretrained(adapter)) == {"tokenizer"}
    assert changed(lambda: edit(base / "tokenizer.json", '"step"', '"stop"')) == set()  # it has its own now


def test_every_byte_of_large_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_ext.io._PART", 1000)
    data, found = bytearray(2500), set()
    for place in (None, 0, 999, 1000, 1999, 2000, 2499):
        if place is not None:
            data[place] += 1
        (tmp_path / "model.safetensors").write_bytes(data)
        found.add(digest_of_files([tmp_path / "model.safetensors"]))
    assert len(found) == 7


def test_training_state_and_logs_are_no_part_of_a_model(tmp_path: Path) -> None:
    before = fingerprint_of_model(str(save_tiny(tmp_path)))
    for name in ("training_args.bin", "optimizer.bin", "summary.json", "metrics.jsonl", "trl_ext_0.pt"):
        (tmp_path / name).write_text("later")
    assert fingerprint_of_model(str(tmp_path)) == before


def test_finished_stage_is_not_skipped_for_other_files(tmp_path: Path) -> None:
    folder, runs = inputs(tmp_path), tmp_path / "runs"
    (tmp_path / "stage.yaml").write_text(f"dataset: {folder}/{{split}}.jsonl\noutput_dir: {folder}/model\n")
    stage = {
        "recipe": "grpo",
        "config": str(tmp_path / "stage.yaml"),
        "settings": {"reward": f"{folder}/grade.py:mine"},
    }

    def pipeline(model: str | None = None) -> Pipeline:
        return Pipeline(stages=[Stage(**stage)], output_dir=str(runs), model_name_or_path=model)  # type: ignore[arg-type]

    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "validation.jsonl", ROWS)
    runs.mkdir()
    write_record(runs, load_or_create(runs, pipeline()) | {"1_grpo": {"seconds": 3.0}})
    exchange_weights(folder / "model")  # which is named as a place to write to only
    assert load_or_create(runs, pipeline())["1_grpo"] == {"seconds": 3.0}
    for path in (folder / "validation.jsonl", folder / "grade.py"):
        before = path.read_text()
        path.write_text(before + "\n")
        named = "split" if path.suffix == ".jsonl" else "mine"
        with pytest.raises(InputError, match=rf"the finished stage 1_grpo, and .*{named}.* changed"):
            load_or_create(runs, pipeline())
        path.write_text(before)
    assert load_or_create(runs, pipeline())["1_grpo"] == {"seconds": 3.0}


def test_finished_run_of_a_sweep_is_not_taken_for_other_files(tmp_path: Path) -> None:
    folder = inputs(tmp_path)
    (tmp_path / "recipe.py").write_text(
        "import os, sys\nfolder = sys.argv[-1]\nos.makedirs(folder)\nopen(f'{folder}/summary.json', 'w').write('{}')\n"
    )
    script = str(tmp_path / "recipe.py")
    commands = {"a": [script, "--model_name_or_path", str(folder / "model")], "b": [script]}
    run_all(commands, tmp_path / "runs")
    run_all(commands, tmp_path / "runs")
    exchange_weights(folder / "model")
    with pytest.raises(InputError, match=r"runs/a is finished, and .*model changed since it began"):
        run_all(commands, tmp_path / "runs")
    run_all({"b": commands["b"]}, tmp_path / "runs")


@pytest.mark.moderate
def test_changed_base_policy_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(SMALL, steps=1)
    first = make_base_policy(0, tmp_path, config, progress=False)
    before = fingerprint_of_model(str(first))
    assert make_base_policy(0, tmp_path, config, progress=False) == first
    assert "made again" not in capsys.readouterr().out
    exchange_weights(first)
    assert fingerprint_of_model(str(first)) != before
    assert make_base_policy(0, tmp_path, config, progress=False) == first
    assert "is not what was made there: it is made again" in capsys.readouterr().out
    assert fingerprint_of_model(str(first)) == before


def test_run_is_not_resumed_on_another_model(tmp_path: Path) -> None:
    known = SettingsKnowledge.of(GRPO_SETTINGS)
    before = {"policy": str(save_tiny(tmp_path)), "policy_is": fingerprint_of_model(str(tmp_path))}
    exchange_weights(tmp_path)
    now = {**before, "policy_is": fingerprint_of_model(str(tmp_path))}
    assert [difference.name for difference in differences(before, now, known)] == ["policy_is"]
    assert differences({"policy": before["policy"]}, now, known) == []  # of an earlier version
