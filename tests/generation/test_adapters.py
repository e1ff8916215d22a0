"""What an engine is given of a policy with an adapter: PEFT's own merging, bit for bit, or a refusal."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from tests.support.tiny import ends_early, make_trainer, tiny_model, tiny_sft
from tests.support.versions import needs_vllm
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.adapters import check_adapter
from trl_ext.generation.vllm import ColocatedEngine
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer

LINEAR = ["q_proj", "v_proj", "down_proj"]
VLLM: dict[str, Any] = {"use_vllm": True, "vllm_max_model_length": 64}


def untied_model() -> Qwen3ForCausalLM:
    """The tiny model with a head and with biases of its own."""
    config = {**tiny_model().config.to_dict(), "tie_word_embeddings": False, "attention_bias": True}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(peft.LoraConfig(target_modules=LINEAR), id="lora"),
        pytest.param(peft.LoraConfig(target_modules=LINEAR, use_rslora=True), id="rslora"),
        pytest.param(peft.LoraConfig(target_modules=LINEAR, use_dora=True), id="dora"),
        pytest.param(peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_bias=True), id="lora_bias"),
        pytest.param(peft.LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"]), id="embedding"),
        pytest.param(peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True), id="dora_of_an_embedding"),
        pytest.param(peft.LoraConfig(target_modules=LINEAR, modules_to_save=["embed_tokens"]), id="modules_to_save"),
        pytest.param(peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]), id="ia3"),
        pytest.param(peft.LoHaConfig(target_modules=LINEAR), id="loha"),
        pytest.param(peft.LoKrConfig(target_modules=LINEAR), id="lokr"),
        pytest.param(peft.VeraConfig(target_modules=["q_proj"]), id="vera"),
    ],
)
def test_engine_gets_peft_merged_weights_and_policy_is_unchanged(config: peft.PeftConfig, dtype: torch.dtype) -> None:
    base = untied_model().to(dtype)
    plain = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = peft.get_peft_model(base, copy.deepcopy(config))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.3 * torch.randn_like(parameter))
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine = ColocatedEngine.__new__(ColocatedEngine)
    engine.mode, engine.model, engine._dist = "colocate", model, DistributedBackend(Accelerator(cpu=True))
    given = dict(engine._iter_named_params())
    assert given.keys() == merged.keys()
    assert [name for name in merged if not torch.equal(given[name], merged[name])] == []
    assert any(not torch.equal(given[name], plain[name]) for name in given)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(getattr(module, "merged", False) or getattr(module, "_caches", {}) for module in model.modules())


def test_engine_gets_the_policys_modules_and_not_its_references() -> None:
    config = peft.LoraConfig(target_modules=LINEAR, modules_to_save=["norm"])
    model = peft.get_peft_model(untied_model(), copy.deepcopy(config))
    model.add_adapter("ref", config)  # as TRL does where an adapter is trained further
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save.default.weight.add_(1)
    engine = ColocatedEngine.__new__(ColocatedEngine)
    engine.mode, engine.model, engine._dist = "colocate", model, DistributedBackend(Accelerator(cpu=True))
    given = list(engine._iter_named_params())
    assert sorted(name for name, _ in given) == sorted(name for name, _ in untied_model().named_parameters())
    assert dict(given)["model.norm.weight"].equal(torch.full((32,), 2.0))


@pytest.mark.moderate
@needs_vllm
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (peft.LoraConfig(target_parameters=["mlp.experts.down_proj"]), "lora_target_parameters with vLLM"),
        (peft.LoraConfig(trainable_token_indices=[1, 2]), "trainable_token_indices with vLLM"),
        (peft.LoraConfig(target_modules=["embed_tokens"]), "lora_target_modules has embed_tokens .* is its embedding"),
        (peft.LoraConfig(target_modules=r".*\.embed_tokens"), "lora_target_modules has embed_tokens"),
        (peft.LoraConfig(target_modules=LINEAR, modules_to_save=["lm_head"]), "lora_modules_to_save has lm_head"),
        (peft.OFTConfig(target_modules=LINEAR), "peft_type OFT: for vLLM only IA3, LOHA, LOKR, LORA, VERA"),
        (peft.PrefixTuningConfig(num_virtual_tokens=2), "peft_type PREFIX_TUNING"),
    ],
)
def test_unmergeable_adapter_is_refused_before_the_model_loads(
    config: peft.PeftConfig, message: str, tmp_path: Path
) -> None:
    # Token indices of a head that is the embedding are refused without vLLM, too.
    model = untied_model() if getattr(config, "trainable_token_indices", None) else tiny_model()
    model.config.save_pretrained(tmp_path)  # and no weights
    folder: Any = str(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_adapter(folder, config)
    places = list(inspect.signature(GRPOTrainer).parameters)
    in_order: list[Any] = [None] * places.index("peft_config") + [config]
    in_order[places.index("model")], in_order[places.index("reward_funcs")] = folder, ends_early
    in_order[places.index("args")] = ExtGRPOConfig(
        str(tmp_path / "run"), report_to="none", use_cpu=True, bf16=False, vllm_mode="colocate", **VLLM
    )
    for make in (
        lambda: ExtGRPOTrainer(*in_order),
        lambda: make_trainer(
            ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", ends_early, model=folder, peft_config=config,
            vllm_mode="colocate", **VLLM,
        ),
        lambda: tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path / "run", [], model=folder, peft_config=config, **VLLM),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()


def test_adapters_not_on_a_tied_embedding_are_accepted() -> None:
    model = tiny_model()
    check_adapter(model, None)
    for settings in (
        {"target_modules": "all-linear"},
        {"target_modules": LINEAR},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": LINEAR, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ):
        check_adapter(model, peft.LoraConfig(**settings))
    check_adapter(untied_model(), peft.LoraConfig(target_modules=["embed_tokens", "lm_head"]))
    with pytest.raises(ValueError, match="lora_target_modules has embed_tokens"):
        check_adapter(peft.get_peft_model(model, peft.LoraConfig(target_modules=["embed_tokens"])), None)
