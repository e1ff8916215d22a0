"""What a step leaves out changes nothing: the weights are those of the plain path, whatever is switched on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.grpo.test_trainer import AS_TRL_CUTS, EOS, OF_REWARDS, Recorder, logs
from tests.support.tiny import WORDS, fraction_of_ones, make_trainer, save_tiny, scripted, tiny_model, weight_difference
from trl_ext import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, ExtGRPOConfig
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.grpo.savings import savings as savings_of

PLAIN: dict[str, Any] = {**AS_TRL_CUTS, "reuse_log_probs": False}
ALL = dict.fromkeys(PLAIN, True)
ON_POLICY: dict[str, Any] = {"rollout_batch_size": 32, "train_batch_size": 32, "n_grpo_steps": 3}
OFF_POLICY: dict[str, Any] = {"rollout_batch_size": 32, "train_batch_size": 16, "n_grpo_steps": 2}
TWO_EPOCHS = {**OFF_POLICY, "epochs_per_rollout_batch": 2}


def words_of_row(row: int, step: int) -> list[int]:
    """Between 2 and 12 words, others in every group."""
    return [3 + (row * 5 + i * (i + row // 4)) % 14 for i in range(1 + (row * 7 + step) % 11)] + [EOS]


def words_of_some(row: int, step: int) -> list[int]:
    """Of every four rows, the last three are equal."""
    return words_of_row(row // 4 * 4 + min(row % 4, 1), step)


def every_other_group(completions: list[str], **_: Any) -> list[float]:
    """Groups of 4; every second one has zero variance."""
    return [1.0 if i // 4 % 2 else share for i, share in enumerate(fraction_of_ones(completions))]


def sometimes_right(completions: list[str], **_: Any) -> list[float]:
    """0 or 1; in every second group, correct throughout."""
    return [float(i // 4 % 2 or i % 4 == i // 8) for i, _ in enumerate(completions)]


def questions() -> Dataset:
    """Prompts of 4 to 12 words."""
    return Dataset.from_list(
        [{"prompt": " + ".join(str(k % 9) for k in range(i, i + 2 + i % 5)) + " ="} for i in range(16)]
    )


def trainer_of(path: Path, **settings: Any) -> Any:
    fixed = {
        "preset": "grpo_clip",
        "model": tiny_model().double(),
        "rollout_func": scripted(words_of_row),
        "train_dataset": questions(),
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "max_steps": -1,
        "learning_rate": 0.3,
    }
    fixed = {k: v for k, v in {**fixed, **ON_POLICY, **settings}.items() if v is not None}
    per_step = fixed["train_batch_size"] // fixed["per_device_train_batch_size"]
    reward = fixed.pop("reward", every_other_group)
    return make_trainer(Recorder, ExtGRPOConfig, path, reward, gradient_accumulation_steps=per_step, **fixed)


def trained(path: Path, **settings: Any) -> Any:
    trainer = trainer_of(path, **settings)
    trainer.train()
    return trainer


def assert_same(tmp_path: Path, savings: dict[str, bool], plain: Any = None, **settings: Any) -> tuple[Any, Any]:
    # a linear layer's norm computes in float32 even in a float64 model: 1e-8 apart
    plain = plain or trained(tmp_path / "plain", **settings, **PLAIN)
    ours = trained(tmp_path / "ours", **settings, **{**PLAIN, **savings})
    assert weight_difference(plain.model, tiny_model().double()) > 1e-3
    assert weight_difference(plain.model, ours.model) < 1e-7
    return plain, ours


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equal_rows_of_other_advantages_change_nothing(sharing: bool, tmp_path: Path) -> None:
    savings = {**ALL, "share_prompt_prefix": sharing}
    assert_same(tmp_path, savings, rollout_func=scripted(words_of_some), reward=sometimes_right, **TWO_EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(ON_POLICY, id="on_policy"),
        pytest.param(OFF_POLICY, id="off_policy"),
        pytest.param(TWO_EPOCHS, id="two_epochs"),
    ],
)
def test_each_saving_alone_changes_nothing(policy: dict[str, Any], tmp_path: Path) -> None:
    plain = None
    for saving in sorted(ALL):
        plain, _ = assert_same(tmp_path, {saving: True}, plain, **policy)


# One of each kind of aggregation, ratio and advantage, and the one that samples anew; the other tests have grpo_clip. A
# saving acts before a loss is called, so that the other presets can see no more of it.
EACH_PUSH = ("dapo_full", "dppo", "dr_grpo", "gspo", "reinforce_plus_plus", "vespo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in EACH_PUSH else pytest.mark.nightly) for name in OF_REWARDS]
)
def test_all_savings_together_change_nothing(preset: str, tmp_path: Path) -> None:
    # at 0.3 weights diverge on some machines, and rounding with them (2e-7 where 0.03 has 3e-9); dr_grpo's and dppo's
    # gradients are divided by a constant, so that they move nothing at less; w_reinforce's penalty of every response
    # diverges at more
    rates = {"dr_grpo": 0.3, "dppo": 0.3, "w_reinforce": 0.003}
    assert_same(tmp_path, ALL, preset=preset, **TWO_EPOCHS, learning_rate=rates.get(preset, 0.03))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("loss", "aggregation"), itertools.product(sorted(POLICY_LOSSES), sorted(AGGREGATIONS)))
def test_no_loss_and_aggregation_sees_a_difference(loss: str, aggregation: str, tmp_path: Path) -> None:
    assert_same(
        tmp_path, ALL, preset=None, advantage="group_std", policy_loss=loss, aggregation=aggregation, **OFF_POLICY
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("advantage", sorted(ADVANTAGES.keys() - {"zero"}))
def test_no_advantage_sees_a_difference(advantage: str, tmp_path: Path) -> None:
    axes: dict[str, Any] = {"advantage_options": {"k": 2}} if advantage == "pass_at_k" else {}
    axes |= {"preset": None, "advantage": advantage, "policy_loss": "ppo_clip", "aggregation": "sequence_mean"}
    assert_same(tmp_path, ALL, **axes, reward=sometimes_right)


@pytest.mark.slow
@pytest.mark.parametrize(
    "selection",
    ["shortest", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(set(SELECTIONS) - {"shortest"}))],
)
def test_no_selection_sees_a_difference(selection: str, tmp_path: Path) -> None:
    options = {"keep": 2} if "keep" in SELECTIONS.options(selection) else {}
    settings = {"rollout_selection": selection, "rollout_selection_options": options, "reward": sometimes_right}
    assert_same(tmp_path, ALL, **settings, **TWO_EPOCHS)


@pytest.mark.slow
def test_a_saving_that_is_off_is_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(**settings: Any) -> str:
        caplog.clear()
        trainer_of(tmp_path, **{**ALL, **settings})
        return caplog.text

    assert "is off" not in said()
    assert "TRL's micro-batches" not in said()
    assert "is off" not in said(gradient_checkpointing=True)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert "share_prompt_prefix is off: reentrant gradient checkpointing has no gradient" in said(**reentrant)
    assert "share_prompt_prefix" not in said(share_prompt_prefix=False, **reentrant)
    assert "skip_zero_advantage_rows is off: every row has a KL penalty" in said(
        beta=0.1, model=str(save_tiny(tmp_path / "m"))
    )
    for setting in ({"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}):
        assert "a step takes TRL's micro-batches, with every row and all padding: the entropy bonus" in said(**setting)
        assert "is not kept" not in caplog.text
        assert "micro_batch_tokens=99 is not kept: a micro-batch is" in said(micro_batch_tokens=99, **setting)
    assert "is not kept" not in said(micro_batch_tokens=99)
    dynamic = LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    lines = said(model=LlamaForCausalLM(dynamic), micro_batch_tokens=99)
    for name in ("share_prompt_prefix", "dynamic_micro_batches"):
        assert f"{name} is off: its rotary embedding changes with the length of a pass" in lines
    assert "micro_batch_tokens=99 is not kept" in lines


@pytest.mark.slow
def test_learned_positions_keep_the_padding_as_in_trl(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        size = {"vocab_size": len(WORDS), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": 1}
        shape = GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(shape).double()

    plain = trained(tmp_path / "plain", model=model(), **OFF_POLICY, **PLAIN)
    ours = trained(tmp_path / "ours", model=model(), **OFF_POLICY, **ALL)
    batching = ours._planner.batching
    assert (batching.dynamic, batching.skip_zero_advantage, batching.share_prompts) == (False, True, False)
    assert weight_difference(plain.model, model()) > 1e-3
    assert weight_difference(plain.model, ours.model) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_kl_penalty_keeps_all_rows(checkpointing: bool, tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "model"))
    init = {"model": model, "model_init_kwargs": {"dtype": torch.float64}, "beta": 0.1}
    _, ours = assert_same(tmp_path, ALL, **init, **TWO_EPOCHS, gradient_checkpointing=checkpointing)
    assert ours._planner.batching.share_prompts
    assert {entry["step/rows_trained"] for entry in logs(ours)} == {1.0}


@pytest.mark.slow
def test_own_loss_with_gradient_at_zero_advantage_keeps_rows(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from trl_ext import POLICY_LOSSES, TokenLoss\n\n"
        "@POLICY_LOSSES.register\n"
        "def pulled_up(x):\n"
        "    return TokenLoss(-(x.advantage + 0.1) * x.logp)\n"
    )
    own = {"preset": None, "advantage": "group_mean", "policy_loss": f"{file}:pulled_up", "aggregation": "token_mean"}
    _, ours = assert_same(tmp_path, ALL, **own)
    assert {entry["step/rows_trained"] for entry in logs(ours)} == {1.0}


@pytest.mark.slow
def test_momentum_decay_and_clipping_apply_without_useful_rows(tmp_path: Path) -> None:
    def first_step_only(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return fraction_of_ones(completions) if trainer_state.global_step == 0 else [0.0] * len(completions)

    common = {"reward": first_step_only, "optim": "adamw_torch", "weight_decay": 0.1, "max_grad_norm": 0.5}
    common["adam_epsilon"] = 1e-2  # or Adam would blow rounding up where there is next to no gradient
    plain, ours = assert_same(tmp_path, ALL, **{**common, "learning_rate": 0.01})
    assert [entry["step/rows_trained"] for entry in logs(ours)][1:] == [0.0, 0.0]
    assert ["entropy" in entry for entry in logs(ours)] == [True, False, False]  # measured on no row, and not 0
    assert len(plain.seen) == 3 * 16
    assert [sum(step == s for s, _, _ in ours.seen) for step in range(3)][1:] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["lora", "truncated", "own_prompts", "checkpointing", "multiple_of", "tools", "checkpointed_lora",
             "checkpointed_last_tokens", "reentrant"],
)  # fmt: skip
def test_other_settings_do_not_either(kind: str, tmp_path: Path) -> None:
    def with_tools(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rollout = scripted(words_of_row)(prompts, trainer)
        return {**rollout, "env_mask": [[int(i % 3 != 1) for i, _ in enumerate(c)] for c in rollout["completion_ids"]]}

    def with_own_prompts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Every second row of a group has a prompt of the same length, every third a longer one."""
        rollout = scripted(words_of_row)(prompts, trainer)
        ids = rollout["prompt_ids"]
        return {**rollout, "prompt_ids": [[3 + i % 2] * (1 + i % 3 // 2) + row[1:] for i, row in enumerate(ids)]}

    def with_last_tokens(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts of one token, so that there is nothing to share."""
        rollout = scripted(words_of_row)(prompts, trainer)
        return {**rollout, "prompt_ids": [row[-1:] for row in rollout["prompt_ids"]]}

    lora = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")}
    checkpointing = {"gradient_checkpointing": True}
    settings: dict[str, dict[str, Any]] = {
        "lora": lora,
        "checkpointing": checkpointing,
        "reentrant": {**checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "checkpointed_lora": {**lora, **checkpointing},
        "checkpointed_last_tokens": {"rollout_func": with_last_tokens, **checkpointing},
        "multiple_of": {"pad_to_multiple_of": 8},
        "truncated": {"mask_truncated_completions": True, "stop": ["stop"]},
        "tools": {"rollout_func": with_tools},
        "own_prompts": {"rollout_func": with_own_prompts},
    }
    if "peft_config" in settings[kind]:
        torch.manual_seed(0)
        plain, ours = (
            trained(tmp_path / name, **settings[kind], **on, **TWO_EPOCHS) for name, on in (("a", PLAIN), ("b", ALL))
        )
        assert weight_difference(plain.model, ours.model) < 1e-7
        assert not isinstance(
            ours._loss.forward.bare, peft.PeftModel
        )  # with it prompts would go through the head as well
    else:
        _, ours = assert_same(tmp_path, ALL, **settings[kind], **TWO_EPOCHS)
    assert ours._planner.batching.share_prompts == (kind != "reentrant")


@pytest.mark.slow
def test_metrics_cover_all_rows_or_state_their_number(tmp_path: Path) -> None:
    plain, ours = assert_same(tmp_path, ALL, **TWO_EPOCHS, policy_loss_options={"eps_low": 0.02})
    for a, b in zip(logs(plain), logs(ours), strict=True):
        for name in ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean", "loss", "grad_norm"):
            assert b[name] == pytest.approx(a[name], abs=1e-6), name
        assert 0 < b["step/rows_trained"] <= 0.5
        assert "step/rows_trained" not in a
    assert max(entry["clip_ratio/region_mean"] for entry in logs(plain)) > 0.01


def shapes_computed(path: Path, **settings: Any) -> tuple[list[tuple[int, int]], Any]:
    """Rows and tokens of each pass through the first layer in one rollout's training, and the trainer."""
    trainer, shapes = trainer_of(path, **settings, n_grpo_steps=1), []
    trainer.model.model.layers[0].register_forward_hook(lambda _, args, out: shapes.append(args[0].shape[:2]))
    trainer.train()
    return [tuple(shape) for shape in shapes], trainer


@pytest.mark.slow
def test_fewer_tokens_are_computed(tmp_path: Path) -> None:
    tokens = []
    for savings in (PLAIN, {**PLAIN, "skip_zero_advantage_rows": True}, {**ALL, "share_prompt_prefix": False}, ALL):
        shapes, trainer = shapes_computed(tmp_path, **savings)
        tokens.append(sum(rows * width for rows, width in shapes))
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == 4
    assert tokens[2:] == [124, 75]  # each group's prompt once, and no padding
    assert tokens[1] / tokens[0] == logs(trainer)[0]["step/rows_trained"] < 0.5


LIMIT = 60
SMALL = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 8, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip


def limited(path: Path, sharing: bool, calls: int, **settings: Any) -> tuple[list[tuple[int, int]], Any]:
    """`shapes_computed` with a limit of tokens under which a step has more micro-batches than TRL has calls for it."""
    rows = {"per_device_train_batch_size": 32 // calls, "micro_batch_tokens": LIMIT, "share_prompt_prefix": sharing}
    return shapes_computed(path, **{**ALL, **rows, "advantage": "raw", "policy_loss": "reinforce", **settings})


# Rows and tokens of each pass; on shared prompts first those over the prompts of a set, then its completions in one row.
PASSES = {
    False: [(2, 21), (3, 19), (3, 18), (3, 17), (4, 15), (3, 13)],
    True: [(2, 15), (3, 9), (1, 30), (1, 30), (1, 28), (1, 7), (1, 7), (1, 27)],
}


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 2, 16])
def test_a_limit_of_tokens_is_kept_however_many_calls(calls: int, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", **PLAIN, advantage="raw", policy_loss="reinforce", n_grpo_steps=1)
    assert weight_difference(plain.model, tiny_model().double()) > 1e-3
    for sharing, passes in PASSES.items():
        shapes, trainer = limited(tmp_path, sharing, calls)
        assert shapes == passes
        assert max(rows * width for rows, width in shapes) <= LIMIT
        assert weight_difference(plain.model, trainer.model) < 1e-7
        assert (trainer.state.global_step, trainer._step) == (1, calls)
        for name in ("loss", "grad_norm"):
            assert logs(trainer)[0][name] == pytest.approx(logs(plain)[0][name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip_cov", "off_policy", "kl", "checkpointing"])
def test_more_micro_batches_than_calls_change_nothing(kind: str, tmp_path: Path) -> None:
    init = {"model": str(save_tiny(tmp_path / "model")), "model_init_kwargs": {"dtype": torch.float64}}
    settings: dict[str, dict[str, Any]] = {
        "clip_cov": {"policy_loss": "clip_cov", "policy_loss_options": {"fraction": 0.2, "low": 0.01}, **TWO_EPOCHS},
        "off_policy": {**OFF_POLICY, "learning_rate": 0.03},
        "kl": {**init, "beta": 0.1, **TWO_EPOCHS},
        "checkpointing": {"gradient_checkpointing": True, **TWO_EPOCHS},
    }
    plain = trained(tmp_path / "plain", **settings[kind], **PLAIN)
    rows = {"per_device_train_batch_size": 16, "micro_batch_tokens": LIMIT}
    ours = trained(tmp_path / "ours", **settings[kind], **{**PLAIN, **ALL}, **rows)
    assert max(len(plan) for plan in ours._planner.plans) > ours._planner.accumulation == 1
    assert weight_difference(plain.model, tiny_model().double()) > 1e-3
    assert weight_difference(plain.model, ours.model) < 1e-7


@pytest.mark.slow
def test_a_row_longer_than_the_limit_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, **{**PLAIN, **ALL}, micro_batch_tokens=20, n_grpo_steps=2)
    assert caplog.text.count("micro_batch_tokens=20: a row has 2") == 1, caplog.text
    caplog.clear()
    trained(tmp_path, **{**PLAIN, **ALL}, micro_batch_tokens=40)
    assert "a row has" not in caplog.text


def test_of_equal_rows_one_is_computed(tmp_path: Path) -> None:
    settings = {**ALL, "share_prompt_prefix": False, "reward": sometimes_right, "rollout_func": scripted(words_of_some)}
    shapes, trainer = shapes_computed(tmp_path, **settings)
    assert sum(rows for rows, _ in shapes) == 32 * logs(trainer)[0]["step/rows_trained"] / 2 > 0


def test_model_without_attention_heads_still_drops_rows(tmp_path: Path) -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    config = ExtGRPOConfig(output_dir=str(tmp_path), preset="grpo_clip", report_to="none", use_cpu=True)
    facts = dict.fromkeys(("aux_loss", "images", "fsdp", "one_process"), False)
    batching, lines = savings_of(config, model, keeps_rows=False, **facts)
    assert batching is not None
    assert (batching.skip_zero_advantage, batching.share_prompts, batching.dynamic) == (True, False, False)
    assert len(lines) == 2
