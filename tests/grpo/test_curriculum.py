"""Uninformative problems are revisited less often, the same on every rank and in a resumed run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from tests.support.tiny import fraction_of_ones, make_trainer, save_tiny
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.grpo.curriculum import Curriculum, kinds_of


def trainer_of(path: Path, reward: Any = fraction_of_ones, **settings: Any) -> ExtGRPOTrainer:
    words = ["a", "b", "c", "+", "=", "0", "1", "2"]
    rows = Dataset.from_list([{"prompt": word, "answer": word} for word in words])
    trainer: ExtGRPOTrainer = make_trainer(
        ExtGRPOTrainer, ExtGRPOConfig, path, reward, train_dataset=rows, **{"advantage": "group_mean", **settings}
    )
    return trainer


def test_informative_problem_is_always_accepted() -> None:
    curriculum = Curriculum([None] * 10, 0.0, seed=0)
    curriculum.update([1, 2], [False, True])
    assert curriculum.uninformative == [1]
    assert [curriculum.choose(2, (0, place)) for place in range(50)] == [2] * 50


def test_uninformative_problem_is_kept_or_replaced() -> None:
    curriculum = Curriculum([None] * 4, 0.25, seed=0)
    curriculum.update([0, 1], [False, False])
    chosen = Counter(curriculum.choose(0, (0, place)) for place in range(4000))
    # 0 is kept with 1/4; else one of four is drawn, of which 0 and 1 have to pass again: x = 1/4 + 3/4 (x0 + ...)
    weights = {0: 0.25, 1: 0.25, 2: 1.0, 3: 1.0}
    elsewhere = {number: 0.75 * weight / sum(weights.values()) for number, weight in weights.items()}
    for number in weights:
        wanted = elsewhere[number] + (0.25 if number == 0 else 0)
        assert chosen[number] / 4000 == pytest.approx(wanted, abs=0.03)  # 4 standard errors


def test_problem_becomes_informative_again() -> None:
    curriculum = Curriculum([None] * 4, 0.0, seed=0)
    curriculum.update([0, 1], [False, False])
    curriculum.update([0], [True])
    assert curriculum.uninformative == [1]


def test_a_problem_never_visited_is_judged_by_its_kind() -> None:
    """Ten sums and ten products; nine of the sums were visited and uninformative, four of the products informative."""
    curriculum = Curriculum(["sum"] * 10 + ["product"] * 10, 0.1, seed=0)
    for _ in range(10):
        curriculum.update(range(9), [False] * 9)
        curriculum.update(range(10, 14), [True] * 4)
    assert curriculum.of_kind == {"sum": pytest.approx(0.95**90), "product": 1.0}

    def accepted(problem: int) -> float:
        return sum(curriculum.choose(problem, (0, place)) == problem for place in range(2000)) / 2000

    assert accepted(19) == 1.0  # a product
    # a sum is accepted with keep_prob; else one of 20 is drawn: ten sums with 0.1, ten products with 1
    assert accepted(9) == pytest.approx(0.1 + 0.9 * 0.1 / 11, abs=0.03)  # 4 standard errors


def test_kind_becomes_informative_again() -> None:
    curriculum = Curriculum(["sum"] * 300, 0.0, seed=0)
    curriculum.update(range(100), [False] * 100)
    few = curriculum.of_kind["sum"]
    curriculum.update(range(100, 200), [True] * 100)
    assert few < 0.01 < 0.99 < curriculum.of_kind["sum"]


def test_kinds_are_subjects_and_levels_where_there_are_several() -> None:
    levels = Dataset.from_list([{"subject": "Algebra", "level": 1}, {"subject": "Algebra", "level": 2}])
    assert kinds_of(levels) == [("Algebra", 1), ("Algebra", 2)]
    assert kinds_of(levels.remove_columns("subject")) == [(1,), (2,)]
    assert kinds_of(levels.remove_columns("level")) == [None, None]
    assert kinds_of(Dataset.from_dict({"prompt": ["a", "b"]})) == [None, None]


def test_the_choice_depends_on_seed_rollout_and_group_only() -> None:
    def choices(seed: int, rollout: int) -> list[int]:
        curriculum = Curriculum([None] * 1000, 0.0, seed)
        curriculum.update([0], [False])
        return [curriculum.choose(0, (rollout, group)) for group in range(20)]

    assert choices(0, 0) == choices(0, 0)
    assert len({tuple(choices(seed, rollout)) for seed in (0, 1) for rollout in (0, 1)}) == 4
    assert len(set(choices(0, 0))) > 15


def test_selects_a_problem_where_all_are_uninformative() -> None:
    curriculum = Curriculum([None] * 3, 0.0, seed=0)
    curriculum.update([0, 1, 2], [False] * 3)
    assert curriculum.choose(1, (0, 0)) in (0, 1, 2)


@pytest.mark.slow
def test_rollout_avoids_uninformative_problems(tmp_path: Path) -> None:
    """Eight problems, of which the reward tells only one apart: in the end nearly all groups are of that one."""

    def only_a(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [float(i) if prompt == "a" else 0.0 for i, prompt in enumerate(prompts)]

    trainer: Any = trainer_of(tmp_path, only_a, uninformative_keep_prob=0.0, max_steps=6, learning_rate=0.0)
    seen = []
    keep = trainer._calculate_rewards
    trainer._calculate_rewards = lambda inputs, *rest: (
        seen.append([row["prompt"] for row in inputs]) or keep(inputs, *rest)
    )
    trainer.train()
    group = trainer.num_generations
    for prompts in seen:  # groups stay whole
        assert all(len(set(prompts[i : i + group])) == 1 for i in range(0, len(prompts), group))
    assert len(set(seen[0])) > 1
    assert set(seen[-1]) == {"a"}
    assert trainer._problems.curriculum.uninformative == [1, 2, 3, 4, 5, 6, 7]
    assert trainer.resume_state()["curriculum"]["taught"] == {0: True} | dict.fromkeys(range(1, 8), False)
    logged = [entry["curriculum/settled_problems"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] == 7.0


def test_unscored_problem_is_uninformative_and_group_chosen_once(tmp_path: Path) -> None:
    def partly(prompts: list[str], completions: list[str], **_: object) -> list[float | None]:
        """Scores nothing of a; of b one alike; of c two that differ."""
        scores: dict[str, list[float | None]] = {"a": [None] * 4, "b": [None, 1, 1, None], "c": [None, 0, 1, None]}
        return [scores.get(prompt, [0.0] * 4)[i % 4] for i, prompt in enumerate(prompts)]

    trainer: Any = trainer_of(tmp_path, partly, uninformative_keep_prob=1e-9, max_steps=2, learning_rate=0.0)
    choose, asked = trainer._problems.curriculum.choose, []
    trainer._problems.curriculum.choose = lambda problem, place: asked.append(place) or choose(problem, place)
    trainer.train()
    assert trainer._problems.curriculum.informative == {number: number == 2 for number in range(8)}
    assert sorted(asked) == [(rollout, group) for rollout in (0, 1) for group in range(4)]  # on any number of ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "uninformative"),
    [
        ({"advantage": "group_mean"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"advantage": "raw"}, [1, 2, 3, 4, 5, 6, 7]),  # it trains on equal rewards that are not 0
        ({"advantage": "group_mean", "beta": 0.1}, []),
        ({"advantage": None}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"advantage": None, "beta": 0.1}, []),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_uninformative_is_what_the_loss_has_no_gradient_of(
    settings: dict[str, Any], uninformative: list[int], tmp_path: Path
) -> None:
    def alike(prompts: list[str], **_: object) -> list[float]:
        return [float(prompt == "a") for prompt in prompts]

    model = {"model": str(save_tiny(tmp_path / "model"))} if "beta" in settings else {}
    trainer = trainer_of(
        tmp_path, alike, uninformative_keep_prob=1e-9, max_steps=2, learning_rate=0.0, **model, **settings
    )
    trainer.train()
    assert trainer._problems.curriculum is not None
    assert trainer._problems.curriculum.uninformative == uninformative


def test_resumed_run_restores_the_curriculum(tmp_path: Path) -> None:
    trainer: Any = trainer_of(tmp_path, uninformative_keep_prob=0.5, max_steps=1)
    trainer.train()
    trainer._unscored_in_a_row, trainer._nonfinite = 2, ", because"
    state, before = trainer.resume_state(), trainer._problems.curriculum
    assert (state["_unscored_in_a_row"], state["_nonfinite"]) == (2, ", because")
    trainer._problems.curriculum = Curriculum.of_dataset(trainer.train_dataset, 0.5, trainer.args.seed)
    trainer.load_resume_state(state)
    assert trainer._problems.curriculum.informative == before.informative != {}
    assert trainer._problems.curriculum.of_kind == before.of_kind != {}
    del state["curriculum"]  # of a run that had none
    trainer.load_resume_state(state)


def test_default_has_no_curriculum(tmp_path: Path) -> None:
    assert trainer_of(tmp_path)._problems.curriculum is None


@pytest.mark.parametrize("keep_prob", [-0.1, 1.1])
def test_keep_prob_outside_zero_to_one_is_refused(keep_prob: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"uninformative_keep_prob must be between 0 and 1, got {keep_prob}"):
        trainer_of(tmp_path, uninformative_keep_prob=keep_prob)


def test_problems_that_cannot_be_looked_up_are_refused(tmp_path: Path) -> None:
    endless = IterableDataset.from_generator(lambda: iter([{"prompt": "a", "answer": "a"}] * 8))
    with pytest.raises(TypeError, match="dynamic_sampling_tries need a train_dataset whose rows can be looked up"):
        make_trainer(
            ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, train_dataset=endless, uninformative_keep_prob=0.5,
            advantage="group_mean",
        )  # fmt: skip
