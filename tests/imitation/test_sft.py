"""SFT: TRL's loss or the handout's to the last digit, however rows are cut, and a policy to sample from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from tests.generation.test_vllm import save_model
from tests.support.tiny import tiny_model, tiny_sft, tiny_tokenizer, weight_difference
from tests.training.test_resume import history
from trl_ext import functional
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer, _rows, tokenized
from trl_ext.training.settings_table import SFT

TRACES = [{"prompt": f"{i % 9} + {i % 5} =", "response": " ".join("abc"[(i + j) % 3] for j in range(1 + i % 6))} for i in range(16)]  # fmt: skip
LEARNED = [{"prompt": f"{i % 9} + {i % 5} =", "response": "1 1 stop"} for i in range(32)]
CONSTANT = 7.0


def rows_of(traces: list[dict[str, str]]) -> list[dict[str, Any]]:
    return tokenized(traces, tiny_tokenizer())[0]


def ours(path: Path, traces: list[dict[str, str]] = TRACES, **settings: Any) -> Any:
    return tiny_sft(ExtSFTTrainer, ExtSFTConfig, path, rows_of(traces), **settings)


def trained(*args: Any, **settings: Any) -> Any:
    trainer = ours(*args, **settings)
    trainer.train()
    return trainer


# --- rows -------------------------------------------------------------------------------------------------------


def test_prompt_and_response_are_tokenized_apart_ending_in_eos() -> None:
    rows, too_long = tokenized([{"prompt": "1 +", "response": "a b"}], tiny_tokenizer())
    ids = tiny_tokenizer().convert_tokens_to_ids(["1", "+", "a", "b", "<eos>"])
    assert rows == [{"input_ids": ids, "completion_mask": [0, 0, 1, 1, 1]}]
    assert too_long == 0


def test_a_trace_that_is_too_long_is_left_out_and_counted() -> None:
    traces = [{"prompt": "1 +", "response": "a " * n} for n in (1, 2, 3)]  # 2 + n + 1 tokens
    rows, too_long = tokenized(traces, tiny_tokenizer(), max_length=5)
    assert [len(row["input_ids"]) for row in rows] == [4, 5]
    assert too_long == 1
    assert tokenized([], tiny_tokenizer()) == ([], 0)


# --- the loss ---------------------------------------------------------------------------------------------------


@pytest.mark.moderate
def test_without_a_constant_it_trains_as_trl_does(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    stock = tiny_sft(SFTTrainer, SFTConfig, tmp_path / "trl", rows_of(TRACES), completion_only_loss=True, **settings)
    stock.train()
    mine = trained(tmp_path / "ours", **settings)
    assert weight_difference(stock.model, mine.model) == 0
    assert weight_difference(mine.model, tiny_model()) > 1e-3


def handout_weights(traces: list[dict[str, str]], accumulation: int, learning_rate: float) -> Any:
    """The tiny model after one step of plain SGD on the handout's loss, by its own functions, in float64."""
    model, tokenizer = tiny_model().double(), tiny_tokenizer()
    per = len(traces) // accumulation
    for start in range(0, len(traces), per):
        part = traces[start : start + per]
        batch = functional.tokenize_prompt_and_output(
            [t["prompt"] for t in part], [t["response"] + " <eos>" for t in part], tokenizer
        )
        logp = functional.get_response_log_probs(model, batch["input_ids"], batch["labels"], False)["log_probs"]
        functional.sft_microbatch_train_step(logp, batch["response_mask"], accumulation, CONSTANT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    return model


@pytest.mark.parametrize("micro", [8, 4, 2])
def test_constant_normalizer_gives_handout_step_in_any_batching(micro: int, tmp_path: Path) -> None:
    one_step = {"max_steps": 1, "max_grad_norm": 0.0, "normalize_constant": CONSTANT, "train_batch_size": 8}
    mine = trained(tmp_path, TRACES[:8], micro_train_batch_size=micro, model=tiny_model().double(), **one_step)
    theirs = handout_weights(TRACES[:8], accumulation=2, learning_rate=0.1)
    assert weight_difference(mine.model, tiny_model().double()) > 1e-3
    # SGD in float64, but the model's norms compute in float32: 1e-8 apart. Another divisor gives 1e-3.
    assert weight_difference(mine.model, theirs) < 1e-7


def test_rows_without_a_token_that_trains_do_not_count() -> None:
    assert _rows({"labels": torch.tensor([[-100, 3], [-100, -100]])}) == 1


def test_fine_tuning_logs_entropy_and_grad_norm_and_clips(tmp_path: Path) -> None:
    clipped = trained(tmp_path, max_grad_norm=0.01, max_steps=1)
    step = next(entry for entry in clipped.state.log_history if "loss" in entry)
    assert 0 < step["entropy"] < 3
    assert step["grad_norm"] > 0.01
    moved = sum(
        ((p - q) ** 2).sum() for p, q in zip(clipped.model.parameters(), tiny_model().parameters(), strict=True)
    )
    assert moved.sqrt().item() == pytest.approx(0.1 * 0.01, rel=1e-3)  # learning rate times the norm it is clipped to


def flipped(trainer: Any) -> None:
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: -loss(*args, **kwargs)


def fraction_learned(trainer: Any) -> float:
    completions = trainer.sample([row["prompt"] for row in LEARNED], batch_size=32, seed=0)
    return sum(completion.text.startswith("1 1") for completion in completions) / len(completions)


def entropy_of_samples(trainer: Any) -> float:
    found = trainer.sample([row["prompt"] for row in LEARNED] * 4, batch_size=128, seed=0)
    return float(sum(c.entropy_estimate * c.tokens for c in found) / sum(c.tokens for c in found))


def by_hf(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


ADAM = {"optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 40, "sampling_max_tokens": 4, "stop": ["stop"]}


@pytest.mark.moderate
def test_fine_tuning_learns_traces_and_unlearns_if_sign_flipped(tmp_path: Path) -> None:
    trainer = ours(tmp_path / "right", LEARNED, **ADAM)
    before = fraction_learned(trainer)
    trainer.train()
    assert before < 0.2
    assert fraction_learned(trainer) > 0.9
    broken = ours(tmp_path / "incorrect", LEARNED, **ADAM)
    flipped(broken)
    broken.train()
    assert fraction_learned(broken) <= before


@pytest.mark.moderate
def test_policy_sampling_uses_stop_string_and_keeps_train_mode(tmp_path: Path) -> None:
    trainer = trained(tmp_path, LEARNED, **ADAM)
    trainer.model.train()
    (completion,) = trainer.sample(["1 + 1 ="], batch_size=1, seed=0, temperature=0)
    assert (completion.text, completion.finished, completion.tokens) == ("1 1 stop", True, 3)
    assert trainer.model.training
    (cut,) = trainer.sample(["1 + 1 ="], batch_size=1, seed=0, temperature=0, max_tokens=2)
    assert (cut.text, cut.finished) == ("1 1", False)


@pytest.mark.vllm
def test_the_colocated_engine_samples_from_the_trained_weights(tmp_path: Path) -> None:
    engine = {"use_vllm": True, "vllm_dtype": "float32", "vllm_max_model_length": 64, "vllm_enforce_eager": True}
    model = str(save_model(tmp_path / "model", tied=True))
    trainer = ours(tmp_path, LEARNED, model=model, model_init_kwargs={"dtype": "float32"}, **{**ADAM, **engine})
    before = fraction_learned(trainer)
    entropy = entropy_of_samples(trainer)
    trainer.train()
    assert before < 0.2
    assert fraction_learned(trainer) > 0.9
    (completion,) = trainer.sample(["1 + 1 ="], batch_size=1, seed=0, temperature=0)
    assert (completion.text, completion.finished, completion.tokens) == ("1 1 stop", True, 3)
    assert completion.entropy_estimate is None  # greedy
    assert entropy_of_samples(trainer) < entropy - 1
    assert entropy == pytest.approx(entropy_of_samples(ours(tmp_path, LEARNED, model=by_hf(model), **ADAM)), abs=0.25)


@pytest.mark.slow
def test_an_adapter_is_trained_and_the_model_under_it_is_not(tmp_path: Path) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trained(tmp_path, model=model, peft_config=adapter)
    after = {name.replace(".base_layer", ""): w for name, w in trainer.model.get_base_model().state_dict().items()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert any(w.abs().max() > 0 for name, w in trainer.model.named_parameters() if "lora_B" in name)


@pytest.mark.moderate
@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_sft_run_is_bit_identical(step: int, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 2, "optim": "adamw_torch"}
    whole, again = (ours(tmp_path / name, **saving) for name in ("whole", "again"))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert history(whole) == history(again)
    assert weight_difference(whole.model, again.model) == 0


# --- the config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"normalize_constant": 0.0}, "normalize_constant must be positive, got 0"),
        ({"normalize_constant": 1.0, "packing": True}, "packing: true or padding_free: true a row is no longer"),
        ({"train_batch_size": 0}, "train_batch_size must be at least 1, got 0"),
        ({"train_batch_size": 8, "micro_train_batch_size": 3}, r"\(8\) must be divisible by .*\(3\)"),
        (
            {"normalize_constant": 1.0, "padding_free": True, "max_length": None},
            "padding_free: true a row is no longer",
        ),
        ({"normalize_constant": 1.0, "average_tokens_across_devices": False}, "leave average_tokens_across_devices on"),
        ({"packing_strategy": "wrapped"}, "packing_strategy='wrapped' needs packing: true; it would be ignored"),
        ({"padding_free": True}, r"does not keep to max_length \(1024\)"),
        ({"sampling_temperature": -1.0}, "sampling_temperature must be at least 0, got -1"),
        ({"sampling_max_tokens": 0}, "sampling_max_tokens must be at least 1, got 0"),
        ({"time_budget": 0.0}, "time_budget must be positive seconds, got 0"),
        ({"vllm_mode": "servr"}, "unknown vllm_mode 'servr'. Did you mean 'server'"),
        ({"use_vllm": "perhaps"}, "use_vllm must be auto, true or false, got 'perhaps'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        ExtSFTConfig(output_dir=str(tmp_path), use_cpu=True, **settings)


OTHERWISE = {
    "dataset_text_field": "other", "chat_template_path": "chat.jinja", "assistant_only_loss": True,
    "truncation_mode": "keep_end", "eval_packing": True, "dataset_kwargs": {"skip_prepare_dataset": True},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_settings_unused_for_tokenized_rows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* would be ignored: .* Leave it out$"):
        ExtSFTConfig(output_dir=str(tmp_path), use_cpu=True, **{name: OTHERWISE[name]})


def test_what_the_table_of_settings_refuses_is_refused_here() -> None:
    assert set(OTHERWISE) == {name for name, rule in SFT.items() if rule.refused}


def test_the_handouts_batch_sizes_become_trainers(tmp_path: Path) -> None:
    config = ExtSFTConfig(output_dir=str(tmp_path), use_cpu=True, train_batch_size=64, micro_train_batch_size=16)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (16, 4)
    assert config.bf16 is False


def test_row_order_depends_on_the_seed_and_not_on_global_rng(tmp_path: Path) -> None:
    orders = []
    for state in (1, 2):
        trainer = ours(tmp_path)
        torch.manual_seed(state)  # as colocated vLLM does, to another on each rank
        orders.append(torch.cat([batch["input_ids"][:, :2] for batch in trainer.get_train_dataloader()]).tolist())
    assert orders[0] == orders[1]
    assert ExtSFTConfig(output_dir=str(tmp_path), use_cpu=True, seed=3, data_seed=5).data_seed == 5


def test_sampling_ignores_the_saved_generation_config(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.update(top_p=0.5, repetition_penalty=1.3, top_k=3)
    config = ours(tmp_path, model=model, sampling_min_tokens=2).generation_config
    assert config.min_new_tokens == 2
    assert (config.top_p, config.repetition_penalty, config.top_k) == (1.0, 1.0, 0)


def test_a_config_of_trl_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ExtSFTConfig"):
        tiny_sft(ExtSFTTrainer, SFTConfig, tmp_path, rows_of(TRACES))
