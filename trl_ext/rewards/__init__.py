"""Math rewards: extract the answer, compare it with the reference answer, and hand TRL a number."""

from trl_ext.rewards import countdown as _registers_countdown  # noqa: F401
from trl_ext.rewards import judge as _registers_judge  # noqa: F401
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.graders import GRADERS, Grade, math_reward_fn, question_only_reward_fn, r1_zero_reward_fn
from trl_ext.rewards.hooks import REWARDS
from trl_ext.rewards.score import Score

__all__ = [
    "ANSWER_FORMATS",
    "GRADERS",
    "REWARDS",
    "Grade",
    "Score",
    "math_reward_fn",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
]
