"""Rewards in TRL's signature, `(completions, answer, **kwargs) -> list[float | None]`.

`REWARDS` holds one for every grader, by its name; a reward of your own is any function with that signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.registry import Registry
from trl_ext.rewards.graders import GRADERS, Grade

Grader = Callable[..., Sequence[Grade]]
Reward = Callable[..., list[float]]
REWARDS = Registry("reward")


def as_reward(grader: Grader) -> Reward:
    """The reward of a grader, with its name and options: 1 for a correct response in the format, else 0.

    The extracted answers, the verdicts and their reasons go to TRL's `log_extra`, the means to its `log_metric`.
    """
    signature = inspect.signature(grader)
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]

    def reward(
        completions: Sequence[Any],
        answer: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        texts = [completion_text(completion, place) for place, completion in enumerate(completions)]
        verdicts = grader(texts, answer, **{p.name: columns[p.name] for p in options if p.name in columns})
        if log_extra:
            _log_rows(verdicts, log_extra)
        if log_metric and verdicts:
            _log_means(verdicts, log_metric)
        return [verdict.rewards()["reward"] for verdict in verdicts]

    functools.update_wrapper(reward, grader, ("__module__", "__name__", "__qualname__", "__doc__"))
    kept = [
        p for p in inspect.signature(reward, follow_wrapped=False).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]
    columns = inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)
    reward.__signature__ = signature.replace(parameters=[*kept, *options, columns])  # type: ignore[attr-defined]
    reward.__annotations__ = {p.name: grader.__annotations__[p.name] for p in options}
    return reward


for _grader in GRADERS.values():
    REWARDS.register(as_reward(_grader))


def _log_rows(verdicts: Sequence[Grade], log_extra: Callable[[str, list[Any]], None]) -> None:
    log_extra("extracted", [verdict.answer for verdict in verdicts])
    log_extra("correct", [verdict.correct for verdict in verdicts])
    log_extra("reason", [verdict.reason for verdict in verdicts])
    for name in ("format_reward", "answer_reward"):
        log_extra(name, [verdict.rewards()[name] for verdict in verdicts])


def _log_means(verdicts: Sequence[Grade], log_metric: Callable[[str, float], None]) -> None:
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
