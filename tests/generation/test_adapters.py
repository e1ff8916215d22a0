"""What an engine is given of a policy with an adapter: PEFT's own merging, bit for bit, or a refusal."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.distributed import DistributedBackend

from tests.grpo.test_adapters_in_a_step import NOT_MADE, UNKNOWN_TO_TRL, config_of
from tests.support.tiny import ends_early, make_trainer, save_wide, tiny_model, tiny_sft
from tests.support.versions import needs_bitsandbytes, needs_vllm
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.compat.quantized import keep_gradients
from trl_ext.generation.adapter_models import load_model
from trl_ext.generation.adapters import check_adapter, check_quantization, check_stored_weights
from trl_ext.generation.merging import merge_into
from trl_ext.generation.model_source import locate
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
    engine.sends_adapter = False
    given = dict(engine._iter_named_params())
    assert given.keys() == merged.keys()
    assert [name for name in merged if not torch.equal(given[name], merged[name])] == []
    assert any(not torch.equal(given[name], plain[name]) for name in given)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(getattr(module, "merged", False) or getattr(module, "_caches", {}) for module in model.modules())


def refusal(flag: str, config: peft.PeftConfig, training: ExtGRPOConfig) -> str | None:
    """What is said where quantized weights cannot carry an adapter."""
    try:
        check_quantization(flag, config, training)
    except ValueError as error:
        return str(error)
    return None


@needs_bitsandbytes
@pytest.mark.moderate
@pytest.mark.parametrize(
    "quantization",
    [{"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
     {"load_in_8bit": True}],
    ids=["fp4", "nf4_twice", "int8"],
)  # fmt: skip
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(peft.LoraConfig(target_modules=LINEAR, modules_to_save=["norm"]), id="lora"),
        pytest.param(peft.LoraConfig(target_modules=LINEAR, use_dora=True), id="dora"),
        pytest.param(peft.IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]), id="ia3"),
        pytest.param(peft.LoHaConfig(target_modules=LINEAR), id="loha"),
        pytest.param(peft.LoKrConfig(target_modules=LINEAR), id="lokr"),
        pytest.param(peft.VeraConfig(target_modules=["q_proj"]), id="vera"),
    ],
)
def test_engine_gets_what_quantized_weights_multiply_by(
    config: peft.PeftConfig, quantization: dict[str, bool], tmp_path: Path
) -> None:
    flag = next(iter(quantization))
    training = ExtGRPOConfig(str(tmp_path / "run"), report_to="none", use_cpu=True, bf16=False)
    packed = flag == "load_in_4bit" and isinstance(config, peft.LoHaConfig | peft.LoKrConfig)
    if packed or (flag == "load_in_8bit" and getattr(config, "use_dora", False)):
        with pytest.raises(ValueError, match=flag):
            check_quantization(flag, config, training)
        return
    check_quantization(flag, config, training)
    made = AutoModelForCausalLM.from_pretrained(
        save_wide(tmp_path / "model"), quantization_config=BitsAndBytesConfig(**quantization), dtype=torch.float32
    )
    keep_gradients(made)
    model = peft.get_peft_model(made, copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.3 * torch.randn_like(parameter))
    ids = torch.randint(5, 12, (2, 20))
    expected = model(ids).logits
    engine = ColocatedEngine.__new__(ColocatedEngine)
    engine.mode, engine.model, engine._dist = "colocate", model, DistributedBackend(Accelerator(cpu=True))
    engine.sends_adapter = False
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    before = plain(ids).logits
    plain.load_state_dict({name: weight.clone() for name, weight in engine._iter_named_params()})
    # float32 in other orders; an 8-bit layer rounds its inputs to 8 bits too.
    tolerance = (1e-5 if flag == "load_in_4bit" else 0.03) * expected.abs().max()
    assert (plain(ids).logits - expected).abs().max() < tolerance
    assert (before - expected).abs().max() > 5 * tolerance
    assert model(ids).logits.equal(expected), "the policy is as before"


@needs_bitsandbytes
@pytest.mark.moderate
def test_what_a_quantized_run_leaves_is_read_on_its_own_base(tmp_path: Path) -> None:
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    base = AutoModelForCausalLM.from_pretrained(
        save_wide(tmp_path / "model"), quantization_config=quantized, dtype=torch.float32
    )
    keep_gradients(base)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=LINEAR, task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.3 * torch.randn_like(parameter))
    run = tmp_path / "run"
    model.save_pretrained(run)
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True, "dtype": "float32"}
    ids, unlike = torch.randint(5, 12, (2, 20)), load_model(locate(str(run)))
    (run / "resolved.json").write_text(json.dumps(settings))
    expected = model(ids).logits
    assert (load_model(locate(str(run)))(ids).logits - expected).abs().max() < 1e-5
    merge_into(locate(str(run)), tmp_path / "merged")
    assert (AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits - expected).abs().max() < 1e-5
    assert (unlike(ids).logits - expected).abs().max() > 0.1


@needs_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
def test_each_adapter_learns_on_quantized_weights_or_is_refused(flag: str, tmp_path: Path) -> None:
    training = ExtGRPOConfig(str(tmp_path / "run"), report_to="none", use_cpu=True, bf16=False)
    folder, quantization = save_wide(tmp_path / "model"), BitsAndBytesConfig(**{flag: True})
    # What TRL's forward pass or this model cannot serve without quantized weights either.
    others = {*NOT_MADE, *UNKNOWN_TO_TRL, "ADAPTION_PROMPT", "TRAINABLE_TOKENS", "UNILORA"}
    refused = []
    for name in sorted({kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - others):
        config = config_of(name)
        if said := refusal(flag, config, training):
            assert re.match(rf"{flag} with peft_type {name}: .*; use LORA", said)
            refused.append(name)
            continue
        made = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
        keep_gradients(made)
        model = peft.get_peft_model(made, config).train()
        model(torch.randint(5, 12, (2, 20))).logits.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
        assert max(gradient.abs().max() for gradient in gradients) > 0, name
    assert ("LOHA" in refused) == (flag == "load_in_4bit")
    assert {"DELORA", "HRA"} <= set(refused)


def test_quantized_weights_are_refused_with_a_scaled_loss(tmp_path: Path) -> None:
    training = ExtGRPOConfig(str(tmp_path / "run"), report_to="none", use_cpu=True, bf16=False)
    training.fp16 = True  # a CPU has none
    lora = peft.LoraConfig(target_modules=LINEAR)
    assert str(refusal("load_in_4bit", lora, training)).startswith("load_in_4bit with fp16: TRL has an adapter")
    training.fp16 = False
    assert refusal("load_in_4bit", lora, training) is None


def test_stored_quantized_weights_are_refused_with_an_engine(tmp_path: Path) -> None:
    config = tiny_model().config
    check_stored_weights(tiny_model())
    config.save_pretrained(tmp_path)
    check_stored_weights(str(tmp_path))
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"stored as bitsandbytes has quantized them.*load_in_4bit: true"):
        check_stored_weights(str(tmp_path))


def test_engine_gets_the_policys_modules_and_not_its_references() -> None:
    config = peft.LoraConfig(target_modules=LINEAR, modules_to_save=["norm"])
    model = peft.get_peft_model(untied_model(), copy.deepcopy(config))
    model.add_adapter("ref", config)  # as TRL does where an adapter is trained further
    with torch.no_grad():
        model.base_model.model.model.norm.modules_to_save.default.weight.add_(1)
    engine = ColocatedEngine.__new__(ColocatedEngine)
    engine.mode, engine.model, engine._dist = "colocate", model, DistributedBackend(Accelerator(cpu=True))
    engine.sends_adapter = False
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
