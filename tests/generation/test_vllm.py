"""Colocated vLLM for real: after every sync, sampler and trainer give the same tokens the same log-probabilities."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import ModelConfig, get_quantization_config

from tests.support.tiny import fraction_of_ones, make_trainer, save_wide, tiny_model, tiny_tokenizer
from tests.support.versions import needs_bitsandbytes
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.vllm import BUCKET_BYTES, SIMULATED, _buckets
from trl_ext.generation.vllm_start import starting_vllm

AGREE = 2e-5  # float32 on both sides, in different kernels; a sync that is skipped gives 0.1 and more
PROMPT = [9, 7, 10, 8]
SETTINGS = {
    "preset": "grpo_clip", "use_vllm": True, "vllm_mode": "colocate", "vllm_dtype": "float32", "vllm_max_model_length": 64,
    "vllm_enforce_eager": True, "learning_rate": 0.5, "max_steps": 2, "model_init_kwargs": {"dtype": "float32"},
}  # fmt: skip


def save_model(path: Path, tied: bool) -> Path:
    """The tiny model with heads that vLLM's CPU kernels have."""
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 64, "head_dim": 32, "vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    config = Qwen3Config(**{**tiny_model().config.to_dict(), **shape})
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def disagreement(trainer: Any) -> float:
    """The largest difference of a sampled token's log-probability between the engine and the policy."""
    _, completions, sampled, _ = trainer.vllm_generation.generate(prompts=[PROMPT] * 8, images=None, num_generations=8)
    worst = 0.0
    for ids, logps in zip(completions, sampled, strict=True):
        with torch.no_grad():
            logits = trainer.model_wrapped(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].float()
        mine = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, (mine - torch.tensor([logp for (logp,) in logps])).abs().max().item())
    return worst


def shake(trainer: Any, part: str) -> None:
    """Change the weights whose name has `part` in it, alike on all ranks."""
    torch.manual_seed(1)
    chosen = [parameter for name, parameter in trainer.model.named_parameters() if part in name]
    gather = contextlib.nullcontext()
    if trainer._dist.is_zero3:
        import deepspeed

        gather = deepspeed.zero.GatheredParameters(chosen, modifier_rank=0)
    with torch.no_grad(), gather:
        for parameter in chosen:
            parameter.add_(0.3 * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tied")
    return make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, path / "run", fraction_of_ones, model=str(save_model(path, True)), **SETTINGS
    )


@pytest.mark.vllm
def test_sampler_and_trainer_agree_after_steps_only_due_to_sync(tied: Any) -> None:
    tied.train()
    steps = [entry for entry in tied.state.log_history if "loss" in entry]
    assert len(steps) == 2
    assert steps[0]["grad_norm"] > 0
    name = "sampling/sampling_logp_difference/max"  # absent from a step of which no row trains
    assert name in steps[0]
    assert all(entry[name] < AGREE for entry in steps if name in entry)
    assert 0 < steps[0]["sampling/identical_fraction"] < 1  # float32 in other kernels: some tokens are the same float
    assert disagreement(tied) > 0.05  # the last step has not been synced
    tied.vllm_generation.sync_weights()
    assert disagreement(tied) < AGREE


@pytest.mark.vllm
@pytest.mark.parametrize(
    "part",
    ["embed_tokens", "input_layernorm", "post_attention_layernorm", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm",
     "gate_proj", "up_proj", "down_proj", "model.norm"],
)  # fmt: skip
def test_every_part_of_the_model_arrives(tied: Any, part: str) -> None:
    shake(tied, part)
    assert disagreement(tied) > 100 * AGREE
    tied.vllm_generation.sync_weights()
    assert disagreement(tied) < AGREE


@pytest.mark.vllm
def test_more_prompts_than_a_prefill_takes_at_once(tmp_path: Path) -> None:
    settings = SETTINGS | {"per_device_train_batch_size": 120}  # TRL has as many requests run at a time
    model = str(save_model(tmp_path, True))
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=model, **settings)
    torch.manual_seed(0)
    prompts = torch.randint(5, 12, (120, 50)).tolist()  # 6,000 tokens; TRL lets the engine take 4,096 at once
    _, completions, _, _ = trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=1)
    assert [len(ids) > 0 for ids in completions] == [True] * 120


@pytest.mark.vllm
def test_a_model_with_its_own_output_head_arrives(tmp_path: Path) -> None:
    model = str(save_model(tmp_path, False))
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=model, **SETTINGS)
    shake(trainer, "lm_head")
    assert disagreement(trainer) > 100 * AGREE
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < AGREE


@pytest.mark.vllm
def test_an_engine_without_a_trainer_gives_its_memory_back(tmp_path: Path) -> None:
    model = str(save_model(tmp_path, True))

    def engine(run: str) -> weakref.ref[Any]:
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / run, fraction_of_ones, model=model, **SETTINGS)
        return weakref.ref(trainer.vllm_generation.llm)

    engine("first")  # a process's first trainer stays: something beyond our code refers to it
    second = engine("second")
    assert second() is not None  # until the next one starts
    third = engine("third")
    assert second() is None, gc.get_referrers(second())
    assert third() is not None


@needs_bitsandbytes
@pytest.mark.vllm
@pytest.mark.parametrize("sync", ["merge", "adapter"])
@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
def test_an_engine_and_a_quantized_policy_agree(flag: str, sync: str, tmp_path: Path) -> None:
    """What differs is the trainer's adapter, whose products TRL has in bfloat16 on quantized weights."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    quantization = get_quantization_config(ModelConfig(use_peft=True, dtype="float32", **{flag: True}))
    settings = SETTINGS | {"learning_rate": 0.01, "vllm_lora_sync": sync}
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=str(save_wide(tmp_path / "model")),
        peft_config=lora, quantization_config=quantization, **settings,
    )  # fmt: skip
    trainer.train()
    name = "sampling/sampling_logp_difference/max"
    assert all(entry[name] < 0.02 for entry in trainer.state.log_history if name in entry)
    shake(trainer, "lora_B")
    assert disagreement(trainer) > 0.3
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < 0.03


@pytest.mark.vllm
def test_simulated_quantization_rounds_the_engines_matrices(tmp_path: Path) -> None:
    settings = SETTINGS | {"vllm_quantization": "simulated_int4"}
    model = str(save_model(tmp_path, True))
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=model, **settings)
    trainer.vllm_generation.sync_weights()
    with trainer.vllm_generation.measuring(seed=0):
        assert disagreement(trainer) < AGREE
    assert disagreement(trainer) > 100 * AGREE
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if name.endswith("proj.weight"):
                weight.copy_(SIMULATED["simulated_int4"](weight))
    assert disagreement(trainer) < AGREE


@pytest.mark.parametrize(("how", "error"), [("simulated_int4", 1 / 14), ("simulated_fp8", 2**-4)])
def test_a_rounded_matrix_has_the_values_of_its_precision(how: str, error: float) -> None:
    weight = torch.linspace(-1.0, 0.7, 400).reshape(20, 20)
    rounded = SIMULATED[how](weight)
    assert 0 < (rounded - weight).abs().max() <= error + 1e-6  # half a seventh; half of fp8's last bit at 1
    assert torch.allclose(SIMULATED[how](rounded), rounded, atol=1e-6)
    assert not SIMULATED[how](torch.zeros(2, 2)).any()
    if how == "simulated_int4":
        assert len(rounded.unique()) == 8 + 5  # sevenths from -1 to 5/7, the end by rounding


@pytest.mark.vllm
@pytest.mark.parametrize("variant", ["lora", "dora_and_an_embedding"])
def test_lora_is_merged_on_the_fly_and_the_policy_is_unchanged(variant: str, tmp_path: Path) -> None:
    plain = variant == "lora"
    targets: Any = "all-linear" if plain else ["q_proj", "v_proj", "down_proj", "embed_tokens"]
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=targets, use_dora=not plain, task_type="CAUSAL_LM")
    model = str(save_model(tmp_path, plain))
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=model, peft_config=lora,
        **SETTINGS,
    )  # fmt: skip
    trainer.train()
    shake(trainer, "lora_B" if plain else "lora_")
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    assert disagreement(trainer) > 100 * AGREE
    trainer.vllm_generation.sync_weights()
    assert disagreement(trainer) < AGREE
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())


@pytest.mark.vllm
def test_model_exceeding_the_context_names_the_setting_to_change(tmp_path: Path) -> None:
    settings = {**SETTINGS, "vllm_max_model_length": 4096}
    with pytest.raises(RuntimeError, match=r"(?s)vLLM did not start: .*lower vllm_max_model_length"):
        make_trainer(
            ExtGRPOTrainer,
            ExtGRPOConfig,
            tmp_path / "run",
            fraction_of_ones,
            model=str(save_model(tmp_path, True)),
            **settings,
        )


@pytest.mark.vllm
def test_a_context_beyond_trls_batch_of_tokens_starts(tmp_path: Path) -> None:
    """TRL's batch is of 4,096 tokens, and on a CPU no prompt may be split; nothing says how long prompts are here."""
    path = save_model(tmp_path / "model", True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    settings = {**SETTINGS, "vllm_max_model_length": None}
    trainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, model=str(path), **settings
    )
    assert trainer.vllm_generation.llm.llm_engine.model_config.max_model_len == 8192
    assert disagreement(trainer) >= 0  # which generates


@pytest.mark.moderate
def test_runs_that_start_together_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with starting_vllm():
        assert os.environ["MASTER_PORT"] != "29500"  # what TRL would take
    monkeypatch.setenv("MASTER_PORT", "29611")  # a launcher's
    with starting_vllm():
        assert os.environ["MASTER_PORT"] == "29611"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("No available memory for the cache blocks.", "raise vllm_gpu_memory_utilization"),
        ("CUDA out of memory. Tried to allocate", "raise vllm_gpu_memory_utilization"),
        ("To serve at least one request with the model's max seq len", "lower vllm_max_model_length"),
        ("User-specified max_model_len (9) is greater than the derived max_model_len", "lower vllm_max_model_length"),
        ("something else", "use_vllm: false"),
    ],
)
def test_why_vllm_did_not_start_and_what_helps(said: str, advice: str) -> None:
    with pytest.raises(RuntimeError, match=f"vLLM did not start: {said[:20]}.*{advice}"), starting_vllm():
        raise ValueError(said)


def test_parameters_are_gathered_in_buckets_of_bounded_size() -> None:
    bounds = [torch.empty(BUCKET_BYTES // 4 // part, device="meta") for part in (2, 2, 4, 1, 8)]
    buckets = list(_buckets(iter([(str(i), parameter) for i, parameter in enumerate(bounds)])))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert list(_buckets(iter([]))) == []
