"""`ExtGRPOConfig`: the handout's vocabulary, the axes, and what is refused before a model loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trl import GRPOConfig, TrlParser

from tests.support.tiny import tiny_model
from tests.support.versions import needs_vllm
from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS
from trl_ext.generation.engine_choice import choose_engine, choosing_by_model, note_model, parameters_of
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.registry import UnknownName, parse_options
from trl_ext.training.handout_settings import resolve_handout

AXES = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "aggregation": AGGREGATIONS}


def config(**settings: Any) -> ExtGRPOConfig:
    return ExtGRPOConfig(**{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", **settings})


def parsed(tmp_path: Path, settings: dict[str, Any] | str, arguments: str = "") -> ExtGRPOConfig:
    """From a YAML file and the command line, as a recipe reads them."""
    file = tmp_path / "config.yaml"
    file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    common = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    (args,) = TrlParser((ExtGRPOConfig,)).parse_args_and_config(["--config", str(file), *common, *arguments.split()])
    return args


def refused(error: type[Exception], message: str, **settings: Any) -> None:
    with pytest.raises(error) as caught:
        config(**settings)
    assert message in str(caught.value)


# Stock.


def test_without_own_fields_every_trl_field_is_as_in_trl() -> None:
    settings = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
    ours, theirs = ExtGRPOConfig(**settings), GRPOConfig(**settings)
    names = {f.name for f in dataclasses.fields(GRPOConfig)}
    assert len(names) > 100
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert not ours.uses_axes
    assert {getattr(ours, axis) for axis in AXES} == {None}


@pytest.mark.parametrize("gpu", [False, True], ids=["no GPU", "GPU not used"])
def test_on_a_cpu_bf16_is_off_unless_asked_for(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    settings = {"output_dir": "unused", "use_cpu": True, "report_to": "none", "use_vllm": False}
    assert GRPOConfig(output_dir="unused", use_cpu=True, report_to="none").bf16 is True
    unset, on, off = (ExtGRPOConfig(**settings, **given) for given in ({}, {"bf16": True}, {"bf16": False}))
    assert (unset.bf16, on.bf16, off.bf16) == (False, True, False)
    assert unset.precision_reason == "float32, since this is a CPU and bf16 is not set (TRL: bfloat16 with use_cpu)"
    assert (on.precision_reason, off.precision_reason) == (None, None)


def test_on_apples_gpu_it_is_float32_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("mps"))
    unset = ExtGRPOConfig(output_dir="unused", report_to="none", use_vllm=False)
    assert not unset.bf16
    assert unset.precision_reason == "float32 on mps, where no other precision was tried and bf16 is not set"


# The handout's vocabulary.

HANDOUT = {
    "n_grpo_steps": 200, "rollout_batch_size": 256, "group_size": 8, "sampling_temperature": 0.9,
    "sampling_max_tokens": 1024, "sampling_min_tokens": 4, "epochs_per_rollout_batch": 1, "train_batch_size": 256,
    "micro_train_batch_size": 2, "cliprange": 0.3, "advantage_eps": 1e-5, "use_std_normalization": True,
}  # fmt: skip
TRL = {
    "max_steps": 200, "generation_batch_size": 256, "num_generations": 8, "temperature": 0.9,
    "max_completion_length": 1024, "num_iterations": 1, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 128, "steps_per_generation": 128, "train_batch_size": 2,
    "advantage": "group_std", "advantage_options": {"eps": 1e-5}, "policy_loss": "ppo_clip",
    "policy_loss_options": {"eps_low": 0.3, "eps_high": 0.3}, "aggregation": "sequence_mean",
}  # fmt: skip


def test_the_handouts_settings_become_trls(tmp_path: Path) -> None:
    as_arguments = " ".join(f"--{name} {value}" for name, value in HANDOUT.items())
    for args in (config(**HANDOUT), parsed(tmp_path, HANDOUT), parsed(tmp_path, {}, as_arguments)):
        assert {name: getattr(args, name) for name in TRL} == TRL


def test_off_policy_steps_are_epochs_times_steps_per_rollout() -> None:
    args = config(
        n_grpo_steps=5, rollout_batch_size=32, train_batch_size=16, group_size=4, micro_train_batch_size=4,
        epochs_per_rollout_batch=3,
    )  # fmt: skip
    assert (args.max_steps, args.num_iterations) == (5 * 3 * 2, 3)
    assert (args.gradient_accumulation_steps, args.steps_per_generation) == (4, 8)


def test_the_handouts_loss_types_are_presets() -> None:
    args = config(loss_type="grpo_clip", cliprange=0.3)
    assert (args.preset, args.policy_loss, args.policy_loss_options["eps_low"]) == ("grpo_clip", "ppo_clip", 0.3)
    assert config(loss_type="no_baseline", preset="no_baseline").advantage == "raw"
    with pytest.raises(ValueError, match="loss_type 'grpo_clip' is the preset of that name, and preset is 'dapo'"):
        config(loss_type="grpo_clip", preset="dapo")


@pytest.mark.parametrize(
    ("settings", "micro", "accumulation"),
    [
        ({"train_batch_size": 16, "micro_train_batch_size": 4}, 4, 4),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, 8, 2),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4, "micro_train_batch_size": 4}, 4, 4),
        ({"train_batch_size": 16}, 8, 2),  # TRL's default of 8 rows per forward pass
        ({"train_batch_size": 4}, 4, 1),
    ],
)
def test_two_of_the_three_batch_settings_determine_the_third(
    settings: dict[str, int], micro: int, accumulation: int
) -> None:
    args = config(group_size=4, **settings)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (micro, accumulation)


def test_train_batch_is_split_across_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(**settings: int) -> ExtGRPOConfig:
        args = ExtGRPOConfig.__new__(ExtGRPOConfig)  # its constructor would wait for the other processes
        for field in dataclasses.fields(ExtGRPOConfig):
            setattr(args, field.name, settings.get(field.name, field.default))
        resolve_handout(args)
        return args

    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolved(train_batch_size=16, micro_train_batch_size=2, group_size=4).gradient_accumulation_steps == 2
    for_one = resolved(train_batch_size=16, micro_train_batch_size=16, group_size=4)
    assert (for_one.per_device_train_batch_size, for_one.gradient_accumulation_steps) == (4, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = "train_batch_size (16) must be divisible by the number of processes (3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        resolved(train_batch_size=16, group_size=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollout_batch_size": 30, "group_size": 8},
            "rollout_batch_size (30) must be divisible by group_size (8)",
        ),
        ({"train_batch_size": 4, "group_size": 8}, "train_batch_size (4) must be at least group_size (8)"),
        (
            {"rollout_batch_size": 32, "train_batch_size": 24, "group_size": 8},
            "rollout_batch_size (32) must be divisible by train_batch_size (24)",
        ),
        (
            {"train_batch_size": 16, "micro_train_batch_size": 6, "group_size": 4},
            "train_batch_size per process (16) must be divisible by micro_train_batch_size (6)",
        ),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 3, "group_size": 4},
            "train_batch_size per process (16) must be divisible by gradient_accumulation_steps (3)",
        ),
        (
            {"train_batch_size": 16, "micro_train_batch_size": 4, "gradient_accumulation_steps": 2, "group_size": 4},
            "train_batch_size (16) over 1 process(es) in micro-batches of 4 takes 4 accumulation steps, "
            "but gradient_accumulation_steps is 2",
        ),
        ({"n_grpo_steps": 3, "rollout_batch_size": 8}, "n_grpo_steps needs rollout_batch_size and train_batch_size"),
        ({"n_grpo_steps": 3, "train_batch_size": 8}, "n_grpo_steps needs rollout_batch_size and train_batch_size"),
        (
            {"n_grpo_steps": 3, "train_batch_size": 8, "rollout_batch_size": 16, "max_steps": 5},
            "n_grpo_steps=3 is 6 optimizer steps, but max_steps=5; set max_steps to -1 as well",
        ),
        ({"group_size": 4, "num_generations": 2}, "group_size=4 and num_generations=2 contradict each other"),
        ({"sampling_temperature": 0.5, "temperature": 0.7}, "sampling_temperature=0.5 and temperature=0.7 contradict"),
        (
            {"use_std_normalization": True, "advantage": "raw"},
            "use_std_normalization=True means advantage 'group_std', but advantage is 'raw'",
        ),
        ({"train_batch_size": 8, "group_size": 4, "micro_train_batch_size": 0}, "micro_train_batch_size"),
        ({"rollout_batch_size": 8, "group_size": 0}, "group_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(settings: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **settings)


def test_a_handout_name_next_to_an_equal_trl_name_is_fine() -> None:
    args = config(
        group_size=4, num_generations=4, train_batch_size=8, rollout_batch_size=8, n_grpo_steps=2, max_steps=2
    )
    assert (args.num_generations, args.max_steps) == (4, 2)


@pytest.mark.parametrize(("use_std", "name"), [(True, "group_std"), (False, "group_mean")])
def test_std_normalization_chooses_the_advantage(use_std: bool, name: str) -> None:
    args = config(use_std_normalization=use_std, advantage_eps=1e-5)  # the handout sets both, eps or no eps
    assert (args.advantage, args.advantage_options) == (name, {"eps": 1e-5} if use_std else {})
    assert config(preset="dr_grpo", use_std_normalization=use_std).advantage == name


def test_an_option_said_in_full_wins_over_its_short_form() -> None:
    args = config(
        cliprange=0.1, policy_loss_options={"eps_high": 0.3}, advantage_eps=0.5, advantage_options={"eps": 0.2}
    )
    assert args.policy_loss_options == {"eps_low": 0.1, "eps_high": 0.3}
    assert args.advantage_options == {"eps": 0.2}


# The axes.


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_fills_every_axis(preset: str) -> None:
    named = {"teacher": "a/model"} if PRESETS[preset].needs_teacher else {}
    args, point = config(preset=preset, **named), PRESETS[preset]
    for axis in AXES:
        assert getattr(args, axis) == getattr(point, axis)
        assert getattr(args, f"{axis}_options") == getattr(point, f"{axis}_options")
    assert args.uses_axes
    assert args.scale_rewards == "none"
    assert args.advantage_fn().func is ADVANTAGES[point.advantage]
    objective = args.objective()
    assert isinstance(objective, Objective)
    assert objective.policy_loss.func is POLICY_LOSSES[point.policy_loss]
    assert objective.policy_loss.keywords == point.policy_loss_options
    assert objective.aggregate.func is AGGREGATIONS[point.aggregation]
    assert objective.aggregate.keywords == point.aggregation_options


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis, table in AXES.items() for name in table])
def test_every_axis_member_works_alone_with_grpo_defaults(axis: str, name: str) -> None:
    args = config(**{axis: name})
    assert getattr(args, axis) == name
    for other in AXES.keys() - {axis}:
        assert getattr(args, other) == getattr(PRESETS["grpo_clip"], other)


def test_axis_next_to_a_preset_replaces_member_and_its_options() -> None:
    dapo = config(preset="dapo", policy_loss="cispo")
    assert (dapo.policy_loss, dapo.policy_loss_options, dapo.aggregation) == ("cispo", {}, "token_mean")
    dapo = config(preset="dapo", policy_loss="cispo", policy_loss_options={"ratio_max": 2.0})
    assert dapo.policy_loss_options == {"ratio_max": 2.0}


def test_options_next_to_a_preset_are_merged_into_its_member() -> None:
    for named in ({}, {"policy_loss": "ppo_clip"}):
        dapo = config(preset="dapo", policy_loss_options={"eps_high": 0.5}, **named)
        assert dapo.policy_loss_options == {"eps_low": 0.2, "eps_high": 0.5}
    assert PRESETS["dapo"].policy_loss_options == {"eps_low": 0.2, "eps_high": 0.28}


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_the_objective_gets_kl_beta_and_bias_correction(estimator: str) -> None:
    objective = config(preset="dapo", kl_estimator=estimator, beta=0.04, use_bias_correction_kl=True).objective()
    assert objective.kl.func is KL_ESTIMATORS[estimator]
    assert (objective.beta, objective.kl_bias_correction) == (0.04, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"preset": "dr_gpro"},
            "unknown preset 'dr_gpro'. Did you mean 'dr_grpo'? Known: aspo, ce_gppo, cispo, dapo, dapo_full",
        ),
        ({"advantage": "group_men"}, "unknown advantage 'group_men'. Did you mean 'group_mean'? Known: "),
        (
            {"policy_loss": "ppoclip"},
            "unknown policy loss 'ppoclip'. Did you mean 'ppo_clip'? Known: aspo, bapo, ce_gppo, cispo, clip_cov, dppo_kl",
        ),
        ({"aggregation": "tokens_mean"}, "unknown aggregation 'tokens_mean'. Did you mean 'token_mean'? Known: "),
        ({"kl_estimator": "k4", "preset": "dapo"}, "unknown KL estimator 'k4'"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        (
            {"preset": "dapo", "policy_loss_options": {"eps_hgh": 0.3}},
            "unknown option of policy loss 'ppo_clip' 'eps_hgh'. Did you mean 'eps_high'? Known: ",
        ),
        ({"preset": "rloo", "cliprange": 0.2}, "unknown option of policy loss 'reinforce' 'eps_low'"),
        ({"advantage": "raw", "advantage_eps": 0.1}, "unknown option of advantage 'raw' 'eps'"),
    ],
)
def test_unknown_name_or_option_is_refused_with_the_choices(settings: dict[str, Any], message: str) -> None:
    refused(UnknownName, message, **settings)


@pytest.mark.parametrize("options", ["eps_low=abc", {"eps_low": "abc"}, {"eps_low": [0.1]}])
def test_an_option_of_the_wrong_type_is_refused_at_once(options: Any) -> None:
    refused(ValueError, "eps_low", policy_loss_options=options)


def test_a_kl_estimator_may_have_options_and_be_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def scaled(logp, ref_logp, *, by=2.0):\n    return by * (logp - ref_logp)\n")
    own = f"{tmp_path}/mine.py:scaled"
    objective = config(preset="dapo", beta=0.1, kl_estimator=own, kl_estimator_options="by=3").objective()
    assert objective.kl(torch.ones(1, 1), torch.zeros(1, 1)).item() == 3
    message = "unknown option of KL estimator 'k3' 'by'. Known: (none)"
    refused(UnknownName, message, preset="dapo", kl_estimator_options={"by": 3})


def test_an_optimizer_step_may_span_two_rollouts_as_in_trl() -> None:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
    assert config(preset="dapo", steps_per_generation=3, **sizes).generation_batch_size == 12


def test_one_stop_string_may_stand_alone() -> None:
    assert config(stop="</answer>").stop == ["</answer>"]
    assert config(stop=["a", "b"]).stop == ["a", "b"]


# Options as text.


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (None, None),
        ({}, {}),
        ({"eps_low": 0.1}, {"eps_low": 0.1}),
        ("eps_low=0.1", {"eps_low": 0.1}),
        ("eps_low=0.1,eps_high=0.3", {"eps_low": 0.1, "eps_high": 0.3}),
        (" k = 4 , threshold = 0.5", {"k": 4, "threshold": 0.5}),
        ('{"eps_low": 0.1, "dual_clip": null}', {"eps_low": 0.1, "dual_clip": None}),
        ("dual_clip=null", {"dual_clip": None}),
        ("dual_clip=none", {"dual_clip": None}),
        ("dual_clip=true", {"dual_clip": True}),
        ("mode=a=b", {"mode": "a=b"}),
        ("eps=1e-6,a=1.5e3,b=-2E+2", {"eps": 1e-6, "a": 1500.0, "b": -200.0}),  # YAML alone reads 1e-6 as a text
    ],
)
def test_options_are_a_mapping_json_or_pairs(text: Any, options: dict[str, Any] | None) -> None:
    assert parse_options("policy_loss_options", text) == options


@pytest.mark.parametrize("text", ["", "eps_low", "eps_low:0.1", '{"eps_low"', "eps_low=0.1,", "eps_low=[1"])
def test_other_text_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_options("policy_loss_options", text)
    assert str(caught.value).startswith(f"policy_loss_options {text!r} is neither ")
    assert "eps_low=0.1,eps_high=0.3" in str(caught.value)
    assert '{"eps_low": 0.1}' in str(caught.value)


def test_a_mapping_is_copied() -> None:
    given = {"eps_low": 0.1}
    assert config(preset="dapo", policy_loss_options=given).policy_loss_options is not given
    assert given == {"eps_low": 0.1}


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"preset": "dapo", "policy_loss_options": {"eps_high": 0.4}}, ""),
        ({}, "--preset dapo --policy_loss_options eps_high=0.4"),
        ({}, '--preset dapo --policy_loss_options {"eps_high":0.4}'),
        ({"preset": "dapo"}, "--policy_loss_options eps_high=0.4"),
        (
            {"preset": "rloo", "policy_loss_options": {"eps_high": 0.1}},
            "--preset dapo --policy_loss_options eps_high=0.4",
        ),
    ],
)
def test_options_come_from_yaml_or_the_command_line_which_wins(
    tmp_path: Path, settings: dict[str, Any], arguments: str
) -> None:
    args = parsed(tmp_path, settings, arguments)
    assert (args.preset, args.policy_loss_options) == ("dapo", {"eps_low": 0.2, "eps_high": 0.4})


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "0.000001"])
def test_small_yaml_number_is_a_float_in_any_notation(tmp_path: Path, written: str) -> None:
    args = parsed(tmp_path, f"advantage: group_std\nadvantage_options: {{eps: {written}}}\n")
    assert args.advantage_options == {"eps": 1e-6}
    assert isinstance(args.advantage_options["eps"], float)


def test_stop_strings_come_from_yaml_and_from_the_command_line(tmp_path: Path) -> None:
    assert parsed(tmp_path, {"stop": ["</answer>"]}).stop == ["</answer>"]
    assert parsed(tmp_path, {}, "--stop </answer> stop").stop == ["</answer>", "stop"]


def test_an_unknown_key_in_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="polcy_loss"):
        parsed(tmp_path, {"polcy_loss": "gspo"})


# The engine that generates.


@pytest.mark.parametrize(
    ("asked", "gpu", "vllm", "chosen", "reason"),
    [
        ("auto", False, True, False, "there is no GPU"), ("auto", True, False, False, "vLLM is not installed"),
        ("auto", True, True, True, "there are a GPU and vLLM"), (True, False, True, True, "as asked for"),
        ("true", False, True, True, "as asked for"), (False, True, True, False, "as asked for"), ("False", True, True, False, "as"),
    ],
)  # fmt: skip
def test_the_engine_is_chosen_with_a_reason(
    asked: Any, gpu: bool, vllm: bool, chosen: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("trl_ext.generation.engine_choice.is_vllm_available", lambda: vllm)
    found, why = choose_engine(asked)
    assert found is chosen
    assert why.startswith(reason)


@pytest.mark.parametrize(
    ("millions", "build", "chosen", "reason"),
    [
        (494.0, True, True, "on a CPU vLLM is used from 100 million parameters on, of which the model has 494"),
        (494.0, False, False, "there is no GPU, and vLLM's build for CPUs, faster for this model, is not installed"),
        (48.0, True, False, "there is no GPU, and on a CPU vLLM is used from 100 million parameters on, of which the model"),
        (None, True, False, "there is no GPU, and on a CPU vLLM is used from 100 million parameters on; use_vllm: true"),
    ],
    ids=["large", "large, no build for CPUs", "small", "cannot be read"],
)  # fmt: skip
def test_on_a_cpu_the_models_size_chooses_the_engine(
    millions: float | None, build: bool, chosen: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("trl_ext.generation.engine_choice._millions", {"a model": millions}.get)
    monkeypatch.setattr("trl_ext.generation.engine_choice.has_vllm_for_cpus", lambda: build)
    note_model("a model")
    assert choose_engine("auto")[0] is False  # nobody asks for a choice by the model
    with choosing_by_model():
        note_model("a model")
        for found, why in (choose_engine("auto"), choose_engine("auto", "a model")):
            assert found is chosen
            assert why.startswith(reason)
        assert choose_engine(False) == (False, "as asked for")
        note_model(None)
        assert choose_engine("auto")[0] is False


def test_a_parsed_command_line_chooses_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever calls `parse`: a benchmark that did not say so trained in float32 and sampled by HF generate."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"amx_bf16": True})
    monkeypatch.setattr("trl_ext.generation.engine_choice._millions", {"large": 500.0, "small": 0.9}.get)
    monkeypatch.setattr("trl_ext.generation.engine_choice.has_vllm_for_cpus", lambda: True)
    (tmp_path / "run.yaml").write_text("use_cpu: true\nuse_vllm: auto\nreport_to: none\n")
    for model in ("large", "small"):
        *_, config = parse(GRPO_SETTINGS, None, tmp_path / "run.yaml", ["--model_name_or_path", model])
        assert (config.use_vllm, config.bf16) == (model == "large",) * 2


@pytest.mark.parametrize("fast", [None, "AMX", "AVX512-BF16"])
def test_bf16_is_chosen_for_large_models_on_fast_cpus(fast: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"amx_bf16": fast == "AMX", "avx512_bf16": fast is not None}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: known)
    monkeypatch.setattr("trl_ext.generation.engine_choice._millions", {"large": 500.0, "small": 0.9}.get)
    settings: dict[str, Any] = {"output_dir": "unused", "use_cpu": True, "report_to": "none", "use_vllm": False}
    with choosing_by_model():
        for model in ("large", "small", None):
            note_model(model)
            unset, off = ExtGRPOConfig(**settings), ExtGRPOConfig(**settings, bf16=False)
            assert (unset.bf16, off.bf16) == (model == "large" and fast is not None, False)
            assert (f"multiplies fast ({fast})" in unset.precision_reason) is unset.bf16


def test_parameters_are_counted_from_the_configuration(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert parameters_of(str(tmp_path)) == sum(weight.numel() for weight in model.parameters())


def test_an_engine_that_is_not_there_or_unheard_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_ext.generation.engine_choice.is_vllm_available", lambda: False)
    with pytest.raises(ValueError, match=r"vLLM is not installed: pip install 'trl_ext\[vllm\]'"):
        choose_engine(True)
    with pytest.raises(ValueError, match="use_vllm must be auto, true or false, got 'maybe'"):
        choose_engine("maybe")


def test_what_is_not_set_of_the_engine_is_left_to_vllm(tmp_path: Path) -> None:
    assert ExtGRPOConfig(output_dir=str(tmp_path), bf16=False).engine_settings() == {}
    set_ = {"vllm_quantization": "fp8", "vllm_max_num_seqs": 3, "vllm_enable_prefix_caching": False}
    config = ExtGRPOConfig(output_dir=str(tmp_path), bf16=False, vllm_dtype="float16", vllm_enforce_eager=True, **set_)
    assert config.engine_settings() == {
        "max_num_seqs": 3, "dtype": "float16", "quantization": "fp8", "enable_prefix_caching": False, "enforce_eager": True,
    }  # fmt: skip


def test_a_simulated_quantization_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown vllm_quantization 'simulated_int2'.*simulated_fp8, simulated_int3"):
        config(vllm_quantization="simulated_int2")
    assert config(vllm_quantization="simulated_fp8").vllm_quantization == "simulated_fp8"


@needs_vllm
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_max_num_seqs", 8),
        ("vllm_dtype", "float32"),
        ("vllm_quantization", "fp8"),
        ("vllm_enable_prefix_caching", False),
        ("vllm_enforce_eager", True),
        ("vllm_gpu_memory_utilization", 0.5),
        ("vllm_tensor_parallel_size", 2),
        ("vllm_enable_sleep_mode", True),
        ("vllm_model_impl", "transformers"),
    ],
)
def test_colocate_only_settings_are_refused_in_server_mode(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} with vllm_mode: server"):
        config(use_vllm="true", vllm_mode="server", **{name: value})
    assert getattr(config(use_vllm="true", vllm_mode="colocate", **{name: value}), name) == value


def test_continuous_batching_with_stop_strings_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^use_transformers_continuous_batching with stop"):
        config(use_transformers_continuous_batching=True, stop=["</answer>"])
    assert config(use_transformers_continuous_batching=True).use_transformers_continuous_batching


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"use_vllm": "false"}, "an engine on GPUs of its own"),
        ({"vllm_mode": "colocate"}, "an engine on GPUs of its own"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "rollouts of whole optimizer steps"),
        ({"tools": ["calculator"]}, "responses of one turn"),
    ],
)
def test_rollouts_ahead_are_refused_where_they_cannot_be(settings: dict[str, Any], needs: str, tmp_path: Path) -> None:
    served = {"use_vllm": "true", "vllm_mode": "server", "per_device_train_batch_size": 8, "num_generations": 4}
    made = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True, "preset": "grpo_clip", "rollout_ahead": 1}
    assert ExtGRPOConfig(**{**made, **served}).rollout_ahead == 1
    with pytest.raises(ValueError, match=f"rollout_ahead=1 needs {needs}.*or set rollout_ahead: 0"):
        ExtGRPOConfig(**{**made, **served, **settings})
