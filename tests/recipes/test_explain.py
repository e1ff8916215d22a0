"""`python -m trl_ext.recipes.explain`: what it says is what the configuration does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ends_early, make_trainer, tiny_model, train, weight_difference
from tests.support.versions import needs_vllm
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError
from trl_ext.recipes.explain import LOSS_TYPES, explain, main, read
from trl_ext.registry import UnknownName

ROOT = Path(__file__).parents[2]
STEP = {"generation_batch_size": 16, "num_generations": 4, "per_device_train_batch_size": 4}
STEP |= {"gradient_accumulation_steps": 4}


def said(**settings: Any) -> str:
    return "\n".join(explain({**STEP, **settings}))


def test_the_command_explains_a_file_with_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", str(ROOT / "recipes" / "grpo_math.yaml"), "--preset", "dapo_full"]
    monkeypatch.setattr(sys, "argv", [*command, "--epochs_per_rollout_batch=2"])
    main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "token_mean(ppo_clip(A = group_std(rewards)))" in lines
    assert "policy_loss: ppo_clip(eps_low=0.2, eps_high=0.28, dual_clip=None)" in lines
    assert "rollout: 128 completions, 16 problems of 8, tried up to 4 times" in lines
    assert "2 optimizer steps per rollout, off-policy from the second step on" in lines
    assert lines[-1] == "dapo_full"
    monkeypatch.setattr(sys, "argv", ["explain", "--preset", "dapo_fulll"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[-1][:55]) == ("", "error: unknown preset 'dapo_fulll'. Did you mean 'dapo_")


def test_a_run_is_explained_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("preset: rloo\nvalidate_every: 3\ngroup_size: 4\nrollout_batch_size: 8\n")
    assert read(tmp_path, ["--rollout_batch_size", "16"]) == {
        "preset": "rloo",
        "group_size": 4,
        "rollout_batch_size": 16,
    }
    with pytest.raises(InputError, match=r"no file 'nothing\.yaml'; give a YAML file or the folder of a run"):
        read(Path("nothing.yaml"), [])
    with pytest.raises(
        UnknownName, match=r"unknown setting of recipes/grpo_math\.py 'presett'. Did you mean 'preset'\?"
    ):
        read(None, ["--presett", "rloo"])


def test_a_file_for_trls_own_command_is_read(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(
        "dataset_name: a/b\nreward_funcs: [accuracy_reward]\nlearning_rate: 1e-6\nbeta: 0\n"
    )
    assert read(tmp_path / "trl.yaml", ["--max_grad_norm", "1"]) == {
        "learning_rate": 1e-6,
        "beta": 0,
        "max_grad_norm": 1,
    }


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("loss_type: [", [], r"a\.yaml is no YAML: while parsing a flow node .* line 1"),
        ("- a", [], r"a\.yaml has no settings, but a list; a line is `name: value`"),
        ("", ["--beta", "abc"], "beta must be float, got 'abc'"),
        ("", ["--beta"], "beta must be float, got True"),
        ("num_iterations: 1.5", [], "num_iterations must be int, got 1.5"),
    ],
)
def test_input_that_is_no_setting_is_refused(content: str, flags: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.yaml", flags)


def test_a_loss_type_that_trl_does_not_have_is_refused() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown loss_type of TRL 'grppo'. Did you mean 'grpo'\? Known: bnpo, cispo"
    ):
        said(loss_type="grppo")


@needs_vllm
def test_what_has_no_effect_is_named_with_the_reason() -> None:
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    idle = said(preset="grpo_clip", share_prompt_prefix=True, off_policy_mask_threshold=0.1, **reentrant)
    for name in ("policy_loss=ppo_clip: as reinforce", "off_policy_mask_threshold=0.1", "share_prompt_prefix=True"):
        assert name in idle
    assert "skip_zero_advantage_rows=True: every row has a KL penalty" in said(preset="grpo_clip", beta=0.1)
    assert "without effect" not in said(preset="grpo_clip", num_iterations=2, gradient_checkpointing=True)
    # a ratio to the engine is not 1 on-policy
    engine = {"use_vllm": True, "vllm_mode": "colocate"}
    assert "without effect" not in said(preset="dppo", **engine)
    assert "policy_loss=gmpo: as reinforce" in said(preset="gmpo", **engine)


@needs_vllm
def test_a_ratio_to_the_sampler_is_on_policy_nowhere() -> None:
    engine = {"use_vllm": True, "vllm_mode": "server", "preset": "grpo_clip"}
    found = said(**engine, old_log_probs="sampler", rollout_ahead=1)
    assert "1 optimizer step per rollout, off-policy from the first on: ratios are to the sampler's" in found
    assert "sampled with the weights of one rollout before" in found
    assert "reuse_log_probs=True: the sampler's log-probabilities are the old ones" in found
    assert "policy_loss=ppo_clip: as reinforce" not in found
    decoupled = said(**engine, rollout_ahead=1)  # the clip range has no effect: old is the first pass
    assert "policy_loss=ppo_clip: as reinforce" in decoupled
    assert "reuse_log_probs" not in decoupled
    assert "one rollout before" not in said(**engine)


def test_it_says_what_is_deterministic() -> None:
    assert "deterministic" not in said(use_vllm=False)
    found = said(use_vllm=False, deterministic=True)
    assert "deterministic\n    two runs are the same, with HF generate on a CPU\n" in found
    assert "    a response is the same whatever it is sampled with: no\n" in found


def test_a_trainer_warns_of_what_was_chosen_in_vain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warned(**settings: Any) -> str:
        caplog.clear()
        make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **settings)
        return caplog.text

    assert "has no effect here" not in warned(preset="dapo")  # its clip range is the preset's
    clip = warned(preset="dapo", policy_loss_options={"eps_high": 0.5})
    assert "policy_loss_options={'eps_low': 0.2, 'eps_high': 0.5} has no effect here: every rollout is used in" in clip
    assert "policy_loss=gmpo has no effect here: as reinforce" in warned(policy_loss="gmpo")
    assert "off_policy_mask_threshold=0.1 has no effect" in warned(preset="dapo", off_policy_mask_threshold=0.1)
    assert "has no effect here" not in warned(policy_loss="gmpo", num_iterations=2)


@needs_vllm
def test_penalties_and_corrections_stand_in_the_formula() -> None:
    engine = {"use_vllm": True, "vllm_mode": "colocate"}
    assert "constant(token weight * sequence_mean_k3 * ppo_clip(A = group_mean(rewards)))" in said(
        preset="dr_grpo", **engine
    )
    assert "constant(sequence weight * sequence_ratio * ppo_clip(A = group_mean(rewards)))" in said(
        preset="dr_grpo", vllm_importance_sampling_mode="sequence_mask", **engine
    )
    assert "constant(dppo_tv(A = group_mean(rewards)))" in said(preset="dppo", **engine)
    found = said(preset="grpo_clip", beta=0.1, entropy_coef=0.01)
    assert "sequence_mean(ppo_clip(A = group_std(rewards)) + 0.1 * k3 - 0.01 * entropy)" in found
    assert "kl_estimator: k3" in found
    masks = {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.2, "rollout_selection": "shortest"}
    found = said(preset="grpo_clip", **masks)
    inner = "off-policy mask(threshold 0.1) * ppo_clip(A = group_std(shortest of rewards))"
    assert f"sequence_mean(mask of the top 0.2 by entropy * {inner})" in found
    assert "rollout_selection: shortest(keep=4)" in found


def test_a_teacher_stands_where_its_values_are_used() -> None:
    sampled = said(preset="opd_grpo", teacher="a/model", distillation_coef=0.5, distillation_coef_end=0.0, max_steps=10)
    assert "token_mean(ppo_clip(A = group_std(rewards) + (0.5 falling to 0) * reverse_kl(teacher)))" in sampled
    assert "distillation: reverse_kl(discount=0.0, clip=None)" in sampled
    full = said(preset="gkd", teacher="a/model", distillation_options={"beta": 0.25})
    assert "token_mean(reinforce(A = zero(rewards)) + 1 * jensen_shannon(teacher))" in full
    assert "distillation: jensen_shannon(beta=0.25)" in full


def test_the_nearest_preset_is_named_with_what_differs() -> None:
    assert said(preset="dapo").endswith("nearest preset\n    dapo")
    assert said(preset="dapo", advantage="group_mean").endswith("dapo, but advantage=group_mean")
    assert "nearest preset\n    dapo, but advantage_options=" in said(loss_type="dapo")  # whose members all are


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_type",  # tests/grpo/test_parity.py trains with the axes of each
    [
        pytest.param(name, marks=() if name in ("dapo", "luspo") else pytest.mark.nightly)
        for name in sorted(set(LOSS_TYPES) - {"bnpo"})
    ],
)
def test_the_axes_of_a_stock_configuration_train_the_same(loss_type: str, tmp_path: Path) -> None:
    """The flags that the explanation prints, next to TRL's own loss."""
    sequence = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    off_policy = {"num_iterations": 2, "max_steps": 4, **sequence}
    if loss_type == "cispo":
        off_policy["epsilon_high"] = 2.0
    lines = explain({**STEP, "loss_type": loss_type, **off_policy})
    flags = lines[1].split()
    axes = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    theirs = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "a", ends_early, loss_type=loss_type, **off_policy)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, **axes, num_iterations=2, max_steps=4)
    assert weight_difference(theirs.model, tiny_model()) > 1e-3
    assert weight_difference(ours.model, theirs.model) < 1e-6
