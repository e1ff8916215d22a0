"""Every setting has an entry in the table, every entry is what happens, and the page says the same."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import BitsAndBytesConfig, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig
from trl.generation import vllm_generation

from scripts.docs_pages import HEADLINES, RULES, effects_of
from tests.support.tiny import ends_early, make_trainer, no_engine_steps, prompts, save_tiny, tiny_sft, tiny_tokenizer
from tests.support.versions import needs_vllm
from trl_ext.algorithms.objective import keeps_on_policy
from trl_ext.algorithms.types import LossInputs
from trl_ext.compat.lazy_vllm import load_vllm
from trl_ext.generation.vllm import ColocatedEngine
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.trainer import ExtGRPOTrainer
from trl_ext.imitation.expert_iteration import ExpertIterationConfig
from trl_ext.imitation.sft import ExtSFTConfig, ExtSFTTrainer, tokenized
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.expert_iteration import ExpertIterationTask
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.model_settings import check_model_settings, choose_attention, init_kwargs, loaded_as
from trl_ext.recipes.sft import SFTTask
from trl_ext.training.settings_table import MODEL, TRL
from trl_ext.training.trl_settings import check_needs

IN_SOME_VERSIONS = {"activation_checkpointing", "activation_checkpointing_kwargs"}  # of transformers, newer ones
TESTS = Path(__file__).parents[1]
EFFECTS_OF = {name: effects_of(name) for name in HEADLINES}
OF_SFT = [
    "SFTConfig",
    "ExtSFTConfig",
    "SFTTask",
    "ExpertIterationConfig",
    "Evaluation",
    "BestOfN",
]  # the rest is GRPO's
EVERY = {n: effect for name in HEADLINES if name not in OF_SFT for n, effect in EFFECTS_OF[name].items()}


def config(**settings: Any) -> ExtGRPOConfig:
    return ExtGRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": "none", **settings})


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(of: type) -> set[str]:
    return {f.name for f in dataclasses.fields(of)}


# The table.


def test_every_field_has_an_entry_and_no_entry_is_left_over() -> None:
    trainer, trl, sft, task = map(names, (TrainingArguments, GRPOConfig, ExtSFTConfig, GRPOTask))
    fields = {
        "TrainingArguments": trainer,
        "GRPOConfig": trl - trainer,
        "ModelConfig": names(ModelConfig),
        "ExtGRPOConfig": names(ExtGRPOConfig) - trl,
        "GRPOTask": task,
        "SFTConfig": names(SFTConfig) - trainer,
        "ExtSFTConfig": sft - names(SFTConfig) - (names(ExtGRPOConfig) - trl),
        "SFTTask": names(SFTTask) - task,
        "ExpertIterationConfig": names(ExpertIterationConfig) - sft,
        "Evaluation": names(Evaluation) - task,
        "BestOfN": names(BestOfN) - names(Evaluation),
    }
    fields["TrainingArguments"] |= IN_SOME_VERSIONS
    assert {name: set(effects) for name, effects in EFFECTS_OF.items()} == fields
    assert names(ExpertIterationTask) <= task


def test_an_entry_stands_once() -> None:
    listed = yaml.safe_load((TESTS.parent / "docs/site/trl_settings.yaml").read_text(encoding="utf-8"))
    assert list(listed) == list(HEADLINES)
    for name, part in listed.items():
        found = [
            setting for kind in part for key in part[kind] for setting in part[kind][key].split() if kind != "remark"
        ]
        by_rule = [setting for setting, rule in RULES.get(name, {}).items() if not rule.needs]
        assert len(found + by_rule) == len({*found, *by_rule}), name
        remarks = {setting for settings in part.get("remark", {}).values() for setting in settings.split()}
        assert remarks <= {setting for settings in part["shown by"].values() for setting in settings.split()}, name


def test_an_entry_shows_what_it_says_or_has_a_reason() -> None:
    for name, effect in [pair for part in EFFECTS_OF.values() for pair in part.items()]:
        assert effect.remark or effect.verdict == "honored", name
        named = re.match(r"((?:\w+/)*test_\w+)::(test_\w+)$", effect.shown_by)
        assert "::" not in effect.shown_by or named, name
        if named:
            assert f"def {named[2]}(" in (TESTS / f"{named[1]}.py").read_text(encoding="utf-8"), name
    # by a run: one of the two below; else `shown_by` says which test, or why not
    assert {name for name, effect in EVERY.items() if effect.shown_by == "a run"} == {*EFFECTS, *NONE}
    assert {name for name, effect in EVERY.items() if effect.verdict == "taken over"} == set(TAKEN)
    assert {name for name, effect in EVERY.items() if effect.verdict == "refused"} == set(GIVEN)
    by_run = {(part, name) for part in OF_SFT for name, e in EFFECTS_OF[part].items() if e.shown_by == "a run"}
    assert by_run == {("SFTConfig", name) for name in (*SFT_EFFECTS, *SFT_NONE)}


# Refused.

GIVEN: dict[str, Any] = {
    "auto_find_batch_size": True, "loss_type": "grpo",
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_settings_refused_by_table_are_refused_with_axes(name: str) -> None:
    for ours in ({"preset": "dapo"}, {"advantage": "raw"}, {"cliprange": 0.2}):
        said = refusal(lambda ours=ours: config(**ours, **{name: GIVEN[name]}))  # type: ignore[misc]
        if name in TRL:
            assert said == f"{name}={GIVEN[name]!r} next to a preset or an axis: {TRL[name].note}"
        assert name in said
    if name in TRL:
        assert getattr(config(**{name: GIVEN[name]}), name) == GIVEN[name]  # without either it is TRL's


VLLM = {"use_vllm": True, "vllm_mode": "colocate"}
SERVED = {"use_vllm": True, "vllm_mode": "server"}


@needs_vllm
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_estimator": "k1"}, "kl_estimator='k1' needs a preset or an axis; it would be ignored without"),
        ({"kl_estimator": "k1", "preset": "dapo"}, "kl_estimator='k1' needs beta above 0; it would be ignored without"),
        ({"micro_batch_tokens": 9}, "micro_batch_tokens=9 needs a preset or an axis; it would be ignored without"),
        (
            {"micro_batch_tokens": 9, "preset": "dapo", "dynamic_micro_batches": False},
            "micro_batch_tokens=9 needs dynamic_micro_batches: true; it would be ignored without",
        ),
        (
            {"sampler_weight": "token", "preset": "dapo"},
            "sampler_weight='token' needs use_vllm: true; it would be ignored without",
        ),
        (
            {"sampler_weight": "token", "preset": "dppo", **VLLM},
            "sampler_weight='token' would be ignored, because policy_loss 'dppo_tv' corrects for the sampler itself; drop "
            "sampler_weight",
        ),
        (
            {"sampler_rejection": "token_k3", "preset": "dapo", "vllm_importance_sampling_clip_max": 2.0, **VLLM},
            "vllm_importance_sampling_clip_max=2.0 would be ignored next to sampler_rejection='token_k3'; set one",
        ),
        (
            {"preset": "vespo", "vllm_importance_sampling_mode": "token_mask", **VLLM},
            "vllm_importance_sampling_mode='token_mask' would be ignored next to policy_loss='vespo'; set one",
        ),
        (
            {"old_log_probs": "sampler", "preset": "dapo"},
            "old_log_probs='sampler' needs an engine whose log-probabilities are used: set use_vllm: true, or "
            "old_log_probs: policy",
        ),
        (
            {"old_log_probs": "sampler", "preset": "dapo", "vllm_importance_sampling_correction": False, **VLLM},
            "old_log_probs='sampler' needs an engine whose log-probabilities are used: set "
            "vllm_importance_sampling_correction: true, or old_log_probs: policy",
        ),
        (
            {"old_log_probs": "sampler", "preset": "no_baseline", **VLLM},
            "old_log_probs='sampler' would be ignored, because policy_loss 'reinforce' has no ratio to the old "
            "log-probabilities; set old_log_probs: policy, where sampler_weight corrects, or use importance_ratio",
        ),
        (
            {"old_log_probs": "sampler", "preset": "vespo", **VLLM},
            "old_log_probs='sampler' would be ignored, because policy_loss 'vespo' corrects for the sampler itself; set "
            "old_log_probs: policy",
        ),
        *(
            (
                {"old_log_probs": "sampler", "preset": "dapo", name: value, **VLLM},
                f"{name}={value!r} next to old_log_probs='sampler': the policy loss's ratio is to the sampler already; "
                f"leave out {name}, or set old_log_probs: policy",
            )
            for name, value in {
                "sampler_weight": "token",
                "sampler_rejection": "token_k3",
                "sampler_weight_options": {"clip_max": 3.0},
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_max": 2.0,
            }.items()
        ),
        (
            {"rollout_ahead": 1, "preset": "dapo", "vllm_importance_sampling_correction": False, **SERVED},
            "rollout_ahead=1 needs a correction for old samples (leave out vllm_importance_sampling_correction: false; "
            "sampler_weight: unweighted with sampler_rejection: keep_all does without), or set rollout_ahead: 0",
        ),
        (
            {"old_log_probs": "sampler", **VLLM},
            "old_log_probs='sampler' needs a preset or an axis; it would be ignored without",
        ),
        ({"old_log_probs": "both", "preset": "dapo"}, "unknown value of old_log_probs 'both'. Known: policy, sampler"),
        (
            {"entropy_target": 0.5, "preset": "dapo"},
            "entropy_target=0.5 needs use_adaptive_entropy: true; it would be ignored without",
        ),
        (
            {"ref_model_mixup_alpha": 0.9, "preset": "dapo", "beta": 0.1},
            "ref_model_mixup_alpha=0.9 needs sync_ref_model: true; it would be ignored without",
        ),
        (
            {"sync_ref_model": True, "preset": "dapo"},
            "sync_ref_model=True needs beta above 0; it would be ignored without",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_with_what_it_needs(settings: dict[str, Any], message: str) -> None:
    assert refusal(lambda: config(**settings)) == message


def test_what_needs_another_setting_is_taken_with_it() -> None:
    config(preset="dapo", kl_estimator="k1", beta=0.1, micro_batch_tokens=9)
    config(preset="dapo", beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.9)
    config(ref_model_mixup_alpha=0.9)  # without a preset or an axis it is TRL's
    config(preset="no_baseline", old_log_probs="policy")


@needs_vllm
def test_the_ratio_to_the_sampler_leaves_no_correction() -> None:
    same = {"sampler_weight": "unweighted", "sampler_rejection": "keep_all"}  # as a run's own record has them
    for given in ({}, same):
        found = config(preset="dapo", old_log_probs="sampler", **given, **VLLM)
        assert {name: getattr(found, name) for name in same} == same
        assert found.sampler_correction() is None
    assert config(preset="dapo", **VLLM).sampler_correction() is not None


# Taken over: TRL's words on the left are the axes' on the right; `test_parity` trains with them next to TRL itself.

TAKEN: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "epsilon": [
        ({"epsilon": 0.1}, {"policy_loss_options": {"eps_low": 0.1, "eps_high": 0.1}}),
        ({"preset": "gspo", "epsilon": 0.1}, {"preset": "gspo", "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.1}}),
        (
            {"epsilon": 0.1, "epsilon_high": 0.3, "policy_loss_options": {"eps_low": 0.1}},
            {"policy_loss_options": {"eps_low": 0.1, "eps_high": 0.3}},
        ),
    ],
    "epsilon_high": [
        ({"epsilon_high": 0.4}, {"policy_loss_options": {"eps_low": 0.2, "eps_high": 0.4}}),
        ({"policy_loss": "cispo", "epsilon_high": 3.0}, {"policy_loss": "cispo", "policy_loss_options": {"ratio_max": 3.0}}),
    ],
    "delta": [({"delta": 1.5}, {"policy_loss_options": {"dual_clip": 1.5}})],
    "sapo_temperature_pos": [
        ({"policy_loss": "sapo", "sapo_temperature_pos": 2.0}, {"policy_loss": "sapo", "policy_loss_options": {"temperature_pos": 2.0}}),
    ],
    "sapo_temperature_neg": [
        ({"policy_loss": "sapo", "sapo_temperature_neg": 2.0}, {"policy_loss": "sapo", "policy_loss_options": {"temperature_neg": 2.0}}),
    ],
    **{
        f"vespo_{option}": [
            ({"policy_loss": "vespo", f"vespo_{option}": 1.5}, {"policy_loss": "vespo", "policy_loss_options": {option: 1.5}})
        ]
        for option in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "scale_rewards": [
        ({"scale_rewards": True}, {}), ({"scale_rewards": "true"}, {}), ({"scale_rewards": "group"}, {}),
        ({"scale_rewards": False}, {"advantage": "group_mean"}), ({"scale_rewards": "none"}, {"advantage": "group_mean"}),
        ({"scale_rewards": "batch"}, {"advantage": "batch_std", "advantage_options": {"eps": 1e-4}}),
        ({"scale_rewards": "batch", "advantage_eps": 0.1}, {"advantage": "batch_std", "advantage_options": {"eps": 0.1}}),
    ],
    "multi_objective_aggregation": [
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            {"advantage": "gdpo", "advantage_options": {"eps": 1e-4}},
        ),
    ],
    "importance_sampling_level": [
        ({"importance_sampling_level": "sequence"}, {"policy_loss": "gspo", "policy_loss_options": {"eps_low": 0.2, "eps_high": 0.28}}),
        (
            {"policy_loss": "ppo_clip", "policy_loss_options": {"eps_low": 0.1}, "importance_sampling_level": "sequence"},
            {"policy_loss": "gspo", "policy_loss_options": {"eps_low": 0.1, "eps_high": 0.28}},
        ),
        (
            {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            {"policy_loss": "gspo", "policy_loss_options": {"eps_low": 3e-4, "eps_high": 4e-4}},
        ),
        ({"preset": "gspo", "importance_sampling_level": "sequence"}, {"preset": "gspo"}),
    ],
}  # fmt: skip
AXES = [f"{axis}{options}" for axis in ("advantage", "policy_loss", "aggregation") for options in ("", "_options")]


@pytest.mark.parametrize(("trls", "axes"), [pair for pairs in TAKEN.values() for pair in pairs])
def test_trls_words_are_taken_over_into_the_axes(trls: dict[str, Any], axes: dict[str, Any]) -> None:
    theirs, ours = (config(**{"preset": "dapo", **settings}) for settings in (trls, axes))
    assert [getattr(theirs, axis) for axis in AXES] == [getattr(ours, axis) for axis in AXES]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss": "reinforce", "epsilon": 0.1},
         "epsilon=0.1 next to a preset or an axis: policy_loss 'reinforce' has no option eps_low. It has: none"),
        ({"policy_loss": "cispo", "delta": 1.5}, "policy_loss 'cispo' has no option dual_clip. It has: ratio_max"),
        ({"importance_sampling_level": "sequence", "delta": 1.5}, "delta=1.5 next to a preset or an axis: policy_loss 'gspo'"),
        ({"sapo_temperature_pos": 2.0}, "policy_loss 'ppo_clip' has no option temperature_pos. It has: eps_low, eps_high"),
        ({"epsilon": 0.1, "policy_loss_options": {"eps_low": 0.3}},
         "epsilon=0.1 and policy_loss_options eps_low=0.3 contradict each other; set one of them"),
        ({"epsilon": 0.1, "cliprange": 0.3}, "epsilon=0.1 and policy_loss_options eps_low=0.3 contradict each other"),
        ({"scale_rewards": "batch", "advantage": "raw"},
         "scale_rewards='batch' means advantage 'batch_std', but advantage is 'raw'"),
        ({"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}, "means advantage 'gdpo', but"),
        ({"scale_rewards": "btch"}, "unknown value of scale_rewards 'btch'. Did you mean 'batch'? Known: batch, group, none"),
        ({"multi_objective_aggregation": "sum"}, "unknown value of multi_objective_aggregation 'sum'"),
        ({"policy_loss": "sapo", "importance_sampling_level": "sequence"},
         "policy_loss 'sapo' has no such form; use ppo_clip or gspo"),
        ({"importance_sampling_level": "sequence", "beta": 0.1},
         "importance_sampling_level='sequence' with beta=0.1 and use_bias_correction_kl=True next to a preset or an axis"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_refused_with_the_axis(settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: config(**{"preset": "dapo", **settings}))


def test_the_off_policy_mask_is_trls() -> None:
    torch.manual_seed(0)
    objective = config(preset="grpo_clip", off_policy_mask_threshold=0.2).objective()
    assert objective.off_policy_threshold == 0.2
    logp, sampled = -torch.rand(2, 40, 5, dtype=torch.float64)
    sampled[::3, 2] = torch.nan
    mask = torch.arange(5) < torch.arange(40)[:, None] % 6  # rows without a token too
    advantage = torch.randint(-1, 2, (40, 1)).double()
    x = LossInputs(logp, sampled.nan_to_num(), advantage, mask)
    theirs = GRPOTrainer.get_off_policy_mask(advantage, logp, sampled, mask, 0.2)
    assert 0 < theirs.sum() < 40
    assert keeps_on_policy(x, sampled, 0.2).equal(theirs.bool())


# Honored, or without an effect: a run with the setting next to one without it.

ADAM = {"optim": "adamw_torch"}
SAVED = {"save_strategy": "steps", "save_steps": 1}
TWICE = {"num_iterations": 2}
KL = {"beta": 0.1, "num_iterations": 2}
SYNCED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
ADAPTIVE = {
    "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.1, "entropy_target": 9.0,
}  # fmt: skip
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": 4}
# By name: its value, and what both runs have besides.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "per_device_train_batch_size": (8, {}), "num_train_epochs": (2.0, {"max_steps": -1, "num_train_epochs": 1.0}),
    "max_steps": (1, {}), "learning_rate": (0.05, {}), "lr_scheduler_type": ("linear", {}),
    "lr_scheduler_kwargs": (
        {"min_lr": 0.05}, {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.01}}
    ),
    "warmup_steps": (2, {"lr_scheduler_type": "constant_with_warmup"}), "optim": ("adamw_torch", {}),
    "optim_args": ("momentum=0.9", {}), "weight_decay": (0.1, {}), "adam_beta1": (0.1, ADAM), "adam_beta2": (0.1, ADAM),
    "adam_epsilon": (0.1, ADAM), "gradient_accumulation_steps": (2, {}), "max_grad_norm": (0.01, {}),
    "bf16": (True, {}), "neftune_noise_alpha": (5.0, {}), "logging_strategy": ("no", {}), "logging_steps": (2, {}),
    "logging_first_step": (True, {"logging_steps": 2}), "save_strategy": ("steps", {}), "save_steps": (2, SAVED),
    "save_only_model": (True, SAVED), "save_total_limit": (1, SAVED), "seed": (8, {}),
    "eval_strategy": ("no", EVALUATED), "eval_steps": (2, EVALUATED), "eval_delay": (2, EVALUATED),
    "eval_on_start": (True, EVALUATED), "per_device_eval_batch_size": (4, EVALUATED),
    "num_generations_eval": (2, EVALUATED),
    "num_generations": (2, {}), "max_completion_length": (8, {}), "shuffle_dataset": (False, {}),
    "generation_batch_size": (32, {}), "steps_per_generation": (8, {}), "temperature": (0.5, {}), "top_p": (0.3, {}),
    "top_k": (2, {}), "min_p": (0.2, {}), "generation_kwargs": ({"min_new_tokens": 9}, {}),
    "repetition_penalty": (3.0, {}), "num_iterations": (2, {}), "mask_truncated_completions": (True, {}),
    "cast_lm_head_to_fp32": (True, {"bf16": True}), "off_policy_mask_threshold": (0.001, TWICE),
    "beta": (0.1, {"from_path": True}), "use_bias_correction_kl": (False, KL),
    "ref_model_sync_steps": (2, SYNCED), "ref_model_mixup_alpha": (0.1, SYNCED), "reward_weights": ([1.0, -1.0], {"rewards": 2}),
    "disable_dropout": (True, {"peft_config": 0.5}), "log_completions": (True, {}), "entropy_coef": (0.1, {}), "top_entropy_quantile": (0.5, {}),
    "use_adaptive_entropy": (True, {"entropy_coef": 0.1}), "entropy_coef_min": (0.5, ADAPTIVE),
    "entropy_coef_max": (0.15, ADAPTIVE), "entropy_coef_delta": (0.4, ADAPTIVE), "entropy_target": (0.1, ADAPTIVE),
    "preset": ("dr_grpo", {}), "advantage": ("raw", {}), "advantage_options": ({"eps": 1.0}, {}),
    "policy_loss": ("importance_ratio", TWICE), "policy_loss_options": ({"eps_low": 0.001}, TWICE),
    "aggregation": ("token_mean", {}), "aggregation_options": ({"normalize_constant": 3.0}, {"aggregation": "constant"}),
    "kl_estimator": ("k1", KL), "stop": (["stop"], {}), "sampling_min_tokens": (9, {}),
}  # fmt: skip
NONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "average_tokens_across_devices": (False, {}),
    "data_seed": (8, {}), "remove_unused_columns": (True, {}), "dataloader_drop_last": (True, {}),
    "train_sampling_strategy": ("sequential", {}), "length_column_name": ("answer", {}), "do_train": (True, {}),
    "do_predict": (True, {}), "label_smoothing_factor": (0.1, {}), "label_names": (["answer"], {}),
    "prediction_loss_only": (True, EVALUATED), "eval_do_concat_batches": (False, EVALUATED),
    "eval_use_gather_object": (True, EVALUATED), "eval_accumulation_steps": (1, EVALUATED),
    "include_for_metrics": (["loss"], EVALUATED), "batch_eval_metrics": (True, EVALUATED),
}  # fmt: skip
SECONDS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime", "total_flos",
           "eval_samples_per_second", "eval_steps_per_second", "step_time", "rollout_time", "sync_time"}  # fmt: skip


SFT_EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_length": (3, {"packing": True}), "packing": (True, {}), "packing_strategy": ("wrapped", {"packing": True}),
    "padding_free": (True, {"max_length": None}), "completion_only_loss": (False, {}), "loss_type": ("dft", {}),
    "shuffle_dataset": (True, {}),
}  # fmt: skip
SFT_NONE: dict[str, tuple[Any, dict[str, Any]]] = {"eos_token": ("stop", {}), "pad_token": ("stop", {})}


def longer(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def observed(folder: Path, model: Path, **settings: Any) -> tuple[Any, ...]:
    """Weights, metrics and files of a run of two steps."""
    given: dict[str, Any] = {"preset": "grpo_clip", "max_steps": 2, **settings}
    if given.pop("from_path", False) or given.get("beta"):
        given["model"] = str(model)  # TRL loads the reference model from a path
    if "eval_dataset" in given:
        given["eval_dataset"] = prompts(given["eval_dataset"])
    if "peft_config" in given:
        dropout = given["peft_config"]
        given["peft_config"] = LoraConfig(target_modules=["q_proj"], lora_dropout=dropout, init_lora_weights=False)
    rewards = [ends_early, longer] if given.pop("rewards", 1) == 2 else ends_early
    torch.manual_seed(0)
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, folder, rewards, **given)
    trainer.train()
    weights = hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in trainer.model.parameters()))
    logs = [{k: v for k, v in entry.items() if k not in SECONDS} for entry in trainer.state.log_history]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return weights.hexdigest(), json.dumps(logs, default=str), files


Plain = Callable[[dict[str, Any]], tuple[Any, ...]]


def once(train: Callable[..., tuple[Any, ...]], top: Path) -> Plain:
    """What a run with these settings comes to: trained twice, which has to agree, for all tests that ask for it."""
    known: dict[str, tuple[Any, ...]] = {}

    def of(both: dict[str, Any]) -> tuple[Any, ...]:
        key = json.dumps(both, sort_keys=True)
        if key not in known:
            known[key] = train(top / f"{len(known)}a", **both)
            assert known[key] == train(top / f"{len(known)}b", **both)
        return known[key]

    return of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def without(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return once(functools.partial(observed, model=saved), tmp_path_factory.mktemp("without"))


@pytest.fixture(scope="module")
def fine_tuned_without(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return once(fine_tuned, tmp_path_factory.mktemp("fine_tuned"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EFFECTS, *NONE])
def test_setting_changes_a_run_exactly_where_the_table_says_so(
    name: str, without: Plain, saved: Path, tmp_path: Path
) -> None:
    value, both = (EFFECTS | NONE)[name]
    with_it = observed(tmp_path, saved, **{**both, name: value})
    assert (with_it == without(both)) == (name in NONE)


def fine_tuned(folder: Path, **settings: Any) -> tuple[Any, ...]:
    """Weights and metrics of an SFT run of two steps."""
    traces = [{"prompt": f"{i % 9} +", "response": " ".join("abc"[: 1 + i % 3])} for i in range(16)]
    rows = tokenized(traces, tiny_tokenizer())[0]
    trainer = tiny_sft(ExtSFTTrainer, ExtSFTConfig, folder, rows, **{"max_steps": 2, **settings})
    trainer.train()
    weights = hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in trainer.model.parameters()))
    logs = [{k: v for k, v in entry.items() if k not in SECONDS} for entry in trainer.state.log_history]
    return weights.hexdigest(), json.dumps(logs, default=str)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*SFT_EFFECTS, *SFT_NONE])
def test_setting_changes_fine_tuning_where_the_table_says_so(
    name: str, fine_tuned_without: Plain, tmp_path: Path
) -> None:
    value, both = (SFT_EFFECTS | SFT_NONE)[name]
    assert (fine_tuned(tmp_path, **{**both, name: value}) == fine_tuned_without(both)) == (name in SFT_NONE)


# The engine's settings.

ENGINE: dict[str, tuple[Any, str]] = {  # by setting: a value, and the keyword of vLLM's `LLM`
    "vllm_model_impl": ("transformers", "model_impl"), "vllm_enable_sleep_mode": (True, "enable_sleep_mode"),
    "vllm_gpu_memory_utilization": (0.17, "gpu_memory_utilization"), "vllm_max_model_length": (77, "max_model_len"),
    "vllm_max_num_seqs": (5, "max_num_seqs"), "vllm_dtype": ("bfloat16", "dtype"),
    "vllm_quantization": ("fp8", "quantization"), "vllm_enable_prefix_caching": (False, "enable_prefix_caching"),
    "vllm_enforce_eager": (torch.cuda.is_available(), "enforce_eager"),  # not the default
}  # fmt: skip


class Started(BaseException):  # an Exception would be taken for a fault of the engine
    """Carries what vLLM's `LLM` is called with by `VLLMGeneration._init_vllm` of trl/generation/vllm_generation.py."""


def started_with(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> dict[str, Any]:
    def llm(**given: Any) -> None:
        raise Started(given)

    monkeypatch.setattr(vllm_generation, "LLM", llm, raising=False)
    with pytest.raises(Started) as caught:
        start()
    found: dict[str, Any] = caught.value.args[0]
    return found


@pytest.mark.moderate
@needs_vllm
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_the_engine_is_started_with_the_settings(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**settings: Any) -> Any:
        if kind == "grpo":
            colocated = {"use_vllm": True, "vllm_mode": "colocate", **settings}
            return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **colocated)
        rows = tokenized([{"prompt": "1 +", "response": "a"}] * 4, tiny_tokenizer())[0]
        trainer = tiny_sft(ExtSFTTrainer, ExtSFTConfig, tmp_path, rows, use_vllm="true", **settings)
        return trainer.sample(["1 +"])

    default = started_with(monkeypatch, start)
    on_cpu = not torch.cuda.is_available()
    for name, (value, keyword) in ENGINE.items():
        follows = {"max_num_batched_tokens": 1024} if on_cpu and name == "vllm_max_model_length" else {}
        if hasattr(ExtSFTConfig, name) or kind == "grpo":
            found = started_with(monkeypatch, lambda name=name, value=value: start(**{name: value}))  # type: ignore[misc]
            assert (found[keyword], {k: v for k, v in found.items() if k != keyword}) == (
                value,
                {**{k: v for k, v in default.items() if k != keyword}, **follows},
            ), name
            assert default.get(keyword) != value
    parts = ("GRPOConfig", "ExtGRPOConfig") if kind == "grpo" else ("ExtSFTConfig",)
    this = "training/test_settings_table::test_the_engine_is_started_with_the_settings"
    mine = {name for part in parts for name, effect in EFFECTS_OF[part].items() if effect.shown_by == this}
    assert mine - {"vllm_tensor_parallel_size"} <= set(ENGINE)
    if kind == "grpo":  # one process cannot be two peers
        with pytest.raises(RuntimeError, match=r"tensor_parallel_size \(2\) must divide world size \(1\)"):
            start(vllm_tensor_parallel_size=2)


@pytest.mark.vllm
def test_requests_carry_what_the_settings_ask_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception): ...

    def generate(self: Any, prompts: Any, sampling_params: Any, **_: Any) -> None:
        raise Asked(sampling_params)

    load_vllm()
    engine = type(
        "Engine", (), {"__init__": lambda self, **_: None, "generate": generate, "llm_engine": no_engine_steps()}
    )
    monkeypatch.setattr(vllm_generation, "LLM", engine)
    monkeypatch.setattr(ColocatedEngine, "_push_weights", lambda engine: None)

    def asked(**settings: Any) -> Any:
        colocated = {"use_vllm": True, "vllm_mode": "colocate", **settings}
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **colocated)
        with pytest.raises(Asked) as caught:
            trainer.vllm_generation.generate([[3]], None, 1)
        return caught.value.args[0][0]

    assert asked().structured_outputs is None
    assert asked(vllm_structured_outputs_regex="[0-9]+").structured_outputs.regex == "[0-9]+"


def test_the_earlier_name_of_the_samplers_cap_is_taken() -> None:
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_cap"):
        assert config(vllm_importance_sampling_cap=1.25).vllm_importance_sampling_clip_max == 1.25


# The model's settings.


def test_model_settings_and_model_init_kwargs_go_together() -> None:
    model = ModelConfig(model_revision="v2", dtype="bfloat16", attn_implementation="eager")
    own = {"use_kernels": True, "dtype": "float16"}
    assert init_kwargs(ModelConfig(), None) == {"revision": "main", "dtype": "float32"}
    assert init_kwargs(model, {}) == {"revision": "v2", "dtype": "bfloat16", "attn_implementation": "eager"}
    assert init_kwargs(model, own) == {
        "revision": "v2", "dtype": "float16", "attn_implementation": "eager", "use_kernels": True,
    }  # fmt: skip


def test_settings_of_an_adapter_reach_it() -> None:
    given: dict[str, Any] = {
        "lora_r": 3, "lora_alpha": 5, "lora_dropout": 0.5, "lora_target_modules": ["q_proj", "k_proj"],
        "lora_target_parameters": ["a.b"], "lora_modules_to_save": ["norm"], "lora_task_type": "SEQ_CLS",
        "use_rslora": True, "use_dora": True,
    }  # fmt: skip
    assert set(given) == {n for n in MODEL if MODEL[n].needs == ("use_peft",) and not n.startswith("load_in")}
    model = ModelConfig(use_peft=True, **given)
    check_needs(model, MODEL)
    adapter = loaded_as(model)["peft_config"]
    for name, value in given.items():
        found = getattr(adapter, name if name == "lora_alpha" or name == "lora_dropout" else name.removeprefix("lora_"))
        assert (sorted(found) if isinstance(found, set) else found) == (
            sorted(value) if isinstance(found, set) else value
        )
        message = refusal(lambda name=name, value=value: check_needs(ModelConfig(**{name: value}), MODEL))  # type: ignore[misc]
        assert message.startswith(f"{name}={value!r} needs use_peft: true")
    assert loaded_as(ModelConfig())["peft_config"] is None


def engine(use_vllm: bool) -> Any:
    """What is asked of a trainer's settings about the model's."""
    return SimpleNamespace(use_vllm=use_vllm, use_cpu=True, bf16=False, fp16=False)


def test_a_quantized_model_is_asked_for_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    four = ModelConfig(
        model_name_or_path="m", use_peft=True, load_in_4bit=True, dtype="bfloat16", bnb_4bit_quant_type="fp4",
        use_bnb_nested_quant=True, bnb_4bit_quant_storage="uint8",
    )  # fmt: skip
    check_needs(four, MODEL)
    asked = loaded_as(four)["quantization_config"]
    assert isinstance(asked, BitsAndBytesConfig)
    assert (asked.load_in_4bit, asked.bnb_4bit_compute_dtype, asked.bnb_4bit_quant_type) == (
        True,
        torch.bfloat16,
        "fp4",
    )
    assert (asked.bnb_4bit_use_double_quant, asked.bnb_4bit_quant_storage) == (True, torch.uint8)
    eight = ModelConfig(use_peft=True, load_in_8bit=True)
    assert loaded_as(eight)["quantization_config"].load_in_8bit
    assert loaded_as(ModelConfig())["quantization_config"] is None
    for flag, model in (("load_in_4bit", four), ("load_in_8bit", eight)):
        monkeypatch.setattr("trl_ext.recipes.model_settings.is_bitsandbytes_available", lambda: True)
        for use_vllm in (False, True):
            check_model_settings(model, engine(use_vllm))
        monkeypatch.setattr("trl_ext.recipes.model_settings.is_bitsandbytes_available", lambda: False)
        message = refusal(lambda model=model: check_model_settings(model, engine(False)))  # type: ignore[misc]
        assert message == f"{flag} needs bitsandbytes, which is not installed: pip install 'trl_ext[quantized]'"
        alone = dataclasses.replace(model, use_peft=False)
        assert f"{flag}=True needs use_peft" in refusal(lambda alone=alone: check_model_settings(alone, engine(False)))  # type: ignore[misc]
    message = refusal(lambda: check_needs(ModelConfig(bnb_4bit_quant_type="fp4"), MODEL))
    assert message.startswith("bnb_4bit_quant_type='fp4' needs load_in_4bit: true")


def test_flash_attention_is_used_if_installed_and_else_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, taken in ((True, "flash_attention_2"), (False, None)):
        monkeypatch.setattr("trl_ext.recipes.model_settings.is_flash_attn_2_available", lambda there=there: there)
        model = ModelConfig(attn_implementation="auto")
        line = choose_attention(model)
        assert model.attn_implementation == taken
        assert line is not None
        assert ("flash-attn is not installed" in line) is not there
    asked = ModelConfig(attn_implementation="flash_attention_2")
    assert choose_attention(asked) is None
    message = refusal(lambda: check_model_settings(asked, engine(False)))
    assert message.startswith("attn_implementation flash_attention_2 needs a GPU and flash-attn")
    check_model_settings(ModelConfig(attn_implementation="eager"), engine(False))
