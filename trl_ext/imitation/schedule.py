"""Which questions a step of expert iteration samples for, what its optimizer steps train on, and its figures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

from trl_ext.evaluation.evaluator import is_correct, mean_length
from trl_ext.generation.completion import mean_over_tokens
from trl_ext.imitation.selection import Row


def questions_of_step(available: int, wanted: int, step: int, seed: int) -> list[int]:
    """Which of the `available` questions a step (from 1) samples for: all are used before any is repeated."""
    wanted = min(wanted, available)
    start = (step - 1) * wanted
    questions: list[int] = []
    while len(questions) < wanted:
        turn, place = divmod(start + len(questions), available)
        order = list(range(available))
        Random(f"{seed} {turn}").shuffle(order)
        questions += order[place : place + wanted - len(questions)]
    return questions


def optimizer_steps(rows: Sequence[Row], batch: int, epochs: int, seed: str) -> list[list[Row]]:
    """The rows in a new order for every epoch, `batch` for each optimizer step; the last of an epoch may have fewer."""
    plan = []
    for epoch in range(epochs):
        order = list(rows)
        Random(f"{seed} {epoch}").shuffle(order)
        plan += [order[start : start + batch] for start in range(0, len(order), batch)]
    return plan


def step_counts(
    step: int, optimizer_step: int, rollouts: Sequence[Row], kept: Sequence[Row], too_long: int, steps: int
) -> dict[str, Any]:
    """A step in figures; lengths are means in tokens, and like the entropy of all sampled tokens None without any."""
    correct, incorrect = list(filter(is_correct, rollouts)), list(itertools.filterfalse(is_correct, rollouts))
    groups = {"tokens": rollouts, "tokens_correct": correct, "tokens_incorrect": incorrect}
    return {
        "step": step,
        "optimizer_step": optimizer_step,  # before its fine-tuning
        "questions": len({row["question"] for row in rollouts}),
        "questions_with_a_right_answer": len({row["question"] for row in correct}),
        "rollouts": len(rollouts),
        "correct": len(correct),
        "kept": len(kept),
        "too_long": too_long,
        "optimizer_steps": steps,
        **{name: mean_length(rows) for name, rows in groups.items()},
        "entropy_estimate": mean_over_tokens(rollouts),
    }


def step_line(counts: dict[str, Any], n_steps: int) -> str:
    """One line of text about a step."""
    return (
        f"expert iteration {counts['step']}/{n_steps}: {counts['correct']} of {counts['rollouts']} rollouts correct, "
        f"{counts['questions_with_a_right_answer']} of {counts['questions']} questions solved; {counts['kept']} kept, "
        f"{counts['optimizer_steps']} optimizer steps"
    )
