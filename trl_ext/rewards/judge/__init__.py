"""A language model as a grader and as a reward: a rubric in, scores by criterion out, and no way in for a response."""

from trl_ext.rewards.judge import grader as _registers  # noqa: F401
