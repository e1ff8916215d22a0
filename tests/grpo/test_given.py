"""What was given, by flag, in a file or as a keyword, holds next to a preset also where it equals the default."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ModelConfig, TrlParser

from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS
from trl_ext.compat.given import given, recorded_names
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.imitation.sft import ExtSFTConfig
from trl_ext.recipes.cli import read_settings
from trl_ext.recipes.grpo import GRPO_SETTINGS, GRPOTask
from trl_ext.recipes.model_settings import check_model_settings
from trl_ext.recipes.run import write_config
from trl_ext.registry import defaults_of
from trl_ext.runs.layout import CONFIG
from trl_ext.training.settings_table import TRL

COMMON = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
DEFAULTS = defaults_of(ExtGRPOConfig)
SEQUENCE_RATIO = ("gspo", "gspo_token", "gmpo", "vespo")
TOUCHED = ("settings", "options", "advantages", "losses", "refused")  # by which a preset touches a setting


def config(**settings: Any) -> ExtGRPOConfig:
    return ExtGRPOConfig(**{**COMMON, **settings})


def read(tmp_path: Path, settings: dict[str, Any], *flags: str, parts: tuple[type, ...] = (ExtGRPOConfig,)) -> Any:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return read_settings(parts, None, file, flags)[-1]


def expected(preset: str, name: str) -> dict[str, Any] | None:
    """What a setting at its default says next to a preset: values of the config; None if it is refused."""
    base, value = PRESETS[preset], DEFAULTS[name]
    options = {**POLICY_LOSSES.options(base.policy_loss), **base.policy_loss_options}
    if name in base.settings:
        return {name: value}
    rule = TRL[name]
    if rule.refused:
        return None
    if name == "scale_rewards":
        return {"advantage": base.advantage if base.advantage in ("group_std", "gdpo") else "group_std"}
    if name == "multi_objective_aggregation":
        return {"advantage": "group_std" if base.advantage == "gdpo" else base.advantage}
    if name == "importance_sampling_level":
        return None if base.policy_loss in SEQUENCE_RATIO else {"policy_loss": base.policy_loss}
    option = next((option for option in rule.options if option in options), None)
    if option is None:
        return {"policy_loss": base.policy_loss} if value is None else None
    if name == "epsilon" and "eps_high" in options:
        return {"policy_loss_options": {**options, "eps_low": value, "eps_high": value}}
    if name == "epsilon_high":
        return {"policy_loss_options": {**options, option: options.get("eps_low", options[option])}}
    return {"policy_loss_options": {**options, option: value}}


def said_by(resolved: ExtGRPOConfig, names: Any) -> dict[str, Any]:
    options = {**POLICY_LOSSES.options(str(resolved.policy_loss)), **(resolved.policy_loss_options or {})}
    values = {name: getattr(resolved, name) for name in names}
    return values | ({"policy_loss_options": options} if "policy_loss_options" in values else {})


CASES = [
    (preset, name)
    for preset, base in PRESETS.items()
    if not base.needs_teacher
    for name in (*base.settings, *(n for n, rule in TRL.items() if any(getattr(rule, by, None) for by in TOUCHED)))
]


def test_defaults_that_are_given_hold_next_to_every_preset() -> None:
    assert len(CASES) > 300
    wrong = []
    for preset, name in CASES:
        wanted = expected(preset, name)
        try:
            found = said_by(config(preset=preset, **{name: DEFAULTS[name]}), wanted or ["policy_loss"])
        except ValueError as error:
            found = None if f"{name}={DEFAULTS[name]!r}" in str(error) else {"refused": str(error)}
        if found != wanted:
            wrong.append((preset, name, found, wanted))
    assert not wrong


@pytest.mark.moderate
def test_flags_files_and_keywords_give_one_result(tmp_path: Path) -> None:
    for preset in {of: None for of, _ in CASES}:
        names = {name for of, name in CASES if of == preset and expected(preset, name)} - {"overlong_buffer"}
        settings = {"preset": preset, **{name: DEFAULTS[name] for name in sorted(names)}}
        keywords = config(**settings)
        flags = [part for name, value in settings.items() if value is not None for part in (f"--{name}", str(value))]
        nothing = {name: value for name, value in settings.items() if value is None}
        for found in (read(tmp_path, COMMON | settings), read(tmp_path, COMMON | nothing, *flags)):
            assert {name: getattr(found, name) for name in DEFAULTS} == {
                name: getattr(keywords, name) for name in DEFAULTS
            }


def test_the_named_cases(tmp_path: Path) -> None:
    kept = {"dynamic_sampling_tries": 1, "mask_truncated_completions": False, "overlong_buffer": None}
    for preset, settings, wanted in (
        ("dapo_full", kept, kept),
        ("gspo", {"epsilon": 0.2}, {"policy_loss_options": {"eps_low": 0.2, "eps_high": 0.2}}),
        ("dapo", {"epsilon": 0.2}, {"policy_loss_options": {"eps_low": 0.2, "eps_high": 0.2}}),
        ("dapo", {"epsilon": 0.2, "epsilon_high": 0.28}, {"policy_loss_options": {"eps_low": 0.2, "eps_high": 0.28}}),
        ("dr_grpo", {"scale_rewards": "group"}, {"advantage": "group_std", "advantage_options": {"eps": 1e-4}}),
        ("dapo", {}, {"policy_loss_options": {"eps_low": 0.2, "eps_high": 0.28}}),
        ("dapo_full", {}, PRESETS["dapo_full"].settings),
    ):
        for found in (config(preset=preset, **settings), read(tmp_path, {**COMMON, "preset": preset, **settings})):
            assert {name: getattr(found, name) for name in wanted} == wanted
    for flags in (["--loss_type", "dapo"], ["--kl_estimator", "k3"]):
        with pytest.raises(ValueError, match=f"{flags[0][2:]}='{flags[1]}'"):
            read(tmp_path, COMMON, "--preset", "grpo_clip", *flags)


def test_flags_come_before_files_and_files_before_presets(tmp_path: Path) -> None:
    file = {**COMMON, "preset": "dapo_full", "dynamic_sampling_tries": 3}
    assert read(tmp_path, file).dynamic_sampling_tries == 3
    assert read(tmp_path, file, "--dynamic_sampling_tries=1").dynamic_sampling_tries == 1
    assert "reuse_log_probs" in recorded_names(read(tmp_path, file, "--no_reuse_log_probs"))
    assert read(tmp_path, COMMON, "--preset", "dapo_full").dynamic_sampling_tries == 4


def test_trls_own_parser_tells_what_was_given_too(tmp_path: Path) -> None:
    flags = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false", "--preset", "dapo_full"]
    parser = TrlParser((ExtGRPOConfig, ModelConfig))
    found, model = parser.parse_args_and_config([*flags, "--dynamic_sampling_tries", "1", "--lora_r", "16"])
    assert (found.dynamic_sampling_tries, found.mask_truncated_completions) == (1, True)
    with pytest.raises(ValueError, match="lora_r=16 needs use_peft: true"):
        check_model_settings(model, found)
    (found,) = TrlParser(ExtGRPOConfig).parse_args_and_config(flags)
    assert found.dynamic_sampling_tries == 4


def test_contradictions_with_a_default_are_refused(tmp_path: Path) -> None:
    for kind, settings, message in (
        (ExtGRPOConfig, {"group_size": 4, "num_generations": 8}, "group_size=4 and num_generations=8 contradict"),
        (ExtGRPOConfig, {"epochs_per_rollout_batch": 2, "num_iterations": 1}, "num_iterations=1 contradict"),
        (ExtGRPOConfig, {"sampling_temperature": 0.5, "temperature": 1.0}, "temperature=1.0 contradict"),
        (ExtGRPOConfig, {"preset": "dapo", "cliprange": 0.1, "epsilon": 0.2}, "epsilon=0.2 and policy_loss_options"),
        (ExtGRPOConfig, {"preset": "gdpo", "entropy_coef_min": 0.0}, "entropy_coef_min=0.0 needs"),
        (ExtGRPOConfig, {"rollout_selection_options": None, "kl_estimator": "k3"}, "kl_estimator='k3' needs"),
        (ExtSFTConfig, {"micro_train_batch_size": 4, "per_device_train_batch_size": 8}, "=8 contradict"),
        (ExtSFTConfig, {"packing_strategy": "bfd"}, "packing_strategy='bfd' needs packing: true"),
        (ExtSFTConfig, {"dataset_text_field": "text"}, "dataset_text_field='text' would be ignored"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(**{**COMMON, **settings})
    config(group_size=4, num_generations=4)
    ExtSFTConfig(**COMMON, assistant_only_loss=False)  # asks for nothing


def test_two_of_three_batch_sizes_are_kept_if_given() -> None:
    for kind in (ExtGRPOConfig, ExtSFTConfig):
        more = {"num_generations": 4} if kind is ExtGRPOConfig else {}
        args = kind(**COMMON, **more, train_batch_size=16, gradient_accumulation_steps=1)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (16, 1)
        sizes = {"train_batch_size": 16, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
        with pytest.raises(ValueError, match="takes 2 accumulation steps, but gradient_accumulation_steps is 1"):
            kind(**COMMON, **more, **sizes)


def test_copies_and_pickles_keep_what_was_given() -> None:
    original = config(preset="dapo_full", dynamic_sampling_tries=1)
    for found in (copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert recorded_names(found) == recorded_names(original)
        assert given(found, ["dynamic_sampling_tries", "sync_ref_model"]) == {"dynamic_sampling_tries": 1}
    older = copy.copy(original)
    del older.__dict__["_given"]  # as versions before pickled it
    assert given(pickle.loads(pickle.dumps(older)), ["dynamic_sampling_tries", "preset"]) == {"preset": "dapo_full"}


def test_a_runs_own_settings_file_gives_the_same_settings(tmp_path: Path) -> None:
    for settings in (
        {"preset": "dapo_full", "dynamic_sampling_tries": 1, "overlong_buffer": None, "epsilon": 0.2},
        {"preset": "dr_grpo", "scale_rewards": "group", "beta": 0.1, "kl_estimator": "k3"},
        {"preset": "gdpo", "multi_objective_aggregation": "sum_then_normalize"},
        {"preset": "dapo", "epsilon_high": None, "delta": None, "importance_sampling_level": "token"},
        {"loss_type": "grpo_clip", "train_batch_size": 16, "gradient_accumulation_steps": 1, "num_generations": 4},
        {"loss_type": "dapo", "epsilon": 0.2, "scale_rewards": True},
    ):
        first = config(**settings)
        write_config(tmp_path / CONFIG, GRPOTask(validate_every=20), ModelConfig(), first)
        again = read_settings(GRPO_SETTINGS, None, tmp_path / CONFIG, ["--use_vllm", "false"])
        for name in set(DEFAULTS) - {"accelerator_config", "logging_dir"}:
            assert getattr(again[-1], name) == getattr(first, name), name
