"""Contracts of every way to select rollouts to fine-tune on; then rows chosen by hand."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from trl_ext.imitation.selection import SELECTIONS
from trl_ext.registry import UnknownName

EVERY = sorted(SELECTIONS)
CASES = [(name, {}) for name in EVERY] + [(name, {"k": 2}) for name in EVERY if "k" in SELECTIONS.options(name)]
IDS = [name + "".join(f"_{key}={value}" for key, value in options.items()) for name, options in CASES]
contract = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)


def row(question: int, response: str, tokens: int, extracted: str, outcome: str = "correct") -> dict[str, Any]:
    return {"question": question, "response": response, "tokens": tokens, "extracted": extracted, "outcome": outcome}


def draws(n: int = 80) -> list[dict[str, Any]]:
    """Rollouts of ten questions in no order, about half of them correct, many of them alike."""
    rng = Random(0)
    outcomes = ("correct", "correct", "format_only", "neither")
    return [
        row(rng.randrange(10), rng.choice(("a b", " a  b", "c", "d")), rng.randint(1, 5), rng.choice("12"), outcome)
        for outcome in rng.choices(outcomes, k=n)
    ]


DRAWS = draws()


def places(kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[int]:
    """Where the rows that were kept stand among those given; they must be the same objects."""
    place = {id(given): number for number, given in enumerate(rows)}
    return [place[id(found)] for found in kept]


# Contracts.


@contract
def test_only_correct_rollouts_are_kept_in_order_and_once(name: str, options: dict[str, int]) -> None:
    rows = deepcopy(DRAWS)
    kept = SELECTIONS.build(name, **options)(rows)
    assert all(found["outcome"] == "correct" for found in kept)
    assert places(kept, rows) == sorted(set(places(kept, rows)))
    assert rows == DRAWS  # nor is any of them touched


@contract
def test_each_question_with_a_correct_rollout_keeps_one(name: str, options: dict[str, int]) -> None:
    kept = SELECTIONS.build(name, **options)(DRAWS)
    assert {r["question"] for r in kept} == {r["question"] for r in DRAWS if r["outcome"] == "correct"}


@contract
def test_no_rollouts_or_only_incorrect_ones_select_nothing(name: str, options: dict[str, int]) -> None:
    select = SELECTIONS.build(name, **options)
    assert select([]) == []
    assert select([row(0, "a", 1, "1", "format_only"), row(0, "b", 1, "1", "neither")]) == []


@contract
def test_what_was_kept_is_kept_again(name: str, options: dict[str, int]) -> None:
    select = SELECTIONS.build(name, **options)
    once = select(DRAWS)
    assert once
    assert select(once) == once


@contract
def test_a_question_does_not_see_the_others(name: str, options: dict[str, int]) -> None:
    select = SELECTIONS.build(name, **options)
    for question in range(10):
        alone = select([r for r in DRAWS if r["question"] == question])
        assert alone == [r for r in select(DRAWS) if r["question"] == question]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", ["at_most", "shortest"])
def test_a_question_keeps_k_or_as_many_as_it_has(name: str, k: int) -> None:
    correct = Counter(r["question"] for r in DRAWS if r["outcome"] == "correct")
    assert min(correct.values()) < 3 < max(correct.values())
    assert Counter(r["question"] for r in SELECTIONS.build(name, k=k)(DRAWS)) == {
        q: min(k, n) for q, n in correct.items()
    }


# Values.

ROWS = [
    row(0, "a b", 5, "1/2"),
    row(1, "x", 4, "7", "neither"),
    row(0, " a  b\n", 3, "0.5"),
    row(1, "y", 9, "7"),
    row(0, "c", 3, "1/2"),
    row(0, "d", 1, "2/4", "format_only"),
    row(2, "z", 2, "8", "format_only"),
    row(1, "y ", 6, "7"),
    row(2, "a b", 2, "1/2"),
]


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("every", {}, [0, 2, 3, 4, 7, 8]),
        ("at_most", {}, [0, 3, 8]),
        ("at_most", {"k": 2}, [0, 2, 3, 7, 8]),
        ("at_most", {"k": 3}, [0, 2, 3, 4, 7, 8]),
        ("at_most", {"k": 99}, [0, 2, 3, 4, 7, 8]),
        ("shortest", {}, [2, 7, 8]),  # question 0 has two of 3 tokens: the first
        ("shortest", {"k": 2}, [2, 3, 4, 7, 8]),
        ("shortest", {"k": 3}, [0, 2, 3, 4, 7, 8]),
        ("distinct_answers", {}, [0, 2, 3, 8]),  # 1/2 and 0.5 are two; another question's 1/2 is its own
        ("distinct_traces", {}, [0, 3, 4, 8]),  # spaces aside
    ],
)
def test_rows_by_hand(name: str, options: dict[str, int], wanted: list[int]) -> None:
    assert places(SELECTIONS.build(name, **options)(ROWS), ROWS) == wanted


@pytest.mark.parametrize("name", ["at_most", "shortest"])
def test_one_rollout_per_question_is_the_default_and_the_minimum(name: str) -> None:
    assert SELECTIONS.options(name) == {"k": 1}
    for k in (0, -2):
        with pytest.raises(ValueError, match=f"k must be at least 1, got {k}"):
            SELECTIONS.build(name, k=k)([])


def test_a_name_or_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"unknown selection 'shortst'\. Did you mean 'shortest'"):
        SELECTIONS.build("shortst")
    with pytest.raises(UnknownName, match="unknown option of selection 'every' 'k'"):
        SELECTIONS.build("every", k=1)
    with pytest.raises(ValueError, match="option 'k' of selection 'at_most' must be int, got 'two'"):
        SELECTIONS.build("at_most", k="two")
