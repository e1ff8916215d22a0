"""Which questions a step of expert iteration samples for, what its optimizer steps train on, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from trl_ext.evaluation.report import mean
from trl_ext.expert_iteration.selection import Row


def questions_of_step(available: int, wanted: int, step: int, seed: int) -> list[int]:
    """Which of the `available` questions a step (from 1) samples for: all are used before any comes again."""
    wanted = min(wanted, available)
    start = (step - 1) * wanted
    found: list[int] = []
    while len(found) < wanted:
        turn, place = divmod(start + len(found), available)
        order = list(range(available))
        Random(f"{seed} {turn}").shuffle(order)
        found += order[place : place + wanted - len(found)]
    return found


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
    """A step in figures; lengths are means in tokens, None of no rollout."""
    right = [row for row in rollouts if row["outcome"] == "correct"]
    wrong = [row for row in rollouts if row["outcome"] != "correct"]
    lengths = {name: mean(r["tokens"] for r in rows) if rows else None for name, rows in
               {"tokens": rollouts, "tokens_correct": right, "tokens_incorrect": wrong}.items()}  # fmt: skip
    return {
        "step": step,
        "optimizer_step": optimizer_step,  # before its fine-tuning
        "questions": len({row["question"] for row in rollouts}),
        "questions_with_a_right_answer": len({row["question"] for row in right}),
        "rollouts": len(rollouts),
        "correct": len(right),
        "kept": len(kept),
        "too_long": too_long,
        "optimizer_steps": steps,
        **lengths,
    }


def step_line(counts: dict[str, Any], n_steps: int) -> str:
    """A step's rollouts as a person reads them."""
    return (
        f"expert iteration {counts['step']}/{n_steps}: {counts['correct']} of {counts['rollouts']} rollouts right, "
        f"{counts['questions_with_a_right_answer']} of {counts['questions']} questions solved; {counts['kept']} kept, "
        f"{counts['optimizer_steps']} optimizer steps"
    )
