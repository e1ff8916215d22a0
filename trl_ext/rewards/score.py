"""`Score`: a reward that also says whether its response is correct."""

from __future__ import annotations


class Score(float):
    """A number, for TRL, with the verdict that it stands for.

    Advantages and selections that ask for `correct`, and the metrics of correct responses, go by it. What a reward
    function logs under any name changes neither. Of a reward that is a plain number, above 0 is correct.

    Args:
        value: the reward.
        correct: whether the response is; None if neither is known.
    """

    correct: bool | None

    def __new__(cls, value: float, correct: bool | None = None) -> Score:  # noqa: D102 - the class says it
        score = super().__new__(cls, value)
        score.correct = correct
        return score
