"""Every kind of folder that a user may name as a model: what is loaded for it, or why it is refused and what to give."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trl_ext.errors import InputError
from trl_ext.generation import model_source
from trl_ext.generation.model_source import ModelSource, locate
from trl_ext.runs.layout import RESOLVED

BASE = "the/base"


def filled(folder: Path, **files: object) -> Path:
    """A folder with these files, `__` for a dot and `_slash_` for a folder; a mapping is written as JSON."""
    for name, content in files.items():
        path = folder / name.replace("_slash_", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def whole(folder: Path) -> Path:
    return filled(folder, config__json={}, model__safetensors="", tokenizer__json="")


def adapter(folder: Path, base: object = BASE, **more: object) -> Path:
    settings = {"peft_type": "LORA", "base_model_name_or_path": base, **more}
    return filled(folder, adapter_config__json=settings, adapter_model__safetensors="")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    whole(tmp_path / BASE)
    return Path()


def test_every_folder_with_a_model_is_located(here: Path) -> None:
    whole(here / "full")
    sharded = whole(here / "sharded")
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00001.safetensors")
    filled(sharded, model__safetensors__index__json={"weight_map": {"a": "model-00001-of-00001.safetensors"}})
    filled(here / "old", config__json={}, pytorch_model__bin="")
    filled(whole(here / "full/checkpoint-60"), zero_to_fp32__py="")  # DeepSpeed's files next to whole weights
    run = filled(adapter(here / "lora"), resolved__json={"dtype": "bfloat16"})
    adapter(run / "checkpoint-3")
    filled(adapter(here / "own_tokenizer"), tokenizer_config__json={})
    filled(adapter(here / "with_config"), config__json={}, training_args__bin="")  # no weights but the adapter's
    filled(here / "bin", adapter_config__json={"base_model_name_or_path": BASE}, adapter_model__bin="")
    adapter(here / "of_the_hub", "org/model", revision="v2")
    adapter(here / "else/where/lora", "the/base")
    assert model_source._RESOLVED == RESOLVED
    for name in ("full", "sharded", "old", "full/checkpoint-60"):
        assert locate(name) == ModelSource(name, name, name)
    expected = {
        "lora": ModelSource("lora", BASE, BASE, run, dtype="bfloat16"),
        "lora/checkpoint-3": ModelSource("lora/checkpoint-3", BASE, BASE, run / "checkpoint-3", dtype="bfloat16"),
        "own_tokenizer": ModelSource("own_tokenizer", BASE, "own_tokenizer", Path("own_tokenizer")),
        "with_config": ModelSource("with_config", BASE, BASE, Path("with_config")),
        "bin": ModelSource("bin", BASE, BASE, Path("bin")),
        "of_the_hub": ModelSource("of_the_hub", "org/model", "org/model", Path("of_the_hub"), "v2"),
    }
    for name, source in expected.items():
        assert locate(name) == source
    assert locate("lora", "v3").known == {"revision": "v3"}
    os.chdir("else")  # a base's relative path is one from where the run was started, or from a folder above the adapter
    assert locate("where/lora").base == str((Path.cwd().parent / BASE).resolve())


def test_a_name_without_a_folder_is_for_the_hub_or_refused(here: Path) -> None:
    for name in ("gpt2", "Qwen/Qwen2.5-Math-1.5B"):
        assert locate(name, "v1") == ModelSource(name, name, name, revision="v1")
    with pytest.raises(InputError, match=r"unknown model folder 'the/bas'\. Did you mean 'the/base'\?"):
        locate("the/bas")
    with pytest.raises(InputError, match=r"unknown model folder 'runs/grpo'\. Known: \(none\)"):
        locate("runs/grpo")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda f: f.mkdir(), "model 'it': the folder has no config.json, so it holds no model$"),
    "file": (lambda f: f.touch(), "model 'it' is a file: give its folder, '.'"),
    "killed run": (
        lambda f: [filled(f, resolved__json={}), *(whole(f / f"checkpoint-{n}") for n in (9, 60)), (f / "checkpoint-99").mkdir()],
        "stopped or at work: give its last checkpoint, 'it/checkpoint-60'",
    ),
    "killed run of an adapter": (lambda f: adapter(f / "checkpoint-2"), "give its last checkpoint, 'it/checkpoint-2'"),
    "killed before a checkpoint": (lambda f: filled(f, resolved__json={}), "without a checkpoint: train again"),
    "killed while it saved": (
        lambda f: [filled(f, config__json={}), whole(f / "checkpoint-3")],
        "has a config.json and no model.safetensors: .*give its last checkpoint, 'it/checkpoint-3'",
    ),
    "pipeline": (
        lambda f: [whole(f / "1_sft"), adapter(f / "2_grpo")], "so it holds no model. Models in it: 'it/1_sft', 'it/2_grpo'"
    ),
    "DeepSpeed": (
        lambda f: filled(f, config__json={}, zero_to_fp32__py="", global_step60_slash_x="") ,
        "DeepSpeed's, sharded over the ranks: python it/zero_to_fp32.py it it --safe_serialization makes them whole",
    ),
    "FSDP": (
        lambda f: filled(f, config__json={}, pytorch_model_fsdp_0_slash_x=""),
        "FSDP's, sharded over the ranks: accelerate merge-weights it/pytorch_model_fsdp_0 it",
    ),
    "DeepSpeed's adapter": (
        lambda f: filled(f, adapter_config__json={}, zero_to_fp32__py=""), "has an adapter_config.json and its weights are Deep"
    ),
    "adapter without weights": (
        lambda f: filled(f, adapter_config__json={}), "has an adapter_config.json and no adapter_model.safetensors"
    ),
    "copied in part": (
        lambda f: filled(f, config__json={}, model__safetensors__index__json={"weight_map": {"a": "1", "b": "2"}}, **{"1": ""}),
        "model 'it': 2 is missing, one of 2 files that model.safetensors.index.json lists: copy or download",
    ),
    "two models": (lambda f: adapter(whole(f)), r"a whole model \(model.safetensors\) and an adapter \(adapter_config.json\)"),
    "base vanished": (
        lambda f: adapter(f, "/no/such/base"),
        "it/adapter_config.json: base_model_name_or_path: unknown model folder '/no/such/base'.*Put the place",
    ),
    "base of a run that is gone": (lambda f: adapter(f, "runs/base"), "base_model_name_or_path: unknown model folder 'runs/base'"),
    "base without weights": (
        lambda f: adapter(f, str(filled(f.parent / "half", config__json={}))), "base_model_name_or_path: model 'half' has a config"
    ),
    "no base": (lambda f: adapter(f, None), "it/adapter_config.json: base_model_name_or_path is None: put"),
    "adapter of an adapter": (
        lambda f: adapter(f, str(adapter(f.parent / "first"))),
        "'first' is an adapter itself: python -m trl_ext.hub merge first first-merged, and put first-merged there",
    ),
    "torn": (lambda f: filled(adapter(f), adapter_config__json="{"), "it/adapter_config.json: cannot be read"),
    "no object": (lambda f: filled(adapter(f), adapter_config__json=[]), "it/adapter_config.json: not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_other_folder_is_refused_with_the_next_step(fault: str, here: Path) -> None:
    make, message = FAULTS[fault]
    make(here / "it")
    with pytest.raises(InputError, match=message) as refused:
        locate("it")
    assert "\n" not in str(refused.value)


def test_an_adapter_of_the_hub_is_downloaded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = here.resolve() / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    for name, make in {"lora": lambda f: adapter(f, "org/model"), "both": lambda f: whole(adapter(f))}.items():
        make(filled(cache / f"models--me--{name}", refs_slash_main="abc") / "snapshots/abc")
    source = locate("me/lora")
    assert source == ModelSource("me/lora", "org/model", "org/model", cache / "models--me--lora/snapshots/abc")
    assert locate("me/both") == ModelSource("me/both", "me/both", "me/both")
    assert locate("me/gone").adapter is None
