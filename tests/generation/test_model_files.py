"""Folders whose files are not the model that they describe: refused by name, before data are read, by every program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.generation.test_merging import lora, save_adapter
from tests.recipes.test_grpo import ON_A_CPU
from tests.support.tiny import WORDS, save_tiny, tiny_tokenizer
from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import load_model
from trl_ext.generation.model_files import check_loadable
from trl_ext.generation.model_source import locate
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.preflight import prepare

Weights = dict[str, torch.Tensor]
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 3627208\n"


def with_weights(change: Callable[[Weights], Weights], name: str = "model.safetensors") -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        save_file(change(load_file(folder / name)), folder / name, {"format": "pt"})

    return write


def without(part: str) -> Callable[[Path], object]:
    return with_weights(lambda weights: {name: weight for name, weight in weights.items() if part not in name})


def renamed(before: str, after: str) -> Callable[[Path], object]:
    def names(weights: Weights) -> Weights:
        return {after + name.removeprefix(before): weight for name, weight in weights.items()}

    return with_weights(names)


def edited(file: str, **fields: object) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return write


def cut_in_half(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def as_bin(folder: Path, size: int | None = None) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:size])


def shorter(weights: Weights) -> Weights:
    return {name: weight[:-1].clone() if "down_proj" in name else weight for name, weight in weights.items()}


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight is missing": (without("layers.1.mlp.down_proj"), r"1 weights that config.json .* missing \(model.layers.1.mlp.down_proj.weight\) and would be random"),
    "half of the layers": (edited("config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4), r"weights that .* missing \(model.layers.2"),
    "untied": (edited("config.json", tie_word_embeddings=False), r"missing \(lm_head.weight\) and would be random"),
    "saved by DDP": (renamed("", "module."), "begin with 'module.', as of a wrapped model; save the model inside it"),
    "saved compiled": (renamed("", "_orig_mod."), "begin with '_orig_mod.'"),
    "saved with a value head": (renamed("", "pretrained_model."), "begin with 'pretrained_model.'"),
    "another kind of model": (
        edited("config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"]), "would be random .* the file has others instead"
    ),
    "other shapes": (with_weights(shorter), r"down_proj.weight has the shape \[31, 64\] in its file and \[32, 64\] by config.json"),
    "a pointer": (lambda f: (f / "model.safetensors").write_text(POINTER), "model.safetensors is a pointer of Git LFS .* git lfs pull in"),
    "the tokenizer's pointer": (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json is a pointer of Git LFS"),
    "cut": (cut_in_half, r"model.safetensors is damaged or not complete .* copy or download the model again"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is damaged or not complete"),
    "a cut .bin": (lambda f: as_bin(f, 1000), "cannot be loaded: RuntimeError: PytorchStreamReader failed"),
    "a variant": (lambda f: (f / "model.safetensors").rename(f / "model.fp16.safetensors"), "no file named model.safetensors"),
    "no mapping": (lambda f: (f / "config.json").write_text("[]"), "cannot be loaded: TypeError"),
    "layers that disagree": (edited("config.json", num_hidden_layers=5), "cannot be loaded: .*`num_hidden_layers`"),
    "the name of a token": (edited("config.json", eos_token_id="<eos>"), "config.json has '<eos>' as its eos_token_id, .* number"),
    "names in a list": (
        edited("generation_config.json", eos_token_id=[1, "<e>"]), "generation_config.json has '<e>' as its eos_token_id"
    ),
    "a generation config": (edited("generation_config.json", cache_implementation="mine"), "cannot be loaded: .*`cache_implementation`"),
    "a package": (
        edited("config.json", quantization_config={"quant_method": "awq", "bits": 4}), "cannot be loaded: ImportError: .*gptqmodel"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_no_model_is_refused_before_data_are_read(fault: str, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    model = save_tiny(tmp_path / "model")
    check_loadable(locate(str(model)))
    check_loadable(locate(str(model)), for_training=True)
    change(model)
    missing_data = str(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match=words) as refused:
        run_evaluation(
            Evaluation(model_name_or_path=str(model), dataset=missing_data, output_dir=str(tmp_path / "run"))
        )
    assert "\n" not in str(refused.value)

    def read(seed: int) -> Any:
        raise AssertionError("data are read first")

    (tmp_path / "empty.yaml").write_text("{}")
    command = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out"), *ON_A_CPU]
    with pytest.raises(InputError, match=words):
        prepare(*parse(GRPO_SETTINGS, "about", tmp_path / "empty.yaml", command), read)


def test_whole_models_of_all_layouts_are_accepted(tmp_path: Path) -> None:
    layouts: dict[str, Callable[[Path], object]] = {
        "of the inner model": renamed("model.", ""), "bin": as_bin,
        "with a value head": with_weights(lambda weights: weights | {"v_head.weight": torch.zeros(3)}),
        "other dtype": with_weights(lambda weights: {name: weight.bfloat16() for name, weight in weights.items()}),
        "read by vLLM": edited("config.json", quantization_config={"quant_method": "awq", "bits": 4}),
        "of images, by vLLM": edited("config.json", model_type="clip", architectures=["CLIPModel"]),
    }  # fmt: skip
    for name, change in layouts.items():
        change(model := save_tiny(tmp_path / name))
        check_loadable(locate(str(model)), with_hf="by vLLM" not in name)


def test_training_needs_the_name_of_an_architecture(tmp_path: Path) -> None:
    edited("config.json", architectures=None)(save_tiny(tmp_path))
    check_loadable(locate(str(tmp_path)))
    with pytest.raises(InputError, match=r"config.json has no architectures, by which TRL loads it"):
        check_loadable(locate(str(tmp_path)), for_training=True)


ADAPTERS: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "empty": (lambda weights: {}, "Found missing adapter keys"),
    "in part": (lambda weights: {n: w for n, w in weights.items() if "q_proj" not in n}, "Found missing adapter keys"),
    "of other names": (lambda weights: {f"base_model.{n}": w for n, w in weights.items()}, "Found missing adapter keys"),
    "of more layers": (
        lambda weights: weights | {n.replace("layers.0", "layers.7"): w.clone() for n, w in weights.items() if "layers.0" in n},
        "has no place for 6 of its 18 matrices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ADAPTERS)
def test_an_adapter_that_is_not_all_used_is_refused(fault: str, tmp_path: Path) -> None:
    change, words = ADAPTERS[fault]
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", save_tiny(tmp_path / "base"), lora())
    load_model(locate(str(tmp_path / "adapter")))
    with_weights(change, "adapter_model.safetensors")(tmp_path / "adapter")
    with pytest.raises(InputError, match=f"adapter' does not fit its base model .*{words}"):
        load_model(locate(str(tmp_path / "adapter")))


@pytest.mark.parametrize("files", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"]], ids=["all", "one"])
def test_a_model_without_a_tokenizer_is_refused(files: list[str], tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    for file in files:
        (model / file).unlink()
    with pytest.raises(InputError, match=r"model'.* tokenizer") as refused:
        run_evaluation(Evaluation(model_name_or_path=str(model), problems=2, output_dir=str(tmp_path / "run")))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("beams", [1, 2], ids=["our loop", "transformers' loop"])
def test_an_evaluation_of_weights_that_are_no_numbers_is_refused(
    temperature: float, beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model")
    tiny_tokenizer(WORDS[:-1]).save_pretrained(model)  # with its additional word as many as the model has
    with_weights(lambda weights: {name: weight * float("nan") for name, weight in weights.items()})(model)
    if beams > 1:
        monkeypatch.setattr("trl_ext.generation.hf.own_loop_unsupported", lambda *_: "the test asks for the other one")
    settings = {"problems": 2, "max_tokens": 4, "use_vllm": "false", "stop": [], "output_dir": str(tmp_path / "run")}
    with pytest.raises(InputError, match=r"model'.* NaN or infinite"):
        run_evaluation(Evaluation(model_name_or_path=str(model), temperature=temperature, **settings))  # type: ignore[arg-type]
