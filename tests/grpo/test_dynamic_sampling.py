"""A rollout sampled again until its groups are informative, by its parts and in a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support.tiny import ends_early, make_trainer, tiny_model, weight_difference
from trl_ext import ADVANTAGES, ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.grpo.dynamic_sampling import assemble, fill
from trl_ext.grpo.rollout import Rollout, SampledBatch
from trl_ext.training.stopping import TimeBudget


def test_informative_groups_come_in_the_order_of_their_sampling() -> None:
    assert fill([[True, True, True]]) == [(0, 0), (0, 1), (0, 2)]
    assert fill([[False, True, False], [True, False, True]]) == [(0, 1), (1, 0), (1, 2)]
    assert fill([[False, True, False], [True, True, True]]) == [(0, 1), (1, 0), (1, 1)]
    assert fill([[False, True, False], [False, False, True]]) == [(0, 1), (1, 2), (0, 0)]  # what is missing
    assert fill([[False, False], [False, False]]) == [(0, 0), (0, 1)]


def a_try(first: int, prompt: int, completion: int, rows: int = 4) -> SampledBatch:
    """Rows with the tokens `first`, `first` + 1, ... and rewards to match."""
    value = torch.arange(first, first + rows)
    batch = {
        "prompt_ids": value[:, None].expand(rows, prompt), "prompt_mask": torch.ones(rows, prompt),
        "completion_ids": value[:, None].expand(rows, completion), "advantages": value.float(),
        "num_items_in_batch": torch.tensor(9.0),
    }  # fmt: skip
    rollout = Rollout(value[:, None].float(), value.float(), value % 2 == 0, value + 0.5, value + 0.25, 0)
    return SampledBatch(batch, rollout, [{"row": i} for i in value.tolist()], value.tolist())


def test_a_rollout_is_put_together_from_whole_groups() -> None:
    tries = [a_try(0, prompt=2, completion=3), a_try(10, prompt=3, completion=1)]
    found = assemble(tries, [(0, 1), (1, 0)], 2, lambda tensor: tensor, lambda rows: rows)
    wanted = [2, 3, 10, 11]
    assert found.problems == [row["row"] for row in found.rows] == wanted
    assert found.batch["prompt_ids"].tolist() == [[0, 2, 2], [0, 3, 3], [10] * 3, [11] * 3]
    assert found.batch["prompt_mask"].tolist() == [[0, 1, 1], [0, 1, 1], [1] * 3, [1] * 3]
    assert found.batch["completion_ids"].tolist() == [[2] * 3, [3] * 3, [10, 0, 0], [11, 0, 0]]
    assert found.batch["advantages"].tolist() == found.rollout.reward.tolist() == wanted
    assert found.rollout.rewards.tolist() == [[row] for row in wanted]
    assert found.rollout.finished.tolist() == [True, False, True, False]
    assert found.rollout.lengths.tolist() == [row + 0.5 for row in wanted]
    assert found.rollout.correct.tolist() == [row + 0.25 for row in wanted]
    assert found.batch["num_items_in_batch"] == 9


# In a trainer: 30 problems, of which every third has completions of either kind.


def by_problem(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(i % 2) if int(prompt) % 3 == 0 else 1.0 for i, prompt in enumerate(prompts)]


def trainer_of(path: Path, reward: Any = by_problem, **settings: Any) -> Any:
    rows = Dataset.from_list([{"prompt": str(i), "answer": "1"} for i in range(30)])
    axes = {"preset": "grpo_clip", "rollout_batch_size": 16, "train_batch_size": 16, "max_steps": 4, **settings}
    return make_trainer(ExtGRPOTrainer, ExtGRPOConfig, path, reward, train_dataset=rows, **axes)


def logs(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
def test_a_step_trains_on_informative_groups_only(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "a")
    plain.train()
    full = trainer_of(tmp_path / "b", dynamic_sampling_tries=20)
    full.train()
    assert min(logs(plain, "step/rows_trained")) < 1
    assert logs(full, "step/rows_trained") == [1.0] * 4
    assert logs(full, "dynamic_sampling/informative_frac") == [1.0] * 4
    assert max(logs(full, "dynamic_sampling/tries")) > 2
    prompts = [row["prompt"] for row in full.last_rollout]
    assert all(len(set(prompts[i : i + 4])) == 1 for i in range(0, 16, 4))  # groups stay whole
    assert all(int(row["prompt"]) % 3 == 0 for row in full.last_rollout)
    assert [row["reward"] for row in full.last_rollout] == [0.0, 1.0] * 8
    assert all(row["token_entropy"] is not None for row in full.last_rollout)
    again = trainer_of(tmp_path / "c", dynamic_sampling_tries=20)
    again.train()
    assert weight_difference(again.model, full.model) == 0
    assert weight_difference(again.model, tiny_model()) > 1e-4


@pytest.mark.slow
def test_a_group_with_equal_answers_is_not_trained_on(tmp_path: Path) -> None:
    def penalized(prompts: list[str], **_: Any) -> list[float]:
        return [float(i % 2) if int(prompt) % 3 == 0 else 1.0 - 0.3 * (i % 2) for i, prompt in enumerate(prompts)]

    def solved(completions: list[str], **_: Any) -> list[float]:
        return [1.0 - 0.3 * (i % 2) for i in range(len(completions))]

    trainer = trainer_of(tmp_path / "a", penalized, dynamic_sampling_tries=20)
    trainer.train()
    assert all(int(row["prompt"]) % 3 == 0 for row in trainer.last_rollout)
    filled = trainer_of(tmp_path / "b", solved, dynamic_sampling_tries=2, max_steps=2)
    filled.train()
    assert logs(filled, "rollout_selection/kept_frac") == [0.0] * 2
    assert weight_difference(filled.model, tiny_model()) == 0


@pytest.mark.slow
def test_tries_are_bounded_and_the_rest_is_of_the_first(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, lambda completions, **_: [1.0] * len(completions), dynamic_sampling_tries=3)
    trainer.train()
    assert logs(trainer, "dynamic_sampling/tries") == [3.0] * 4
    assert logs(trainer, "dynamic_sampling/informative_frac") == [0.0] * 4
    assert weight_difference(trainer.model, tiny_model()) == 0


def test_no_try_begins_that_the_time_budget_has_no_room_for(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, dynamic_sampling_tries=20, max_steps=1)
    clock: Any = SimpleNamespace(seconds=lambda: 99.9999)
    trainer.callback_handler.callbacks.append(budget := TimeBudget(trainer, clock, 100.0))
    budget.on_train_begin = lambda *_, **__: None  # type: ignore[method-assign]
    trainer.train()
    assert logs(trainer, "dynamic_sampling/tries") == [1.0]


def test_dynamic_sampling_says_what_it_does_not_go_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dynamic_sampling_tries must be at least 1, got 0"):
        trainer_of(tmp_path, dynamic_sampling_tries=0)
    with pytest.raises(ValueError, match="dynamic_sampling_tries=2 needs a preset or an axis"):
        trainer_of(tmp_path, dynamic_sampling_tries=2, preset=None)
    with pytest.raises(ValueError, match="log_completions=True would be ignored next to dynamic_sampling_tries=2"):
        trainer_of(tmp_path, dynamic_sampling_tries=2, log_completions=True)


def gfpo(reward: torch.Tensor, *, lengths: torch.Tensor) -> torch.Tensor:
    """GFPO's advantages (arXiv:2508.09726, algorithm 1), one group at a time: mean and deviation of the 2 shortest."""
    found = torch.zeros_like(reward)
    for group, of in enumerate(lengths.tolist()):
        kept = sorted(range(len(of)), key=lambda i: of[i])[:2]
        values = reward[group, kept]
        found[group, kept] = (values - values.mean()) / (values.std() + 1e-6)
    return found


@pytest.mark.slow
def test_a_selection_leaves_rows_out_of_step_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of the same method written as an advantage."""
    monkeypatch.setitem(ADVANTAGES, "gfpo", gfpo)
    options = {"rollout_selection": "shortest", "rollout_selection_options": {"keep": 2}}
    selected = trainer_of(tmp_path / "a", ends_early, **options)
    selected.train()
    written = trainer_of(tmp_path / "b", ends_early, advantage="gfpo")
    written.train()
    assert weight_difference(selected.model, written.model) < 1e-6
    assert weight_difference(selected.model, tiny_model()) > 1e-4
    assert logs(selected, "rollout_selection/kept_frac") == [0.5] * 4
    assert max(logs(selected, "step/rows_trained")) <= 0.5
    plain = trainer_of(tmp_path / "c", ends_early)
    plain.train()
    assert weight_difference(selected.model, plain.model) > 1e-4


def gdpo_of_the_shortest(
    reward: torch.Tensor, *, rewards: torch.Tensor, weights: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """GDPO of the 2 shortest completions of each group, as if there were no others."""
    places = lengths.argsort(dim=1, stable=True)[:, :2]
    of_each = rewards.take_along_dim(places[:, :, None], dim=1)
    found = ADVANTAGES["gdpo"](reward.take_along_dim(places, dim=1), rewards=of_each, weights=weights)
    return torch.zeros_like(reward).scatter(1, places, found)


@pytest.mark.slow
def test_what_is_left_out_is_in_no_reward_functions_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "gdpo_of_the_shortest", gdpo_of_the_shortest)
    options = {"rollout_selection": "shortest", "rollout_selection_options": {"keep": 2}}
    selected = trainer_of(tmp_path / "a", [ends_early, by_problem], advantage="gdpo", **options)
    selected.train()
    written = trainer_of(tmp_path / "b", [ends_early, by_problem], advantage="gdpo_of_the_shortest")
    written.train()
    assert weight_difference(selected.model, written.model) < 1e-6
    assert weight_difference(selected.model, tiny_model()) > 1e-4


@pytest.mark.slow
def test_a_selection_says_which_groups_are_sampled_again(tmp_path: Path) -> None:
    def unequal(prompts: list[str], **_: Any) -> list[float]:
        return [1.0 + 0.1 * (i % 2) * (1 + 4 * (int(prompt) % 3 == 0)) for i, prompt in enumerate(prompts)]

    settings = {"dynamic_sampling_tries": 20, "rollout_selection": "reward_variance"}
    trainer = trainer_of(tmp_path, unequal, rollout_selection_options={"min_std": 0.1}, **settings)
    trainer.train()  # deviations of 0.25 and of 0.05
    assert logs(trainer, "dynamic_sampling/informative_frac") == [1.0] * 4
    assert all(int(row["prompt"]) % 3 == 0 for row in trainer.last_rollout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_selection": "shortes"}, "unknown rollout selection 'shortes'. Did you mean 'shortest'"),
        ({"rollout_selection": "shortest", "rollout_selection_options": {"keep": 5}},
         "shortest needs 1 <= keep <= 4 completions per prompt, got keep=5"),
        ({"rollout_selection": "shortest", "preset": None}, "rollout_selection='shortest' needs a preset or an axis"),
        ({"rollout_selection_options": {"keep": 2}}, "rollout_selection_options={'keep': 2} needs rollout_selection"),
    ],
)  # fmt: skip
def test_a_selection_that_cannot_be_is_refused_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **settings)


# The overlong reward.


def test_overlong_completions_lose_up_to_one(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, overlong_buffer=0.5, max_steps=1, max_completion_length=8, reward_weights=[1.0])
    assert (trainer.args.overlong_tokens, trainer.args.reward_weights) == (4, [1.0, 1.0])
    trainer.train()
    penalties = [row["rewards"]["soft_overlong_punishment_reward"] for row in trainer.last_rollout]
    assert penalties == [min(0.0, (8 - 4 - row["tokens"]) / 4) for row in trainer.last_rollout]
    assert min(penalties) < 0
    assert [row["reward"] for row in trainer.last_rollout] == [
        row["rewards"]["by_problem"] + penalty for row, penalty in zip(trainer.last_rollout, penalties, strict=True)
    ]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [(0, "overlong_buffer must be a positive number of tokens, got 0"),
     (13, "overlong_buffer=13 is more than sampling_max_tokens=12")],
)  # fmt: skip
def test_an_overlong_buffer_that_does_not_fit_is_refused(buffer: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, overlong_buffer=buffer)


def test_dapo_in_full_sets_what_a_run_does_not(tmp_path: Path) -> None:
    args = trainer_of(tmp_path, preset="dapo_full").args
    assert (args.dynamic_sampling_tries, args.overlong_buffer, args.mask_truncated_completions) == (4, 0.2, True)
    args = trainer_of(tmp_path, preset="dapo_full", dynamic_sampling_tries=2, overlong_buffer=3).args
    assert (args.dynamic_sampling_tries, args.overlong_tokens) == (2, 3)
