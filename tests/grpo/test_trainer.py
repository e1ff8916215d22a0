"""What a training run does around the losses: how often it generates and steps, what it masks, what it logs."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from tests.support.tiny import (
    chain_model,
    ends_early,
    fraction_of_ones,
    make_trainer,
    piece_tokenizer,
    prompts,
    save_tiny,
    scripted,
    tiny_model,
    train,
    weight_difference,
)
from tests.support.versions import needs_vllm
from trl_ext import AGGREGATIONS, PRESETS, ExtGRPOConfig, ExtGRPOTrainer, StepTotals
from trl_ext.generation.completion import Completion
from trl_ext.grpo.metrics import StepMetrics
from trl_ext.rewards.score import Score

EOS, STOP_WORD = 1, 6
OF_REWARDS = sorted(name for name, preset in PRESETS.items() if not preset.needs_teacher)
ON_POLICY: dict[str, Any] = {"rollout_batch_size": 16, "train_batch_size": 16, "n_grpo_steps": 2, "max_steps": -1}
OFF_POLICY: dict[str, Any] = {
    "rollout_batch_size": 16,
    "train_batch_size": 8,
    "epochs_per_rollout_batch": 2,
    "n_grpo_steps": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": -1,
}


class Recorder(ExtGRPOTrainer):
    """Keeps what goes into the objective and the weights that made each rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_row = self.log_tokens()
        self.seen: list[tuple[int, Any, dict[str, Any]]] = []  # optimizer step, LossInputs, keyword arguments
        self.rollouts: list[dict[str, Any]] = []
        self.rollout_weights: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []
        if self._loss is None:  # TRL's own
            return
        objective = self._loss.objective

        def record(x: Any, totals: Any, **others: Any) -> Any:
            self.seen.append((self.state.global_step, x, {**others, "totals": totals}))
            return objective(x, totals, **others)

        self._loss.objective = record  # type: ignore[assignment]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.rollout_weights.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})
        self.rollouts.append(super()._generate_and_score_completions(inputs))
        return self.rollouts[-1]

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


# Micro-batches as TRL cuts them; tests/grpo/test_step.py has ours, and that they come to the same.
AS_TRL_CUTS: dict[str, Any] = {
    "skip_zero_advantage_rows": False,
    "dynamic_micro_batches": False,
    "share_prompt_prefix": False,
}


def record(path: Path, reward: Any = ends_early, **overrides: Any) -> Any:
    return train(Recorder, ExtGRPOConfig, path, reward, **{"preset": "grpo_clip", **AS_TRL_CUTS, **overrides})


def logs(trainer: Any) -> list[dict[str, float]]:
    """One entry per optimizer step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def logp(model: Any, batch: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """(B, T) log-probabilities of the completions, from the plain softmax of the model's logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    all_logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return all_logp[:, -batch["completion_ids"].shape[1] :]


# Steps, rollouts, old log-probabilities.


@pytest.mark.moderate
def test_on_policy_training_is_one_step_per_rollout_at_ratio_one(tmp_path: Path) -> None:
    trainer = record(tmp_path, **ON_POLICY)
    assert trainer.state.global_step == 2
    assert [len(r["completion_ids"]) for r in trainer.rollouts] == [16, 16]
    assert len(trainer.seen) == 2 * 4  # micro-batches of 4
    for _, x, _ in trainer.seen:
        assert torch.equal(x.logp, x.old_logp)
        assert not x.old_logp.requires_grad
        assert x.logp.requires_grad
    assert [entry["clip_ratio/region_mean"] for entry in logs(trainer)] == [0, 0]


@pytest.mark.moderate
def test_off_policy_training_takes_handout_steps_per_rollout(tmp_path: Path) -> None:
    trainer = record(tmp_path, **OFF_POLICY, learning_rate=1.0)
    per_rollout = 2 * (16 // 8)  # epochs x optimizer steps per epoch
    assert trainer.state.global_step == 2 * per_rollout
    assert len(trainer.rollouts) == 2
    assert len(trainer.seen) == 2 * per_rollout * 2  # two micro-batches of 4 per optimizer step
    assert trainer.args.max_steps == 2 * per_rollout
    clipped = [entry["clip_ratio/region_mean"] for entry in logs(trainer)]
    assert clipped[0] == clipped[per_rollout] == 0  # the first step on a rollout is on-policy
    assert max(clipped) > 0.01


@pytest.mark.moderate
def test_old_logps_are_those_of_the_policy_that_sampled(tmp_path: Path) -> None:
    trainer = record(tmp_path, **OFF_POLICY, learning_rate=1.0)
    policy = tiny_model()
    for number, (weights, rollout) in enumerate(zip(trainer.rollout_weights, trainer.rollouts, strict=True)):
        policy.load_state_dict(weights)
        right = logp(policy, rollout)  # (N, T)
        seen = [x for step, x, _ in trainer.seen if step // 4 == number]
        old, mask = torch.cat([x.old_logp for x in seen]), torch.cat([x.mask for x in seen])
        assert not old.requires_grad
        assert len(old) == 2 * len(right)  # every row comes twice, in two epochs, shuffled
        # float32 sums over a vocabulary of 18: rounding stays below 1e-5, a step moves them by more than 1e-2
        assert ((old[:, None] - right).abs() * mask[:, None]).amax(dim=2).amin(dim=1).max() < 1e-5
        assert ((seen[-1].logp - seen[-1].old_logp).abs() * seen[-1].mask).max() > 1e-2


@pytest.mark.moderate
def test_the_handouts_group_std_advantages_reach_the_loss(tmp_path: Path) -> None:
    trainer = record(tmp_path, max_steps=1, num_generations=8)  # two groups of eight, not as many groups as rows in one
    rewards = torch.tensor([row["reward"] for row in trainer.last_rollout]).view(2, 8)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(trainer.rollouts[0]["advantages"], expected.flatten())
    seen = torch.cat([x.advantage for _, x, _ in trainer.seen])
    assert seen.shape == (16, 1)
    torch.testing.assert_close(seen.flatten().sort().values, expected.flatten().sort().values)
    torch.testing.assert_close(torch.tensor(list(trainer._logs["advantages"])[-16:]), expected.flatten())


def words_of_row(row: int, step: int) -> list[int]:
    return [3 + (row * 7 + i * i) % 15 for i in range(1 + row % 7)] + [EOS]


@pytest.mark.slow
def test_evaluation_between_steps_on_a_rollout_changes_nothing(tmp_path: Path) -> None:
    common = {"preset": "dapo", "num_iterations": 2, "rollout_func": scripted(words_of_row), "max_steps": 4}
    plain = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "a", fraction_of_ones, **common)
    evaluating = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "eval_dataset": prompts(4),
    }
    evaluated = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", fraction_of_ones, **common, **evaluating)
    assert sum("eval_reward" in entry for entry in evaluated.state.log_history) == 4
    assert weight_difference(plain.model, tiny_model()) > 1e-2
    # TRL's shuffle draws from the generator that the evaluation's data loader drew from: another order of summation
    assert weight_difference(plain.model, evaluated.model) < 1e-6
    assert [row["response"] for row in evaluated.last_rollout] == [row["response"] for row in plain.last_rollout]


@pytest.mark.parametrize("axes", [{}, {"preset": "grpo_clip"}], ids=["stock", "axes"])
@pytest.mark.parametrize(("rows", "generations"), [(3, 1), (6, 2), (4, None)])
def test_an_evaluation_has_any_batch_that_trl_takes(
    rows: int, generations: int | None, axes: dict[str, Any], tmp_path: Path
) -> None:
    batches = {"per_device_eval_batch_size": rows, "num_generations_eval": generations}
    given = {"eval_dataset": prompts(6), "rollout_func": scripted(words_of_row), **batches}
    ours = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **given, **axes).evaluate()
    trls = make_trainer(GRPOTrainer, GRPOConfig, tmp_path, fraction_of_ones, **given).evaluate()
    assert {name: ours[name] for name in ("eval_reward", "eval_entropy")} == pytest.approx(
        {name: trls[name] for name in ("eval_reward", "eval_entropy")}, abs=1e-6
    )
    if not axes:
        assert ours["eval_loss"] == trls["eval_loss"]


def test_evaluation_loss_uses_the_chosen_advantage(tmp_path: Path) -> None:
    given = {"per_device_eval_batch_size": 4, "num_generations_eval": 2, "eval_dataset": prompts(2)}
    given |= {"rollout_func": scripted(words_of_row), "preset": "no_baseline"}
    trainer = make_trainer(Recorder, ExtGRPOConfig, tmp_path, ends_early, **given)
    trainer.evaluate()
    ((_, x, _),) = trainer.seen
    rewards = list(trainer._logs["rewards"]["ends_early"])
    assert x.advantage.flatten().tolist() == rewards
    assert max(rewards) > 0
    assert list(trainer._logs["advantages"]) == rewards


@pytest.mark.slow
def test_adapter_with_kl_is_evaluated_against_its_reference(tmp_path: Path) -> None:
    settings = {
        "model": str(save_tiny(tmp_path / "model")),
        "peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
        "eval_dataset": prompts(2), "per_device_eval_batch_size": 4, "beta": 0.1, "preset": "grpo_clip",
    }  # fmt: skip
    trainer = train(Recorder, ExtGRPOConfig, tmp_path, fraction_of_ones, **OFF_POLICY, **settings)
    assert trainer.evaluate()["eval_kl"] > 0
    assert trainer.state.global_step == 8


@pytest.mark.moderate
def test_router_auxiliary_loss_is_added_and_logged_as_in_trl(tmp_path: Path) -> None:
    config = {**tiny_model().config.to_dict(), "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.5}
    given = {
        "rollout_func": scripted(words_of_row), "eval_dataset": prompts(1), "per_device_eval_batch_size": 4,
        "max_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    trls, ours = (
        train(trainer_class, config_class, tmp_path, fraction_of_ones, **given, **axes, model=moe_of(config | experts))
        for trainer_class, config_class, axes in (
            (GRPOTrainer, GRPOConfig, {"loss_type": "grpo"}),
            (ExtGRPOTrainer, ExtGRPOConfig, {"preset": "grpo_clip", "advantage_options": {"eps": 1e-4}}),
        )
    )
    for name in ("aux_loss", "eval_aux_loss"):
        found = [next(e[name] for e in t.state.log_history if name in e) for t in (trls, ours)]
        assert found[0] == pytest.approx(found[1], abs=1e-6), name
        assert found[0] > 0.1
    assert weight_difference(trls.model, ours.model) < 1e-6  # float32, SGD: other orders of summation


def moe_of(config: dict[str, Any]) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, output_router_logits=True))


# One optimizer step, however it is cut into micro-batches.


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_the_size_of_the_micro_batch_does_not_change_the_weights(aggregation: str, tmp_path: Path) -> None:
    trained = [
        train(
            ExtGRPOTrainer,
            ExtGRPOConfig,
            tmp_path / str(micro),
            fraction_of_ones,
            model=tiny_model().double(),
            rollout_func=scripted(words_of_row),
            preset="grpo_clip",
            aggregation=aggregation,
            train_batch_size=16,
            rollout_batch_size=32,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=16 // micro,
            max_grad_norm=0.0,
            max_steps=2,
        ).model
        for micro in (16, 4, 1)
    ]
    assert weight_difference(trained[0], tiny_model().double()) > 1e-4
    for other in trained[1:]:
        # SGD in float64, the model's norms and TRL's head in float32: 1e-8 apart. A micro-batch's own count gives 1e-3.
        assert weight_difference(trained[0], other) < 1e-7


@pytest.mark.moderate
def test_the_totals_count_the_optimizer_step_and_not_the_rollout(tmp_path: Path) -> None:
    trainer = record(tmp_path, fraction_of_ones, **OFF_POLICY, rollout_func=scripted(words_of_row))
    tokens = []
    for step in range(trainer.state.global_step):
        masks = [x.mask for s, x, _ in trainer.seen if s == step]
        totals = {others["totals"] for s, _, others in trainer.seen if s == step}
        tokens.append(sum(int(mask.sum()) for mask in masks))
        assert totals == {StepTotals(sequences=8, tokens=tokens[-1], max_tokens=12)}
    assert len(set(tokens)) > 1, "steps of equal length would hide that the rollout is counted"


# Stopping.


def test_completion_ended_by_the_stop_string_is_not_truncated(tmp_path: Path) -> None:
    # rows 0, 1 of 4 end at the stop word, row 2 at EOS, row 3 not at all
    ends = [[3, 10, STOP_WORD], [STOP_WORD], [4, 5, 3, 5, EOS], [3] * 12]
    trainer = record(
        tmp_path, fraction_of_ones, stop=["stop"], rollout_func=scripted(lambda row, _: ends[row % 4]), max_steps=1
    )
    entry = logs(trainer)[0]
    assert entry["completions/clipped_ratio"] == 0.25
    assert entry["completions/mean_terminated_length"] == 3  # of 3, 1 and 5
    assert entry["completions/min_terminated_length"] == 1
    assert entry["completions/max_terminated_length"] == 5
    assert entry["completions/mean_length"] == 21 / 4


@pytest.mark.moderate
def test_truncation_mask_spares_stop_string_completions(tmp_path: Path) -> None:
    ends = [[3, 10, STOP_WORD], [3] * 12]
    for stop, kept in ((["stop"], [3, 0]), (None, [0, 0])):  # without `stop`, TRL takes both for truncated
        trainer = record(
            tmp_path,
            fraction_of_ones,
            stop=stop,
            mask_truncated_completions=True,
            rollout_func=scripted(lambda row, _: ends[row % 2]),
            max_steps=1,
        )
        assert trainer.rollouts[0]["completion_mask"].sum(dim=1).tolist() == kept * 8
        assert sum(int(x.mask.sum()) for _, x, _ in trainer.seen) == sum(kept) * 8
        assert all(math.isfinite(loss) for loss in trainer.losses)


@pytest.mark.moderate
def test_generation_stops_at_the_stop_string_and_masks_the_rest(tmp_path: Path) -> None:
    trainer = record(tmp_path, stop=["stop"], max_steps=2)
    ended = 0
    for rollout in trainer.rollouts:
        for ids, mask in zip(rollout["completion_ids"], rollout["completion_mask"], strict=True):
            trained = ids[mask.bool()].tolist()
            assert STOP_WORD not in trained[:-1]
            assert trained[-1] in (STOP_WORD, EOS) or len(trained) == 12
            assert mask[: len(trained)].all()
            ended += trained[-1] == STOP_WORD
    assert ended > 3
    assert any(row["response"].endswith("stop") for row in trainer.last_rollout)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"mask_truncated_completions": True}], ids=["plain", "mask_truncated"])
def test_a_stop_string_that_never_comes_changes_nothing(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as many random numbers as the loop of transformers draws
    monkeypatch.setattr(
        "trl_ext.generation.decoding.draw", lambda scores, of_row: torch.multinomial(scores.softmax(-1)[of_row], 1)
    )
    monkeypatch.setattr("trl_ext.generation.decoding.MIN_ROWS_TO_SHRINK", 1000)
    stock = train(GRPOTrainer, GRPOConfig, tmp_path / "a", ends_early, **settings)
    ours = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "b", ends_early, stop=["8 " * 13], **settings)
    assert weight_difference(stock.model, tiny_model()) > 1e-2
    # the same draws and the same loss; only attention to masked rows may round differently
    assert weight_difference(stock.model, ours.model) < 1e-6


@pytest.mark.moderate
def test_stopping_keeps_the_users_gradient_checkpointing(tmp_path: Path) -> None:
    settings = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "max_steps": 1,
    }
    calls = []

    class Model(Qwen3ForCausalLM):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **others: Any) -> None:
            calls.append(gradient_checkpointing_kwargs)
            super().gradient_checkpointing_enable(gradient_checkpointing_kwargs, **others)

    for stop in (None, ["stop"]):
        calls.clear()
        record(tmp_path, model=Model(tiny_model().config), stop=stop, **settings)
        assert len(calls) > 1  # at the start, and again after generating
        assert all(kwargs == {"use_reentrant": True} for kwargs in calls), (stop, calls)


@pytest.mark.moderate
@pytest.mark.parametrize("minimum", [None, 5])
def test_completions_have_at_least_the_minimum_of_tokens(minimum: int | None, tmp_path: Path) -> None:
    bias = {"generation_kwargs": {"sequence_bias": [[[EOS], 4.0]]}}  # the policy likes to end at once
    trainer = record(tmp_path, sampling_min_tokens=minimum, **bias, max_steps=2)
    shortest = min(int(r["completion_mask"].sum(dim=1).min()) for r in trainer.rollouts)
    if minimum is None:
        assert shortest == 1  # nothing but EOS: an empty answer
        assert any(row["response"] == "" for row in trainer.last_rollout)
    else:
        assert shortest == minimum + 1  # the minimum, and then EOS
    assert all(math.isfinite(loss) for loss in trainer.losses)
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("preset", OF_REWARDS)
def test_a_rollout_of_empty_completions_trains_without_nan(preset: str, tmp_path: Path) -> None:
    trainer = record(tmp_path, preset=preset, rollout_func=scripted(lambda row, step: [EOS]), max_steps=1)
    assert all(math.isfinite(loss) for loss in trainer.losses)
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert logs(trainer)[0]["completions/max_length"] == 1


def test_tokens_not_written_by_the_model_are_not_trained_on(tmp_path: Path) -> None:
    def with_environment(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rollout = scripted(lambda row, step: [3, 4, 5, 10, EOS])(prompts, trainer)
        return {**rollout, "env_mask": [[1, 0, 0, 1, 1] for _ in prompts]}

    trainer = record(tmp_path, fraction_of_ones, rollout_func=with_environment, max_steps=1)
    for _, x, others in trainer.seen:
        assert x.mask.tolist() == [[True, False, False, True, True]] * 4
        assert others["totals"].tokens == 16 * 3


# Rewards that are missing.


def sometimes(completions: list[str], **_: Any) -> list[float | None]:
    return [None if i % 4 == 1 else math.nan if i % 4 == 2 else float(i % 8 == 0) for i, _ in enumerate(completions)]


def test_completion_without_reward_is_ignored_and_advantage_zero(tmp_path: Path) -> None:
    trainer = record(tmp_path, sometimes, max_steps=1)
    # groups of reward 1, None, NaN, 0 and of 0, None, NaN, 0 in turn; the first has mean 1/2 and std sqrt(1/2)
    first = [2**-0.5, 0, 0, -(2**-0.5)]
    advantages = trainer.rollouts[0]["advantages"].view(4, 4)
    torch.testing.assert_close(advantages, torch.tensor([first, [0.0] * 4] * 2), rtol=0, atol=1e-5)
    assert [math.isnan(row["reward"]) for row in trainer.last_rollout] == [False, True, True, False] * 4
    assert logs(trainer)[0]["reward"] == 0.25
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted({*OF_REWARDS} - {"dapo_full"}))
def test_without_any_reward_there_is_a_warning_and_no_update(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("trl").propagate = True
    with caplog.at_level(logging.WARNING):
        trainer = record(tmp_path, lambda completions, **_: [None] * len(completions), preset=preset, max_steps=1)
    assert "All reward functions returned None" in caplog.text
    assert trainer.losses == [0.0] * 4
    assert weight_difference(trainer.model, tiny_model()) == 0


def test_reward_functions_are_summed_by_weight_where_they_apply(tmp_path: Path) -> None:
    def half(completions: list[str], **_: Any) -> list[float | None]:
        return [0.5 if i % 2 else None for i, _ in enumerate(completions)]

    trainer = record(tmp_path, [half, sometimes], reward_weights=[2.0, 3.0], max_steps=1)
    found = [row["reward"] for row in trainer.last_rollout[:8]]
    assert found[0::2][0] == 3.0
    assert math.isnan(found[2])
    assert [found[i] for i in (1, 3, 4, 5, 7)] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert trainer.last_rollout[1]["rewards"]["half"] == 0.5
    assert math.isnan(trainer.last_rollout[1]["rewards"]["sometimes"])


# An engine that samples with slightly other probabilities than the trainer's.


class Engine:
    """In place of TRL's side of vLLM: the completions of `words_of_row`, and log-probabilities that are a bit off."""

    def __init__(self, **_: Any) -> None: ...

    def sync_weights(self) -> None: ...

    def seed_requests(self, *_: Any) -> None: ...

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        completions = [words_of_row(row, 0) for row in range(len(prompts))]
        off = [[[-2.9 + 0.6 * math.sin(row + 2 * i)] for i, _ in enumerate(c)] for row, c in enumerate(completions)]
        off[0][0] = [None]  # vLLM could not say
        return prompts, completions, off, None


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("mode", ["token_mask", "sequence_truncate", "token_truncate", "sequence_mask"])
def test_the_samplers_mismatch_is_corrected_as_in_trl(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setattr("trl_ext.generation.vllm.ColocatedEngine", Engine)
    settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_mode": mode,
        "num_iterations": 2,
        "vllm_importance_sampling_clip_min": 0.4,
        "vllm_importance_sampling_clip_max": 1.5,
        "max_steps": 4,
    }
    stock = train(GRPOTrainer, GRPOConfig, tmp_path / "a", fraction_of_ones, loss_type="grpo", **settings)
    ours = record(tmp_path / "b", fraction_of_ones, advantage_options={"eps": 1e-4}, **settings)
    assert weight_difference(stock.model, tiny_model()) > 1e-3
    assert weight_difference(stock.model, ours.model) < 1e-6  # float32 rounding
    uncorrected = {**settings, "vllm_importance_sampling_correction": False}
    plain = record(tmp_path / "c", fraction_of_ones, advantage_options={"eps": 1e-4}, **uncorrected)
    assert weight_difference(plain.model, ours.model) > 1e-3
    assert all(others["sampler_weight"] is None for _, _, others in plain.seen)
    weights = [others["sampler_weight"].expand_as(x.mask)[x.mask] for _, x, others in ours.seen]
    zeros = (torch.cat(weights[:4]) == 0).float().mean().item()
    assert logs(ours)[0]["sampling/masked_frac"] == pytest.approx(zeros)
    assert (zeros > 0) == mode.endswith("mask")
    skipping = record(tmp_path / "d", half_skipped, **settings, skip_zero_advantage_rows=True)  # of the rows computed
    computed = [o["sampler_weight"].expand_as(x.mask)[x.mask] for step, x, o in skipping.seen if step == 0]
    fraction = (torch.cat(computed) == 0).float().mean().item()
    assert logs(skipping)[0]["step/rows_trained"] == 0.5
    assert logs(skipping)[0]["sampling/masked_frac"] == pytest.approx(fraction)


@pytest.mark.moderate
@needs_vllm
def test_weight_and_rejection_are_chosen_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setattr("trl_ext.generation.vllm.ColocatedEngine", Engine)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "num_iterations": 2, "max_steps": 2}
    axes = {
        "sampler_weight": "token", "sampler_weight_options": {"clip_max": 1.25},
        "sampler_rejection": "sequence_mean_k3", "sampler_rejection_options": {"threshold": 0.02},
    }  # fmt: skip
    trainer = record(tmp_path / "a", fraction_of_ones, **settings, **axes)
    kept, weights, lengths = [], [], []
    for step, x, others in trainer.seen:
        difference = ((x.old_logp - others["sampled_logp"]) * x.mask).nan_to_num(nan=0.0)
        k3 = ((difference.exp() - 1 - difference) * x.mask).sum(1) / x.mask.sum(1)
        wanted = difference.exp().clamp(max=1.25) * (k3 <= 0.02)[:, None]
        torch.testing.assert_close(others["sampler_weight"], wanted)
        if step == 0:
            kept.append((k3 <= 0.02).repeat_interleave(x.mask.sum(1)))
            weights.append(wanted[x.mask])
            lengths.append(x.mask.sum(1).repeat_interleave(x.mask.sum(1)))
    rejected, weight, length = ~torch.cat(kept), torch.cat(weights).double(), torch.cat(lengths)
    entry = logs(trainer)[0]
    assert 0 < rejected.float().mean() < 1
    assert entry["sampling/masked_frac"] == pytest.approx(rejected.float().mean().item())
    assert entry["sampling/weight_mean"] == pytest.approx(weight.mean().item())
    assert entry["sampling/effective_sample_size"] == pytest.approx(
        (weight.mean() ** 2 / weight.square().mean()).item()
    )
    for quarter in range(4):
        inside = (4 * (length - 1) // trainer.max_completion_length) == quarter
        name = f"sampling/masked_frac_length_{quarter + 1}"
        assert entry.get(name) == (pytest.approx(rejected[inside].float().mean().item()) if inside.any() else None)
    ours = record(tmp_path / "b", fraction_of_ones, **settings, policy_loss="dppo_tv")
    assert all(others["sampler_weight"].eq(1).all() for _, _, others in ours.seen)  # the loss has the ratio in it


@pytest.mark.slow
@needs_vllm
def test_who_chooses_no_correction_has_the_safe_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setattr("trl_ext.generation.vllm.ColocatedEngine", Engine)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "num_iterations": 2, "max_steps": 2, "output_dir": "unused"}
    named = {"sampler_weight": "token", "sampler_rejection": "sequence_mean_k3"}
    config = ExtGRPOConfig(**settings, use_cpu=True, preset="grpo_clip")
    assert {name: getattr(config, name) for name in named} == named
    settings.pop("output_dir")
    unset = record(tmp_path / "a", fraction_of_ones, **settings)
    assert weight_difference(unset.model, record(tmp_path / "b", fraction_of_ones, **settings, **named).model) == 0
    trl = record(tmp_path / "c", fraction_of_ones, **settings, vllm_importance_sampling_mode="sequence_mask")
    assert (trl.args.sampler_weight, trl.args.sampler_rejection) == ("sequence", "sequence_ratio")
    assert weight_difference(unset.model, trl.model) > 1e-4
    stock = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path / "d", fraction_of_ones, **settings)  # with TRL's loss
    assert stock.vllm_importance_sampling_mode == "sequence_mask"


def test_perplexities_and_chi_square_are_of_the_reported_tokens() -> None:
    metrics = StepMetrics()
    old, sampled = torch.tensor([[0.5, 0.25, 0.1]]).log(), torch.tensor([[0.25, 0.25, math.nan]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    metrics.add_mismatch(old, sampled, mask, torch.tensor([[2.0, 0.5, 1.0]]), max_tokens=3)
    found = metrics.finish(Accelerator(cpu=True), {})
    assert found["sampling/perplexity_trainer"] == pytest.approx(math.sqrt(8))  # of 1/2 and 1/4
    assert found["sampling/perplexity_sampler"] == pytest.approx(4)
    assert found["sampling/chi_square"] == pytest.approx((4 + 1) / 2 - 1)  # of the ratios 2 and 1
    assert found["sampling/effective_sample_size"] == pytest.approx((3.5 / 3) ** 2 / (5.25 / 3))


def test_log_probabilities_that_are_the_same_float_are_counted() -> None:
    metrics = StepMetrics()
    old = torch.tensor([[-0.5, -0.25, -1.0, -2.0, -3.0]])
    sampled = torch.tensor([[-0.5, -0.25 + 2**-26, math.nan, -2.0, -3.5]])
    metrics.add_logp_difference(old, sampled, torch.tensor([[True, True, True, True, False]]))
    found = metrics.finish(Accelerator(cpu=True), {})
    assert found["sampling/identical_fraction"] == pytest.approx(2 / 3)
    assert found["sampling/sampling_logp_difference/max"] == 2**-26


def half_skipped(completions: list[str], **_: Any) -> list[float]:
    """Groups of 4; every second one has zero variance."""
    return [1.0 if i // 4 % 2 else float(i % 4 == 0) for i, _ in enumerate(completions)]


@pytest.mark.moderate
@needs_vllm
def test_on_policy_the_correction_needs_no_second_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setattr("trl_ext.generation.vllm.ColocatedEngine", Engine)
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_clip_max": 1.5, "max_steps": 3}
    settings |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    forwards = Counter[str]()
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards[type(self).__name__] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    stock = train(GRPOTrainer, GRPOConfig, tmp_path / "a", fraction_of_ones, loss_type="grpo", **settings)
    ours = record(tmp_path / "b", fraction_of_ones, advantage_options={"eps": 1e-4}, **settings)
    assert weight_difference(stock.model, tiny_model()) > 1e-3
    assert weight_difference(stock.model, ours.model) < 1e-6  # float32 rounding
    assert all(others["sampler_weight"] is not None for _, _, others in ours.seen)
    assert forwards == {"GRPOTrainer": 3 + 3, "Recorder": 3}
    for ending in ("mean", "max"):
        name = f"sampling/sampling_logp_difference/{ending}"
        assert logs(ours)[0][name] == pytest.approx(logs(stock)[0][name])


# Metrics.


def graded(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
    """Correct in the second and third row of a group of four."""
    correct = [i % 4 in (1, 2) for i, _ in enumerate(completions)]
    log_extra("correct", correct)
    log_metric("rewards/answer_reward", sum(correct) / len(correct))
    log_metric("rewards/format_reward", 0.75)
    return [Score(c, correct=c) for c in correct]


def test_logged_metrics_have_the_values_worked_out_by_hand(tmp_path: Path) -> None:
    lengths = [2, 3, 5, 12]
    words = lambda row, step: ([4] * lengths[row % 4])[: lengths[row % 4] - (row % 4 < 3)] + [EOS] * (row % 4 < 3)  # noqa: E731
    trainer = record(tmp_path, graded, rollout_func=scripted(words), max_steps=1, max_grad_norm=0.0)
    entry = logs(trainer)[0]
    assert entry["completions/mean_length"] == 22 / 4
    assert entry["completions/mean_length_correct"] == 4  # of 3 and 5
    assert entry["completions/mean_length_incorrect"] == 7  # of 2 and 12
    assert entry["completions/clipped_ratio"] == 0.25
    assert entry["reward"] == entry["rewards/answer_reward"] == entry["rewards/graded/mean"] == 0.5
    assert entry["rewards/format_reward"] == 0.75
    assert entry["frac_reward_zero_std"] == 0
    # on-policy the loss is -mean A over sequences, and the advantages of a group sum to 0
    assert abs(entry["loss"]) < 1e-6
    assert entry["grad_norm"] > 0.01

    policy, rollout = tiny_model(), trainer.rollouts[0]  # the weights before the one step
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
    attention = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=attention).logits[:, :-1][
            :, -rollout["completion_ids"].shape[1] :
        ]
    entropy, mask = torch.distributions.Categorical(logits=logits).entropy(), rollout["completion_mask"].bool()
    by_row = [entropy[i][mask[i]].mean().item() for i in range(16)]
    # float32 sums over 18 words; the rows' values are 1e-2 apart and more
    assert [row["token_entropy"] for row in trainer.last_rollout] == pytest.approx(by_row, abs=1e-4)
    assert entry["entropy"] == pytest.approx(entropy[mask].mean().item(), abs=1e-4)


def test_last_rollout_is_kept_by_row_for_the_generation_log(tmp_path: Path) -> None:
    def words(row: int, step: int) -> list[int]:
        return [4] * (1 + row % 4) + [EOS]

    trainer = record(tmp_path, graded, rollout_func=scripted(words), max_steps=1)
    answers = {row["prompt"]: row["answer"] for row in prompts()}
    assert len({row["prompt"] for row in trainer.last_rollout}) == 4
    for i, row in enumerate(trainer.last_rollout):
        assert 0 < row.pop("token_entropy") <= math.log(18) + 1e-6
        prompt, correct = row.pop("prompt"), i % 4 in (1, 2)
        advantage = row.pop("advantage")
        assert advantage == pytest.approx(math.copysign(0.866, correct - 0.5), abs=1e-3)  # 0.5 / std of 0, 1, 1, 0
        tokens = trainer.of_row(i)["per_token"]
        assert (len(tokens["text"]), len(tokens["entropy"])) == (2 + i % 4, 2 + i % 4)
        assert tokens["advantage"] == pytest.approx(advantage, abs=1e-4)
        assert tokens["logp"] == tokens["sampled_logp"]  # on-policy, and the sampler says nothing
        assert row == {
            "response": " ".join("b" * (1 + i % 4)),
            "ground_truth": answers[prompt],
            "tokens": 2 + i % 4,
            "finish_reason": "stop",
            "entropy_estimate": None,  # the function that rolls out says nothing of it
            "correct": correct,
            "rewards": {"graded": float(correct)},
            "reward": float(correct),
        }


ALL_ROWS = {"temperature": 0.7, "max_steps": 1, "preset": "no_baseline"}  # of which only rewarded rows are trained on


@pytest.mark.parametrize("stop", [None, ["stop"]], ids=["TRL generates", "we generate"])
def test_entropy_estimate_is_of_all_sampled_tokens_and_all_rows(stop: list[str] | None, tmp_path: Path) -> None:
    trainer = train(Recorder, ExtGRPOConfig, tmp_path, ends_early, stop=stop, **ALL_ROWS)
    entry, (rollout,) = logs(trainer)[0], trainer.rollouts
    mask = rollout["completion_mask"].bool()
    surprisal = -logp(tiny_model(), rollout, temperature=0.7)  # of the weights before the one step
    by_row = {int(row): surprisal[i][mask[i]].mean().item() for i, row in enumerate(rollout["row"])}
    assert [row["entropy_estimate"] for row in trainer.last_rollout] == pytest.approx(
        [by_row[i] for i in range(16)], abs=1e-4
    )
    assert entry["sampling/entropy_estimate"] == pytest.approx(surprisal[mask].mean().item(), abs=1e-4)
    rewarded = {bool(row["reward"]) for row in trainer.last_rollout if row["token_entropy"] is not None}
    assert rewarded == {True}  # whose tokens alone `entropy` is of
    assert any(row["reward"] == 0 for row in trainer.last_rollout)


@pytest.mark.slow
def test_entropy_estimate_has_the_exact_entropy_as_its_mean(tmp_path: Path) -> None:
    trainer = record(tmp_path, learning_rate=0.0, max_steps=20, per_device_train_batch_size=16,
                     gradient_accumulation_steps=1)  # fmt: skip
    difference = torch.tensor([entry["sampling/entropy_estimate"] - entry["entropy"] for entry in logs(trainer)])
    assert abs(difference.mean()) < 4 * difference.std() / 20**0.5
    assert 0 < difference.std() < 0.3


def test_no_entropy_estimate_of_a_truncated_distribution(tmp_path: Path) -> None:
    trainer = record(tmp_path, top_k=3, max_steps=1)
    assert {row["entropy_estimate"] for row in trainer.last_rollout} == {None}
    assert "sampling/entropy_estimate" not in logs(trainer)[0]
    assert "entropy" in logs(trainer)[0]


def test_positive_reward_counts_as_correct_by_default(tmp_path: Path) -> None:
    words = lambda row, step: [10 if row % 2 else 4] * (1 + 2 * (row % 2)) + [EOS]  # noqa: E731
    trainer = record(tmp_path, fraction_of_ones, rollout_func=scripted(words), max_steps=1)
    entry = logs(trainer)[0]
    assert (entry["completions/mean_length_correct"], entry["completions/mean_length_incorrect"]) == (4, 2)


@pytest.mark.moderate
def test_a_logged_column_of_any_name_is_not_correctness(tmp_path: Path) -> None:
    def logs_correct(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("correct", ["no"] * len(completions))  # of another meaning
        return fraction_of_ones(completions)

    words = lambda row, step: [10 if row % 2 else 4] * (1 + 2 * (row % 2)) + [EOS]  # noqa: E731
    plain, logging = (
        record(tmp_path / name, reward, rollout_func=scripted(words), max_steps=1)
        for name, reward in (("plain", fraction_of_ones), ("logging", logs_correct))
    )
    assert logs(plain)[0]["completions/mean_length_correct"] == logs(logging)[0]["completions/mean_length_correct"] == 4
    assert logging.last_rollout[0]["correct"] == "no"


def test_groups_of_equal_reward_are_counted(tmp_path: Path) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(i == 5) for i, _ in enumerate(completions)]  # one of four groups has reward variance

    assert logs(record(tmp_path, reward, max_steps=1))[0]["frac_reward_zero_std"] == 0.75


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_logged_reference_kl_is_that_of_the_estimator(estimator: str, corrected: bool, tmp_path: Path) -> None:
    kl_settings = {"beta": 0.1, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
    model = str(save_tiny(tmp_path / "model"))
    trainer = record(tmp_path / "run", model=model, num_iterations=2, **kl_settings)
    kl = [entry["kl"] for entry in logs(trainer)]
    assert kl[0] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    for step in (1, 2):
        seen = [(x, others["ref_logp"]) for s, x, others in trainer.seen if s == step]
        by_hand = []
        for x, ref in seen:
            difference = (x.logp - ref)[x.mask].detach()
            value = {
                "k1": difference,
                "k2": difference.square() / 2,
                "k3": (-difference).exp() - 1 + difference,
            }[estimator]
            ratio = (x.logp - x.old_logp).exp()[x.mask].detach() if corrected else 1
            by_hand += (value * ratio).tolist()
        assert abs(kl[step]) > 1e-5
        # float32 rounding; k3 subtracts numbers near 1
        assert kl[step] == pytest.approx(sum(by_hand) / len(by_hand), abs=1e-5, rel=1e-3)


@pytest.mark.moderate
def test_every_documented_scalar_is_in_the_tensorboard_file(tmp_path: Path) -> None:
    trainer = record(
        tmp_path / "run",
        graded,
        model=str(save_tiny(tmp_path / "model")),
        beta=0.1,
        report_to="tensorboard",
        max_steps=2,
    )
    (event_file,) = tmp_path.rglob("events.out.tfevents*")
    events = EventAccumulator(str(event_file)).Reload()
    for name in (
        *("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_ratio/region_mean", "clip_ratio/low_mean"),
        *("reward", "reward_std", "rewards/graded/mean", "rewards/answer_reward", "rewards/format_reward"),
        "frac_reward_zero_std",
        *("completions/mean_length", "completions/mean_length_correct", "completions/mean_length_incorrect"),
        "completions/clipped_ratio",
    ):
        written = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        logged = {entry["step"]: entry[name] for entry in logs(trainer)}
        assert written == pytest.approx(logged), name


# Adapters, and what fails before anything is loaded.


@pytest.mark.slow
def test_lora_trains_the_adapters_alone_and_survives_saving(tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    path = str(save_tiny(tmp_path / "model"))
    trainer = record(tmp_path / "run", model=path, peft_config=lora, beta=0.05)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    base, original = trainer.model.get_base_model().state_dict(), tiny_model().state_dict()
    for name, weight in original.items():
        kept = base.get(name, base.get(name.replace("_proj.", "_proj.base_layer.")))
        assert torch.equal(kept, weight), name
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "saved").eval()
    batch = trainer.rollouts[-1]
    reloaded, before = logp(loaded, batch), logp(AutoModelForCausalLM.from_pretrained(path), batch)
    torch.testing.assert_close(reloaded, logp(trainer.model.eval(), batch), rtol=0, atol=1e-6)
    assert (reloaded - before).abs().max() > 1e-4


@pytest.mark.moderate
def test_a_saved_model_loads_with_the_trained_weights(tmp_path: Path) -> None:
    trainer = record(tmp_path / "run", max_steps=1)
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert weight_difference(loaded, trainer.model) == 0
    assert weight_difference(loaded, tiny_model()) > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "grpo_clop"}, "grpo_clip"),
        ({"policy_loss": "ppo_clip", "policy_loss_options": {"eps": 0.2}}, "eps_low"),
        ({"preset": "dapo", "loss_type": "grpo"}, "loss_type"),
        ({"preset": "dapo", "rollout_batch_size": 16, "train_batch_size": 12}, "16.*12"),
        ({"preset": "dapo", "kl_estimator": "k1"}, "kl_estimator='k1' needs beta"),
    ],
)
def test_a_setting_that_cannot_be_fails_before_a_model_loads(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, model="no/such/model", **settings)


def test_the_trainer_refuses_trls_own_config(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ExtGRPOConfig"):
        make_trainer(ExtGRPOTrainer, GRPOConfig, tmp_path, ends_early, model="no/such/model")


def test_validation_is_reproducible_and_does_not_affect_training(tmp_path: Path) -> None:
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, stop=["stop"])
    texts = [row["prompt"] for row in prompts(7)]
    before = torch.get_rng_state()
    first, second, other = (trainer.sample(texts, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert first == second != other


@pytest.mark.parametrize("stop", [["stop"], None])
def test_validation_may_sample_otherwise_than_training(stop: list[str] | None, tmp_path: Path) -> None:
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, stop=stop)
    texts = [row["prompt"] for row in prompts(7)]
    before = trainer.generation_config.to_dict()
    greedy = [trainer.sample(texts, 3, seed, temperature=0) for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    assert greedy[0] != trainer.sample(texts, 3, 1)
    assert {completion.tokens for completion in trainer.sample(texts, 3, 1, max_tokens=2)} <= {1, 2}
    assert max(completion.tokens for completion in greedy[0]) > 2
    assert trainer.generation_config.to_dict() == before


@pytest.mark.parametrize("stop", [["stop"], None])
def test_validation_has_no_dropout_and_training_keeps_it(stop: list[str] | None, tmp_path: Path) -> None:
    adapter = peft.LoraConfig(
        r=4, lora_alpha=64, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False
    )
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, stop=stop, peft_config=adapter)
    texts = [row["prompt"] for row in prompts(7)]
    trainer.model.eval()
    exact = trainer.sample(texts, 3, 1, temperature=0)
    assert not trainer.model.training
    trainer.model.train()
    assert trainer.sample(texts, 3, 1, temperature=0) == exact
    assert all(module.training for module in trainer.model.modules())


def test_validation_returns_one_completion_per_prompt_in_order(tmp_path: Path) -> None:
    tokenizer = piece_tokenizer()
    model = chain_model(tokenizer, ["0", "x", "</", "answer", ">"], ["1", "y", "<eos>"], ["2", "z", "z"])
    chain = {"model": model, "processing_class": tokenizer, "stop": ["</answer>"]}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **chain)
    ends = {"0": Completion("x</answer>", 4, True), "1": Completion("y", 2, True), "2": Completion("z" * 12, 12, False)}
    texts = ["aaaa0", "1", "bb2", "0", "ccc1", "2", "a0"]
    for batch_size in (1, 3, 100):
        found = trainer.sample(texts, batch_size, seed=0)
        assert [replace(completion, entropy_estimate=None) for completion in found] == [ends[t[-1]] for t in texts]
        assert [completion.entropy_estimate for completion in found] == pytest.approx([0.0] * 7, abs=1e-3)


@pytest.mark.moderate
def test_logging_outside_training_keeps_the_metrics_of_the_step(tmp_path: Path) -> None:
    class LogsWithin(TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trainer.log_now({"validation/accuracy": 0.5})

    callback = LogsWithin()
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, preset="dapo", callbacks=[callback])
    callback.trainer = trainer
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "validation/accuracy" in e] == [1, 2, 3]
    assert all({"entropy", "reward", "clip_ratio/region_mean"} <= entry.keys() for entry in logs(trainer))


def test_fewer_problems_than_a_rollout_are_refused_at_start(tmp_path: Path) -> None:
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, train_dataset=prompts(3))
    with pytest.raises(
        ValueError, match=r"a rollout needs 4 different training problems .* there are 3: .* to 12 or less"
    ):
        trainer.train()
    assert trainer.state.global_step == 0
