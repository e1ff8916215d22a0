"""Environments for `--tools`: a game whose tries are answered. Copy this file for a game of your own.

    python recipes/grpo_math.py --config recipes/grpo_countdown_game.yaml
    python recipes/grpo_math.py --config recipes/grpo_countdown_game.yaml \
        --tools recipes/countdown_game.py:CountdownByTurns --advantage turn_returns
    python recipes/evaluate.py --model_name_or_path FOLDER --prompt chat --dataset countdown --grader countdown \
        --tools recipes/countdown_game.py:CountdownGame

`reset` gets a problem's row, and every other public method is a tool: typed, with a docstring that the model reads.
Each response has an instance of its own. TRL's `GRPOTrainer(environment_factory=CountdownGame)` takes the same class.
"""

from __future__ import annotations

from trl_ext.rewards.countdown import solves


class CountdownGame:
    """What the response states in the end is graded by `reward`; the tries are for finding it."""

    def reset(self, answer: str, **row: object) -> None:
        """Begin the game of a problem."""
        self.answer = answer
        self.tries: list[str] = []

    def attempt(self, expression: str) -> str:
        """Try an expression of the numbers and read what it equals.

        Args:
            expression: the expression, such as 3*4+5
        """
        self.tries.append(expression)
        return solves(expression, self.answer)[1]


class CountdownByTurns(CountdownGame):
    """The same, and each turn is rewarded or fined at once, for what it tries."""

    def reset(self, answer: str, **row: object) -> None:
        """Begin the game of a problem."""
        super().reset(answer)
        self.turn_rewards: list[float] = []

    def attempt(self, expression: str) -> str:
        """Try an expression of the numbers and read what it equals.

        Args:
            expression: the expression, such as 3*4+5
        """
        is_again, said = expression in self.tries, super().attempt(expression)
        self.turn_rewards.append(0.5 if said == "equal" else -0.1 if is_again else 0.0)
        return said
