"""Math rewards: extract an answer from a response, compare it with the truth, and hand TRL a number."""

from trl_ext.rewards import countdown as _registers_countdown  # noqa: F401
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.graders import (
    GRADERS,
    Verdict,
    math_reward_fn,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from trl_ext.rewards.hooks import REWARDS

__all__ = [
    "ANSWER_FORMATS",
    "GRADERS",
    "REWARDS",
    "Verdict",
    "math_reward_fn",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
]
