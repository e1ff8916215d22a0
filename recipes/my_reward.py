"""Your own reward: `--reward recipes/my_reward.py:concise`.

It has TRL's signature: `completions` and every column of the dataset as lists of one length (the reference answer's
column is `answer`), and returns one number per completion, or None for one that it does not score. It has no options.
"""

from typing import Any

from trl_ext.rewards import math_reward_fn


def concise(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for a correct answer, less up to a half for a response of 2,000 characters or more; 0 for an incorrect one."""
    correct = [math_reward_fn(text, truth)["answer_reward"] for text, truth in zip(completions, answer, strict=True)]
    return [value * (1 - min(len(text), 2000) / 4000) for value, text in zip(correct, completions, strict=True)]
