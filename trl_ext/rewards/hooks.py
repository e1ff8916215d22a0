"""Rewards in TRL's signature, `(completions, answer, **kwargs) -> list[float | None]`.

`REWARDS` holds them by name; a reward of your own is any function with that signature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.registry import Registry
from trl_ext.rewards.graders import GRADERS, Verdict

REWARDS = Registry("reward")


@REWARDS.register
def strict(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    answer_format: str = "r1_zero",
    numeric_tolerance: float = 0.0,
    **columns: Any,
) -> list[float]:
    """1 for a response in the format whose answer is mathematically right, else 0."""
    return reward("strict", completions, answer, answer_format, numeric_tolerance=numeric_tolerance, **columns)


@REWARDS.register
def compatible(
    completions: Sequence[Any], answer: Sequence[Any], *, answer_format: str = "r1_zero", **columns: Any
) -> list[float]:
    """1 for a response that the course's grader accepts, else 0."""
    return reward("compatible", completions, answer, answer_format, **columns)


@REWARDS.register
def countdown(
    completions: Sequence[Any], answer: Sequence[Any], *, answer_format: str = "r1_zero", **columns: Any
) -> list[float]:
    """1 for an expression of the given numbers that equals the target, else 0; see `data/countdown.py`."""
    return reward("countdown", completions, answer, answer_format, **columns)


def reward(
    grader: str,
    completions: Sequence[Any],
    answer: Sequence[Any],
    answer_format: str,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    numeric_tolerance: float | None = None,
    **_: Any,
) -> list[float]:
    """Rewards by a grader of `GRADERS` (or an import path), with the extracted answers and the reasons logged."""
    texts = [completion_text(completion, place) for place, completion in enumerate(completions)]
    options = {} if numeric_tolerance is None else {"numeric_tolerance": numeric_tolerance}
    verdicts = GRADERS.build(grader, answer_format=answer_format, **options)(texts, answer)
    if log_extra:
        _log_rows(verdicts, log_extra)
    if log_metric and verdicts:
        _log_means(verdicts, log_metric)
    return [verdict.rewards()["reward"] for verdict in verdicts]


def _log_rows(verdicts: Sequence[Verdict], log_extra: Callable[[str, list[Any]], None]) -> None:
    log_extra("extracted", [verdict.answer for verdict in verdicts])
    log_extra("correct", [verdict.right for verdict in verdicts])
    log_extra("reason", [verdict.reason for verdict in verdicts])
    for name in ("format_reward", "answer_reward"):
        log_extra(name, [verdict.rewards()[name] for verdict in verdicts])


def _log_means(verdicts: Sequence[Verdict], log_metric: Callable[[str, float], None]) -> None:
    for name in ("format_reward", "answer_reward"):
        log_metric(f"rewards/{name}", sum(verdict.rewards()[name] for verdict in verdicts) / len(verdicts))
    log_metric("grader/timeouts", sum(verdict.failure == "timeout" for verdict in verdicts))
    log_metric("grader/failures", sum(verdict.failure is not None for verdict in verdicts))


def completion_text(completion: Any, place: int | None = None) -> str:
    """The text of a plain completion, or of the last message of a conversational one; "" for a message without text.

    Raises:
        TypeError: it is neither; the message names it by `place`.
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1] if isinstance(completion, Sequence) and completion else None
    if not isinstance(last, Mapping):
        name = "a completion" if place is None else f"completion {place}"
        raise TypeError(f"{name} is {str(completion)[:80]}, neither a text nor a list of messages")
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content)
