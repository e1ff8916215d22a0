"""Rewards in TRL's signature, `(completions, answer, **kwargs) -> list[float | None]`.

`REWARDS` has one for every grader, under the grader's name, and one that pays for the format too. Any other function
with that signature is a reward too, and so is the course's, of one response.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_ext.registry import Registry
from trl_ext.rewards.graders import GRADERS, Grade, each_response, takes_one_response
from trl_ext.rewards.score import Score

Grader = Callable[..., Sequence[Grade]]
Reward = Callable[..., list[Score]]
LogExtra = Callable[[str, list[Any]], None]
LogMetric = Callable[[str, float], None]


def as_reward(grader: Grader, pays_format: bool = False) -> Reward:
    """The reward of a grader, with its name and options: 1 for a well-formed and correct response, else 0.

    If it pays for the format, one more for a well-formed response (as in DeepSeek-R1, arXiv:2501.12948).
    The extracted answers, the verdicts and their reasons go to TRL's `log_extra`, the means to its `log_metric`.
    """
    signature = inspect.signature(grader)
    logs_metrics = takes(grader, "log_metric")
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in GRADERS.inputs]

    def reward(
        completions: Sequence[Any],
        answer: Sequence[Any],
        log_extra: LogExtra | None = None,
        log_metric: LogMetric | None = None,
        **columns: object,
    ) -> list[Score]:
        texts = [completion_text(completion, place) for place, completion in enumerate(completions)]
        given = {p.name: columns[p.name] for p in options if p.name in columns}
        if takes(grader, "problems"):
            given["problems"] = _problems(columns)
        if takes(grader, "tolerances"):
            given["tolerances"] = columns.get("tolerance")
        if logs_metrics:
            given["log_metric"] = log_metric
        grades = grader(texts, answer, **given)
        _log(grades, log_extra, None if logs_metrics else log_metric)
        paid = ("reward", "format_reward") if pays_format else ("reward",)
        return [_score(sum(grade.rewards()[name] for name in paid), grade) for grade in grades]

    functools.update_wrapper(reward, grader, ("__module__", "__name__", "__qualname__", "__doc__"))
    reward.__name__ += "_and_format" if pays_format else ""
    *kept, columns = inspect.signature(reward, follow_wrapped=False).parameters.values()
    reward.__signature__ = signature.replace(parameters=[*kept, *options, columns])  # type: ignore[attr-defined]
    reward.__annotations__ = {p.name: grader.__annotations__[p.name] for p in options}
    return reward


def _score(reward: float, grade: Grade) -> Score:
    return Score(reward, None if math.isnan(reward) else grade.correct)


def takes(grader: Grader, name: str) -> bool:
    """Whether a grader looks at the problems or the tolerances too, as `strict` does, next to responses and answers."""
    return name in list(inspect.signature(grader).parameters)[2:]


def adapted(function: Callable[..., Any], path: str) -> Callable[..., Any]:
    """A reward in TRL's signature from a function of one response, which runs in workers; any other stays as it is."""
    return as_reward(each_response(function, path)) if takes_one_response(function) else function


def with_own_metrics(reward: Callable[..., Any]) -> Callable[..., Any]:
    """A reward next to others, whose metrics have its name before theirs, since TRL takes the mean of equal names."""

    @functools.wraps(reward)
    def named(*args: object, log_metric: LogMetric | None = None, **kwargs: object) -> Any:
        def log(name: str, value: float) -> None:
            assert log_metric is not None
            log_metric(name if name.startswith(f"{own}/") else f"{own}/{name}", value)

        return reward(*args, log_metric=log_metric and log, **kwargs)

    own = getattr(reward, "__name__", type(reward).__name__)
    return named


REWARDS = Registry("reward", adapt=adapted)
for _grader in GRADERS.values():
    REWARDS.register(as_reward(_grader))
REWARDS.register(as_reward(GRADERS["strict"], pays_format=True))


def _problems(columns: Mapping[str, Any]) -> list[str] | None:
    """The column `problem` of a dataset, or the prompts, in which the problems are; None where there are neither."""
    column = columns.get("problem") or columns.get("prompts")
    return None if column is None else [completion_text(problem) for problem in column]


def _log(grades: Sequence[Grade], log_extra: LogExtra | None, log_metric: LogMetric | None) -> None:
    rewards = {name: [grade.rewards()[name] for grade in grades] for name in ("format_reward", "answer_reward")}
    if log_extra:
        log_extra("extracted", [grade.answer for grade in grades])
        log_extra("correct", [grade.correct for grade in grades])
        log_extra("reason", [grade.reason for grade in grades])
        for name, values in rewards.items():
            log_extra(name, values)
        for name in grades[0].columns if grades else ():
            log_extra(name, [grade.columns[name] for grade in grades])
    if log_metric and grades:
        for name, values in rewards.items():
            log_metric(f"rewards/{name}", sum(values) / len(grades))
        log_metric("grader/timeouts", sum(grade.failure == "timeout" for grade in grades))
        log_metric("grader/failures", sum(grade.failure is not None for grade in grades))


def completion_text(completion: object, place: int | None = None) -> str:
    """The text of a plain completion or of the last message of a conversation; "" for a message without text.

    Raises:
        TypeError: it is neither; the message names it by its `place`.
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
