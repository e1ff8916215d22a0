"""Math rewards: extract an answer from a response, compare it with the truth, and hand TRL a number."""

from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.grade import is_equal
from trl_ext.rewards.hooks import REWARDS, grade

__all__ = ["ANSWER_FORMATS", "REWARDS", "grade", "is_equal"]
