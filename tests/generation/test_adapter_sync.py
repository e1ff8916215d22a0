"""An adapter that is sent to vLLM by itself: which one can be, when it is chosen, and what reaches the engine."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from trl.distributed import DistributedBackend

from tests.generation.test_vllm import AGREE, SETTINGS, disagreement, save_model, shake
from tests.grpo.test_adapters_in_a_step import NOT_MADE, config_of
from tests.support.tiny import fraction_of_ones, make_trainer, tiny_model
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.adapter_sync import (
    ADAPTER_WEIGHTS,
    AdapterFolder,
    Rollout,
    check_lora_sync,
    files_of,
    is_cheaper,
    name_of,
    reason_to_merge,
    room,
)

LINEAR = ["q_proj", "v_proj", "down_proj"]
# Fields of a LoRA that change what it computes, and that vLLM's adapters do not have.
UNHEEDED: dict[str, Any] = {
    "fan_in_fan_out": True, "bias": "all", "modules_to_save": ["norm"], "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2}, "megatron_config": {}, "trainable_token_indices": [1], "use_dora": True,
    "velora_config": {"rank": 1}, "alora_invocation_tokens": [1], "use_qalora": True, "monteclora_config": {"a": 1},
    "layer_replication": [(0, 1)], "lora_bias": True, "target_parameters": ["weight"], "use_bdlora": True,
    "arrow_config": {"a": 1}, "kasa_config": {"a": 1}, "ensure_weight_tying": True,
}  # fmt: skip


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **more})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(peft.LoraConfig)])
def test_vllm_heeds_each_field_or_the_adapter_is_merged(field: str) -> None:
    config = lora()
    if field in UNHEEDED:
        setattr(config, field, UNHEEDED[field] or {"a": 1})
        assert f" {field} " in str(reason_to_merge(config))
        return
    setattr(
        config, field, {"r": 8, "lora_dropout": 0.1, "target_modules": ["q_proj"]}.get(field, getattr(config, field))
    )
    assert reason_to_merge(config) is None


@pytest.mark.parametrize("name", sorted({kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - NOT_MADE - {"LORA"}))
def test_no_other_adapter_is_sent_by_itself(name: str) -> None:
    assert reason_to_merge(config_of(name)) == f"vLLM adds no adapter of peft_type {name}"


def test_what_cannot_be_sent_is_refused_with_the_reason() -> None:
    whole: dict[str, Any] = {"sleeps": False, "rounds": False, "sharded": False}
    for way in ("auto", "merge"):
        check_lora_sync(way, None, **whole)
    check_lora_sync("adapter", lora(), **whole)
    for adapter, more, message in (
        (None, {}, "the model has no adapter"),
        (lora(), {"sleeps": True}, "vllm_enable_sleep_mode drops"),
        (lora(), {"rounds": True}, "simulated quantization rounds"),
        (lora(), {"sharded": True}, "FSDP has the policy in parts"),
        (lora(r=1024), {}, "a rank of 512 at most, and this one is 1024"),
        (lora(target_modules=["embed_tokens"]), {}, "on embed_tokens"),
        (lora(target_modules=r".*\.lm_head"), {}, "on lm_head"),
    ):
        with pytest.raises(ValueError, match=rf"vllm_lora_sync: adapter: .*{message}.*Set it to merge"):
            check_lora_sync("adapter", adapter, **{**whole, **more})
    with pytest.raises(ValueError, match=r"unknown vllm_lora_sync 'adaptor'.*adapter"):
        check_lora_sync("adaptor", lora(), **whole)


def test_the_choice_follows_from_sizes() -> None:
    """14 GB by HTTP take 467 s; a GPU's token takes 10 ms and 36 % of that longer, so 129,630 tokens as much longer."""
    of_7b = 7_000_000_000
    assert is_cheaper(of_7b, 2, Rollout(rows=256, tokens=129_000), "cuda")
    assert not is_cheaper(of_7b, 2, Rollout(rows=256, tokens=130_000), "cuda")
    # On a CPU each row counts: 0.14 s of a token, and 0.224 s more with an adapter.
    assert is_cheaper(of_7b, 2, Rollout(rows=10, tokens=208), "cpu")
    assert not is_cheaper(of_7b, 2, Rollout(rows=10, tokens=209), "cpu")


def test_an_engine_has_room_for_the_rank() -> None:
    assert [room(rank) for rank in (1, 8, 9, 64, 300, 512)] == [8, 8, 16, 64, 320, 512]


def test_an_adapter_is_two_files_that_peft_reads(tmp_path: Path) -> None:
    model = peft.get_peft_model(tiny_model(), lora(use_rslora=True))
    files = files_of(model, DistributedBackend(Accelerator(cpu=True)))
    folder = AdapterFolder()
    path = Path(folder.write(files))
    again = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_model()), path)
    given = dict(again.named_parameters())
    assert all(param.equal(given[name]) for name, param in model.named_parameters() if "lora" in name)
    assert json.loads((path / "adapter_config.json").read_text())["use_rslora"] is True
    assert path.name == name_of(files)
    with torch.no_grad():
        next(param for name, param in model.named_parameters() if "lora_B" in name).add_(1)
    changed = files_of(model, DistributedBackend(Accelerator(cpu=True)))
    assert name_of(changed) != name_of(files)
    other = Path(folder.write(changed))
    assert other != path
    assert not path.exists(), "one version is kept"
    assert load_file(other / ADAPTER_WEIGHTS).keys() == safetensors.torch.load(files[ADAPTER_WEIGHTS]).keys()


@pytest.mark.vllm
def test_the_colocated_engine_adds_the_adapter(tmp_path: Path) -> None:
    settings = {**SETTINGS, "learning_rate": 0.05, "vllm_lora_sync": "adapter"}
    trainer: Any = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=str(save_model(tmp_path / "m", True)),
        peft_config=lora(use_rslora=True), **settings,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < AGREE
    reloaded: list[bool] = []
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights = lambda **_: reloaded.append(True)
    for part in ("lora_B", "lora_A"):
        shake(trainer, part)
        assert disagreement(trainer) > 100 * AGREE
        trainer.vllm_generation.sync_weights()
        assert disagreement(trainer) < AGREE
    assert not reloaded, "the base model is sent once"
    with trainer.vllm_generation.measuring(seed=0):
        assert disagreement(trainer) < AGREE
