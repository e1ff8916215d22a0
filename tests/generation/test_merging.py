"""An adapter's folder: loaded it is the model that was trained, merged a whole model with the same scores, or refused."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tests.support.tiny import tiny_model, tiny_tokenizer
from trl_ext.errors import InputError
from trl_ext.generation.adapter_models import check_trainable, load_model, load_tokenizer
from trl_ext.generation.completion import Sampling
from trl_ext.generation.decoding import own_loop_unsupported
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.merging import check_mergeable, fingerprint, merge_into, merged_folder, whole_model
from trl_ext.generation.model_source import locate
from trl_ext.generation.samplers import HFSampler

LINEAR = ["q_proj", "v_proj", "down_proj"]
IDS = torch.tensor([[3, 4, 5, 6, 9, 10, 3, 4]])
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"target_modules": LINEAR, **settings})


MERGED: dict[str, peft.PeftConfig] = {
    "lora": lora(), "rslora": lora(use_rslora=True), "dora": lora(use_dora=True), "all": lora(target_modules="all-linear"),
    "embedding": lora(target_modules=["embed_tokens", "q_proj"]), "head": lora(target_modules=["lm_head", "q_proj"]),
    "both": lora(target_modules=["embed_tokens", "lm_head"]), "saved embedding": lora(modules_to_save=["embed_tokens"]),
    "saved head": lora(modules_to_save=["lm_head"]), "saved both": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "saved norm": lora(modules_to_save=["norm"]), "one layer": lora(layers_to_transform=[1]),
    "tied": lora(target_modules=["embed_tokens"], ensure_weight_tying=True),
    "saved and tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tokens": lora(trainable_token_indices=[3, 4]), "tokens alone": peft.TrainableTokensConfig(token_indices=[3, 4]),
    "ia3": peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(target_modules=LINEAR), "lokr": peft.LoKrConfig(target_modules=LINEAR),
    "vera": peft.VeraConfig(target_modules=["q_proj"]), "oft": peft.OFTConfig(target_modules=LINEAR, oft_block_size=4),
    "hra": peft.HRAConfig(target_modules=LINEAR), "norms": peft.LNTuningConfig(target_modules=["norm"]),
}  # fmt: skip
UNMERGED: dict[str, tuple[peft.PeftConfig, str]] = {
    "prompt": (peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL), "PROMPT_TUNING changes no weights"),
    "prefix": (peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL), "PREFIX_TUNING changes no weights"),
    "encoder": (peft.PromptEncoderConfig(num_virtual_tokens=3, **CAUSAL), "P_TUNING changes no weights"),
    "activated": (lora(alora_invocation_tokens=[3, 4], **CAUSAL), "alora_invocation_tokens is not always active"),
}


def save_base(folder: Path, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    config = {**tiny_model().config.to_dict(), "tie_word_embeddings": tied}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**config)).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, config: peft.PeftConfig) -> Any:
    """An adapter as a training leaves it, none of whose weights are as they began; returns the model."""
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), copy.deepcopy(config))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def scores(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


FEW = ["dora", "saved head", "tied"]


@pytest.mark.parametrize(
    ("tied", "names"),
    [
        (True, FEW),
        pytest.param(True, [*MERGED], marks=pytest.mark.slow),
        pytest.param(False, [*MERGED], marks=pytest.mark.slow),
    ],
    ids=["few", "tied", "untied"],
)
def test_every_kind_is_what_was_trained_loaded_and_merged(tied: bool, names: list[str], tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", tied)
    unchanged = scores(AutoModelForCausalLM.from_pretrained(base))
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of tied embeddings
            trained = scores(save_adapter(tmp_path / name, base, MERGED[name]))
            source = locate(str(tmp_path / name))
            assert torch.equal(scores(load_model(source)), trained), name
            merge_into(source, tmp_path / f"{name}-merged")
        merged = scores(AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged"))
        assert (trained - unchanged).abs().max() > 0.005, name
        torch.testing.assert_close(merged, trained, msg=name, atol=1e-5, rtol=1e-5)


@pytest.mark.moderate
def test_what_is_in_no_weights_is_sampled_from_and_not_merged(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    for name, (config, reason) in UNMERGED.items():
        model = save_adapter(tmp_path / name, base, config)
        source = locate(str(tmp_path / name))
        for refuse in (check_mergeable, merged_folder):
            with pytest.raises(InputError, match=rf"cannot be merged.*{reason}. Sample with HF generate"):
                refuse(source)
        sampler = HFSampler(source.name, Sampling(temperature=0, max_tokens=6, stop=()), 2)
        prompts = ["3 + 4 =", "a b"]
        found = sampler(prompts, [0, 1])
        greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
        for prompt, completion in zip(prompts, found, strict=True):
            inputs = load_tokenizer(source)(prompt, return_tensors="pt", return_token_type_ids=False)
            with torch.no_grad():
                alone = model.generate(**inputs, generation_config=GenerationConfig(**greedy))
            text = load_tokenizer(source).decode(alone[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            assert completion.text == text, name
        if config.is_prompt_learning:
            with pytest.raises(InputError, match=rf"{config.peft_type.value}, which PEFT does not train further"):
                check_trainable(source)


def test_a_merge_that_fails_or_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base")
    save_adapter(tmp_path / "bias", base, lora(lora_bias=True))
    with pytest.raises(InputError, match=r"cannot be merged into its base model, .*base layer has no bias"):
        merged_folder(locate(str(tmp_path / "bias")))
    save_adapter(tmp_path / "lora", base, lora())
    source = locate(str(tmp_path / "lora"))
    with monkeypatch.context() as patch:
        patch.setattr(peft.LoraModel, "merge_and_unload", lambda self: self.unload())
        with pytest.raises(InputError, match="merged, it gives other scores, by up to"):
            merged_folder(source)
    config = Qwen3Config(**{**tiny_model().config.to_dict(), "hidden_size": 64})
    Qwen3ForCausalLM(config).save_pretrained(base)
    with pytest.raises(InputError, match=r"the adapter '.*lora' does not fit its base model '.*base': .*size mismatch"):
        load_model(source)
    (tmp_path / "lora" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"adapter_model.safetensors: cannot be read: .*Copy or download it again"):
        load_model(source)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.moderate
def test_a_merged_model_is_made_once_and_again_after_a_change(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = save_base(tmp_path / "base"), tmp_path / "lora"
    save_adapter(folder, base, lora())
    GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=[1, 6]).save_pretrained(folder)
    merged = Path(whole_model(str(folder)))
    assert f"the adapter {folder} is merged into its base model {base}, kept in {merged}" in capsys.readouterr().out
    assert merged.parent == cache
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [1, 6]
    assert len(load_tokenizer(locate(str(merged)))) == len(tiny_tokenizer())
    written = (merged / "model.safetensors").stat().st_mtime_ns
    (folder / "config.yaml").write_text("seed: 1")  # of a run, and in no model
    assert whole_model(str(folder)) == str(merged)
    assert whole_model(str(base)) == str(base)
    assert (merged / "model.safetensors").stat().st_mtime_ns == written
    assert not capsys.readouterr().out
    (merged / "merged_from.json").unlink()  # as a process leaves it that is killed
    (cache / f"making-{merged.name}").mkdir()
    (cache / f"making-{merged.name}" / "half").touch()
    assert whole_model(str(folder)) == str(merged)
    assert sorted(path.name for path in cache.iterdir()) == [merged.name, f"{merged.name}.lock"]
    before = fingerprint(locate(str(folder)))
    changes = [
        lambda: save_adapter(folder, base, lora(lora_alpha=32)),
        lambda: tiny_model(3).save_pretrained(base),
        lambda: tiny_tokenizer([*tiny_tokenizer().get_vocab()][:-1]).save_pretrained(folder),
        lambda: (folder / "resolved.json").write_text('{"dtype": "bfloat16"}'),
    ]
    for change in changes:
        change()
        now = fingerprint(locate(str(folder)))
        assert now != before
        before = now
    assert whole_model(str(folder)) != str(merged)


@pytest.mark.moderate
def test_an_adapter_is_evaluated_in_what_its_run_had_loaded(tmp_path: Path) -> None:
    base, folder = save_base(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "lora"
    save_adapter(folder, base, lora())
    assert load_model(locate(str(folder))).dtype == torch.bfloat16
    (folder / "resolved.json").write_text('{"dtype": "float32"}')
    assert load_model(locate(str(folder))).dtype == torch.float32
    assert load_model(locate(str(folder)), "bfloat16").dtype == torch.bfloat16
    weights = load_file(Path(whole_model(str(folder))) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.moderate
def test_an_adapter_of_a_larger_vocabulary_brings_its_embedding(tmp_path: Path) -> None:
    base, folder = save_base(tmp_path / "base"), tmp_path / "lora"
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(24)
    model = peft.get_peft_model(plain, lora())
    model.save_pretrained(folder, save_embedding_layers=True)
    source = locate(str(folder))
    assert torch.equal(scores(load_model(source)), scores(model))
    torch.testing.assert_close(scores(AutoModelForCausalLM.from_pretrained(merged_folder(source))), scores(model))


def test_an_adapter_of_transformers_is_decoded_as_pefts(tmp_path: Path) -> None:
    base, folder = save_base(tmp_path / "base"), tmp_path / "lora"
    wrapped = save_adapter(folder, base, lora())
    injected = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert injected.peft_config
    assert not hasattr(injected, "get_base_model")
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=1)
    found = [hf_generate(model, tiny_tokenizer(), [[3, 9, 4], [5]], config) for model in (injected, wrapped)]
    assert found[0] == found[1]
    assert [own_loop_unsupported(model, config) for model in (injected, wrapped)] == [None, None]
