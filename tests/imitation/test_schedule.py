"""Expert iteration's plan: which questions a step has, in which order its rows are trained on, and its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trl_ext.imitation.expert_iteration import _forget_after, _replace_row
from trl_ext.imitation.schedule import optimizer_steps, questions_of_step, step_counts, step_line
from trl_ext.io import read_jsonl


@pytest.mark.parametrize(("available", "wanted"), [(12, 4), (10, 4), (5, 3), (7, 7), (6, 1)])
def test_every_question_is_used_before_any_comes_again(available: int, wanted: int) -> None:
    steps = [questions_of_step(available, wanted, step, seed=3) for step in range(1, 3 * available + 1)]
    assert [len(step) for step in steps] == [wanted] * len(steps)
    used = [question for step in steps for question in step]
    turns = [used[start : start + available] for start in range(0, len(used), available)]
    assert len(turns) == 3 * wanted
    assert all(sorted(turn) == list(range(available)) for turn in turns)


def test_question_order_differs_in_every_pass_and_for_every_seed() -> None:
    first, second = (questions_of_step(30, 30, step, seed=0) for step in (1, 2))
    assert len({tuple(first), tuple(second), tuple(questions_of_step(30, 30, 1, seed=1)), tuple(range(30))}) == 4
    assert questions_of_step(30, 30, 1, seed=0) == first


def test_too_few_questions_appear_once_each_in_every_step() -> None:
    for step in (1, 2, 3):
        assert sorted(questions_of_step(4, 9, step, seed=0)) == [0, 1, 2, 3]
    assert questions_of_step(0, 9, 1, seed=0) == []


def rows(n: int) -> list[dict[str, Any]]:
    return [{"n": i} for i in range(n)]


@pytest.mark.parametrize(
    ("n", "batch", "sizes"),
    [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 5, [2]), (1, 1, [1]), (0, 3, [])],
)
def test_epoch_has_every_row_once_and_only_the_last_step_short(n: int, batch: int, sizes: list[int]) -> None:
    plan = optimizer_steps(rows(n), batch, 2, "0 1")
    assert [len(step) for step in plan] == sizes * 2
    for epoch in (plan[: len(sizes)], plan[len(sizes) :]):
        assert sorted(row["n"] for step in epoch for row in step) == list(range(n))


def test_row_order_differs_by_epoch_step_and_seed() -> None:
    given = rows(20)
    orders = [
        [row["n"] for row in step] for seed in ("0 1", "0 2", "1 1") for step in optimizer_steps(given, 20, 2, seed)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert list(range(20)) not in orders
    assert optimizer_steps(given, 20, 2, "0 1")[0] == [{"n": n} for n in orders[0]]
    assert given == rows(20)


def rollout(question: int, outcome: str, tokens: int) -> dict[str, Any]:
    return {"question": question, "outcome": outcome, "tokens": tokens}


def test_a_step_in_figures() -> None:
    rollouts = [
        rollout(0, "correct", 10), rollout(0, "correct", 20), rollout(1, "format_only", 30), rollout(1, "neither", 50),
        rollout(2, "correct", 6), rollout(2, "neither", 10),
    ]  # fmt: skip
    assert step_counts(2, 17, rollouts, rollouts[:2], 1, 4) == {
        "step": 2, "optimizer_step": 17, "questions": 3, "questions_with_a_right_answer": 2, "rollouts": 6, "correct": 3,
        "kept": 2, "too_long": 1, "optimizer_steps": 4, "tokens": 21.0, "tokens_correct": 12.0, "tokens_incorrect": 30.0,
        "entropy_estimate": None,
    }  # fmt: skip
    rollouts[0]["entropy_estimate"], rollouts[3]["entropy_estimate"] = 1.0, 0.1  # of 10 tokens and of 50
    assert step_counts(2, 17, rollouts, rollouts[:2], 1, 4)["entropy_estimate"] == pytest.approx(15 / 60)


def test_a_length_of_no_rollout_is_none() -> None:
    lengths = ("tokens", "tokens_correct", "tokens_incorrect")
    for rollouts, known in (
        ([], ()),
        ([rollout(0, "correct", 4)], ("tokens", "tokens_correct")),
        ([rollout(0, "neither", 4)], ("tokens", "tokens_incorrect")),
    ):
        counts = step_counts(1, 0, rollouts, [], 0, 0)
        assert {name: counts[name] for name in lengths} == {name: 4.0 if name in known else None for name in lengths}


def test_a_step_in_one_line() -> None:
    counts = step_counts(
        2, 17, [rollout(0, "correct", 1), rollout(0, "neither", 1), rollout(1, "neither", 1)], [{}], 0, 4
    )
    assert step_line(counts, 5) == (
        "expert iteration 2/5: 1 of 3 rollouts correct, 1 of 2 questions solved; 1 kept, 4 optimizer steps"
    )


def test_repeated_step_replaces_its_row_and_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for number, kept in ((1, 5), (2, 6), (3, 7), (2, 8)):
        _replace_row(path, {"step": number, "kept": kept})
    assert read_jsonl(path) == [{"step": 1, "kept": 5}, {"step": 2, "kept": 8}]


def test_what_later_steps_have_left_is_taken_away_by_number(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10):
        (tmp_path / f"step_{number}").mkdir()
    (tmp_path / "steps.jsonl").touch()
    _forget_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2", "steps.jsonl"]
