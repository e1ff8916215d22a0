"""Rewards in TRL's signature, `(completions, answer, **kwargs) -> list[float | None]`, and the handout's.

`REWARDS` holds them by name; a reward of your own is any function with that signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl_ext.registry import Registry
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.grade import is_equal

REWARDS = Registry("reward")


def grade(response: str, truth: str, answer_format: str) -> dict[str, float]:
    """`format_reward`, `answer_reward` and `reward` of one response: 1 or 0 each; the reward needs both.

    Raises:
        UnknownName: `answer_format` is not in `ANSWER_FORMATS`.
    """
    answer = ANSWER_FORMATS.get_function(answer_format)(response)
    right = float(answer is not None and is_equal(answer, truth))
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}


@REWARDS.register
def r1_zero(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1 for a response in the r1_zero format whose answer is right, else 0."""
    return _reward("r1_zero", completions, answer, **kwargs)


@REWARDS.register
def boxed(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    r"""1 for a response whose last `\\boxed{...}` is right, else 0; goes with the question_only prompt."""
    return _reward("boxed", completions, answer, **kwargs)


def _reward(
    answer_format: str,
    completions: Sequence[Any],
    answer: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float]:
    texts = [completion_text(c) for c in completions]
    graded = [grade(text, truth, answer_format) for text, truth in zip(texts, answer, strict=True)]
    if log_extra:
        extract = ANSWER_FORMATS.get_function(answer_format)
        log_extra("extracted", [extract(text) for text in texts])
        log_extra("correct", [g["answer_reward"] > 0 for g in graded])
    if log_metric:
        for name in ("format_reward", "answer_reward"):
            log_metric(f"rewards/{name}", sum(g[name] for g in graded) / len(graded))
    return [g["reward"] for g in graded]


def completion_text(completion: Any) -> str:
    """The text of a plain completion, or of the last message of a conversational one."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
