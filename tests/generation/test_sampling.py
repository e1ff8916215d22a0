"""A model that arrives with every field of sampling set samples as one without: in each trainer, sampler and engine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

from tests.imitation.test_sft import ours as fine_tuning
from tests.support.tiny import fraction_of_ones, make_trainer, save_tiny, tiny_tokenizer
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.functional import log_generations
from trl_ext.generation.completion import Completion, Sampling
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.policy import overridden
from trl_ext.generation.samplers import HFSampler
from trl_ext.generation.sampling import (
    MACHINERY,
    NEUTRAL,
    NOT_FOR_ROLLOUTS,
    OF_MODEL,
    rollout_settings,
    samples_whole_distribution,
    sampling_config,
    saved_config,
)

# A value for each field that is not inherited, which changes what `generate` does with it or ends in an error.
ARRIVES: dict[str, Any] = {
    "max_length": 6, "max_new_tokens": 3, "min_length": 9, "min_new_tokens": 5, "max_time": 1e-9,
    "stop_strings": ["a"], "do_sample": True, "num_beams": 2, "num_beam_groups": 2, "num_return_sequences": 2,
    "early_stopping": True, "length_penalty": 3.0, "diversity_penalty": 0.5, "constraints": [1],
    "force_words_ids": [[5]], "penalty_alpha": 0.9, "dola_layers": "low", "use_mtp": True, "token_healing": True,
    "temperature": 0.1, "top_k": 2, "top_p": 0.2, "min_p": 0.9, "top_h": 0.1, "typical_p": 0.1,
    "epsilon_cutoff": 0.3, "eta_cutoff": 0.3, "watermarking_config": {"bias": 20.0, "greenlist_ratio": 0.5},
    "repetition_penalty": 1.8, "encoder_repetition_penalty": 5.0, "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1, "bad_words_ids": [[9], [10]], "suppress_tokens": [3, 4, 9],
    "begin_suppress_tokens": [3, 4, 5, 9, 11], "forced_bos_token_id": 7, "forced_eos_token_id": 7,
    "exponential_decay_length_penalty": [1, 9.0], "sequence_bias": [[[9], 20.0]], "guidance_scale": 3.0,
    "remove_invalid_values": True, "renormalize_logits": True, "is_assistant": True, "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.99,
    "prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 2, "assistant_early_exit": 1, "assistant_lookbehind": 2,
    "target_lookbehind": 2, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash", "use_cache": False,
    "cache_implementation": "static", "cache_config": {"nbits": 2}, "max_cache_len": 9, "low_memory": True,
    "prefill_chunk_size": 1, "disable_compile": False, "output_attentions": True, "output_hidden_states": True,
    "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip
# transformers reads neither from a file; it refuses one and deprecates the other.
NOT_IN_A_FILE = {"compile_config", "continuous_batching_config"}
OF_VLLM = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
PROMPTS = ["1 + 1 =", "2 + 3 =", "a b c", "8"] * 3


def arrive(folder: Path, fields: dict[str, Any]) -> Path:
    """The model in the folder gets these fields in its generation config."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0, "its_own": [7], **fields}))
    return folder


def arrived(folder: Path, fields: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(arrive(folder, fields))


def test_every_field_of_transformers_is_in_one_table() -> None:
    there = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}
    listed = [*OF_MODEL, *NEUTRAL, *MACHINERY]
    assert sorted(listed) == sorted(set(listed)) == sorted(there)
    assert ARRIVES.keys() == {*NEUTRAL, *MACHINERY} - NOT_IN_A_FILE
    defaults = GenerationConfig._get_default_generation_params()
    changes = {name for name, value in NEUTRAL.items() if value is None and defaults.get(name) not in (None, False)}
    only_drafts = {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
    lengths_of_ours = {"max_length", "temperature"}  # `max_new_tokens` comes first, and 1 is neutral
    assert changes == only_drafts | lengths_of_ours | {"assistant_lookbehind", "target_lookbehind"}


def test_no_field_of_sampling_is_inherited() -> None:
    settings = {"max_new_tokens": 10, "do_sample": True}
    plain = sampling_config(GenerationConfig(), settings)
    for name, value in {**ARRIVES, "compile_config": CompileConfig()}.items():
        of_model = GenerationConfig()
        setattr(of_model, name, value)
        assert sampling_config(of_model, settings) == plain, name
    for name, value in {"eos_token_id": [5, 6], "pad_token_id": 4, "bos_token_id": 2, "its_own": [7]}.items():
        assert getattr(sampling_config(GenerationConfig(**{name: value}), settings), name) == value


def test_sampler_takes_no_field_that_a_model_arrives_with(tmp_path: Path) -> None:
    def drawn(fields: dict[str, Any], temperature: float) -> list[Completion]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampling = Sampling(temperature, max_tokens=10, stop=("stop",), seed=3)
            return HFSampler(str(arrive(tmp_path, fields)), sampling, 6)(PROMPTS, range(len(PROMPTS)))

    save_tiny(tmp_path)
    for temperature in (0.0, 1.0):
        plain = drawn({}, temperature)
        assert len({c.text for c in plain}) > 2
        assert max(c.tokens for c in plain) > 6
        assert drawn({**ARRIVES, **OF_VLLM}, temperature) == plain


def test_every_end_token_of_model_and_tokenizer_ends(tmp_path: Path) -> None:
    """As in the trainers, and as vLLM has it."""
    save_tiny(tmp_path)
    sampler = HFSampler(str(arrive(tmp_path, {"eos_token_id": [5, 6]})), Sampling(), 8)
    assert sampler.config.eos_token_id == [1, 5, 6]
    assert sampler.parameters()["eos_token_id"] == [1, 5, 6]


def test_generation_takes_nothing_but_the_config_it_is_given(tmp_path: Path) -> None:
    model, config = arrived(save_tiny(tmp_path), {}), GenerationConfig(max_new_tokens=8, eos_token_id=1, pad_token_id=0)
    tokenizer, prompts = tiny_tokenizer(), [[9, 7, 10, 8], [3]]
    plain = hf_generate(model, tokenizer, prompts, config)
    hostile = arrived(tmp_path, ARRIVES)
    own = hostile.generation_config
    assert hf_generate(hostile, tokenizer, prompts, config) == plain
    assert hostile.generation_config is own
    graded = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
    asked = {"tokenizer": tokenizer, "sampling": {"max_new_tokens": 8, "do_sample": False}}
    found = [log_generations(PROMPTS[:2], None, [0, 0], lambda *_: graded, model=m, **asked) for m in (model, hostile)]
    assert found[0][0] == found[1][0]


def trainers(folder: Path, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    """GRPO with TRL's way to generate and with ours, and SFT, each of a model that arrives with these fields."""
    made = {}
    for name, stop in (("grpo", None), ("grpo with a stop string", ["stop"])):
        settings = {"stop": stop, "model": arrived(folder, fields), "max_completion_length": 10, **more}
        made[name] = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, folder / name, fraction_of_ones, **settings)
    settings = {"stop": ["stop"], "model": arrived(folder, fields), "sampling_max_tokens": 10, **more}
    made["sft"] = fine_tuning(folder / "sft", **settings)
    return made


@pytest.mark.moderate
def test_trainers_take_no_field_that_a_model_arrives_with(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    plain, hostile = trainers(tmp_path, {}), trainers(tmp_path, {**ARRIVES, **OF_VLLM})
    for name, trainer in hostile.items():
        for temperature in (None, 0.0):
            theirs, mine = (t.sample(PROMPTS, 6, 3, temperature) for t in (plain[name], trainer))
            assert mine == theirs, (name, temperature)
            assert len({c.text for c in mine}) > 1
        assert trainer.sampling_parameters() == plain[name].sampling_parameters(), name
    told = hostile["grpo with a stop string"].sampling_parameters(0.0, 4)
    assert told == {
        "do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 4, "eos_token_id": [1],
        "pad_token_id": 0, "stop": ["stop"],
    }  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("adapter", [False, True])
def test_model_is_saved_with_what_it_is_sampled_with(adapter: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    lora = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")} if adapter else {}
    expected = {
        "do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 10, "eos_token_id": 1, "pad_token_id": 0,
        "its_own": [7],
    }  # fmt: skip
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    for name, trainer in trainers(tmp_path, {**ARRIVES, **OF_VLLM}, **saving, **lora).items():
        folder = Path(trainer.args.output_dir)
        trainer.train()
        trainer.save_final_model()
        for place in (folder, folder / "checkpoint-1"):
            saved = json.loads((place / "generation_config.json").read_text())
            stop = {} if name == "grpo" else {"stop_strings": ["stop"]}
            assert {k: v for k, v in saved.items() if k != "transformers_version"} == {**expected, **stop}, place


def test_saved_model_has_trls_own_settings_too(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    given = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 0.7}
    extra = {"length_penalty": -0.1, "suppress_tokens": [3], "no_repeat_ngram_size": 4}  # the first is of beams
    settings = {**given, "generation_kwargs": extra, "model": arrived(tmp_path, {"typical_p": 0.1})}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, **settings)
    assert trainer.generation_config.length_penalty == -0.1
    assert {**given, "suppress_tokens": [3], "no_repeat_ngram_size": 4}.items() <= trainer.sampling_parameters().items()
    trainer.save_final_model()
    saved = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert {**given, "suppress_tokens": [3], "no_repeat_ngram_size": 4}.items() <= saved.items()
    assert not {"typical_p", "length_penalty", "disable_compile"} & saved.keys()


@pytest.mark.nightly  # test_both_engines_settings_have_the_same_fields and those of decoding are of each push
@pytest.mark.slow  # forty trainings of a step
def test_every_field_given_to_hf_generate_is_used_or_refused(tmp_path: Path) -> None:
    """Whatever TRL's trainer takes as `generation_kwargs` trains here, too."""
    save_tiny(tmp_path)
    for name in {*NEUTRAL} & {*ARRIVES}:
        for stop in (None, ["stop"]):
            given = {"stop": stop, "generation_kwargs": {name: ARRIVES[name]}, "max_completion_length": 10}
            settings = {"model": arrived(tmp_path, {}), "max_steps": 1, **given}
            if name in NOT_FOR_ROLLOUTS:
                with pytest.raises(ValueError, match=f"generation_kwargs: {name} {NOT_FOR_ROLLOUTS[name][:9]}"):
                    make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, **settings)
                continue
            trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "run", fraction_of_ones, **settings)
            trainer.train()
            assert trainer.state.global_step == 1, name
    with pytest.raises(ValueError, match=r"HF generate 'repetition_penality'\. Did you mean 'repetition_penalty'\?"):
        ExtGRPOConfig(str(tmp_path), use_cpu=True, generation_kwargs={"repetition_penality": 1.1})


def test_both_engines_settings_have_the_same_fields(tmp_path: Path) -> None:
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "sampling_min_tokens": 4, "top_p": 0.9}
    hf = ExtGRPOConfig(**common, temperature=0.7, top_k=0, generation_kwargs={"repetition_penalty": 1.2})
    kwargs = {"repetition_penalty": 1.2, "seed": 3, "presence_penalty": 0.5}
    vllm = ExtGRPOConfig(**common, temperature=0.7, top_k=-1, generation_kwargs=kwargs, use_vllm=True)
    assert rollout_settings(vllm) == {**rollout_settings(hf), "presence_penalty": 0.5}
    saved = saved_config(sampling_config(GenerationConfig(), rollout_settings(vllm)))
    told = {"min_new_tokens": 4, "temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.9}
    assert told.items() <= saved.to_diff_dict().items()


@pytest.mark.parametrize("greedy", [False, True])
def test_saved_config_is_one_that_transformers_saves(greedy: bool, tmp_path: Path) -> None:
    settings = {name: value for name, value in ARRIVES.items() if name not in ("num_return_sequences", "num_beams")}
    config = sampling_config(GenerationConfig(), {**settings, "do_sample": not greedy})
    saved_config(config, ["stop"]).save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).do_sample is not greedy


def test_cuts_of_every_kind_leave_tokens_out() -> None:
    whole = sampling_config(GenerationConfig(), {"do_sample": True, "temperature": 0.7})
    assert samples_whole_distribution(whole)
    cuts = ("top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
    for name in (*cuts, "num_beams"):
        with overridden(whole, {name: ARRIVES[name]}):
            assert not samples_whole_distribution(whole), name
    with overridden(whole, {"min_p": 0.0, "repetition_penalty": 1.1}):  # of the scores that are recorded
        assert samples_whole_distribution(whole)


def test_validation_decides_where_generation_kwargs_do_too() -> None:
    """TRL lets them win over the engine's settings, of a validation, too."""
    kwargs = {"temperature": 0.5, "max_tokens": 9, "seed": 3}
    engine = SimpleNamespace(temperature=1.0, max_completion_length=12, generation_kwargs=kwargs)
    trainer = SimpleNamespace(use_vllm=True, vllm_generation=engine)
    with ExtGRPOTrainer._sampling(trainer, 0.0, None):
        assert (engine.temperature, engine.generation_kwargs) == (0.0, {"max_tokens": 9, "seed": 3})
    with ExtGRPOTrainer._sampling(trainer, None, 4):
        assert (engine.max_completion_length, engine.generation_kwargs) == (4, {"temperature": 0.5, "seed": 3})
    assert engine.generation_kwargs == kwargs
