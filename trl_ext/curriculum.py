"""Which problems a rollout is made of: those that taught nothing at their last visit come back less often.

A group whose completions all got the same reward has no advantage, so its rollout was spent for nothing. Sampling by
pass rate as measured on the way: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) draws until a batch is full;
here a batch is drawn once, and the choice costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_TRIES = 64  # draws; where nearly all problems are settled, the last one is taken as it is


class Curriculum:
    """Problems by their number, of which some are settled: all completions of their last group were rewarded alike.

    Args:
        problems: in all.
        share: of their usual visits that settled problems keep, 0 to 1.
        seed: of the choices, which are the same on every rank.
    """

    def __init__(self, problems: int, share: float, seed: int) -> None:
        self.problems, self.share, self.seed = problems, share, seed
        self.settled: set[int] = set()

    def choose(self, problem: int, place: tuple[int, int]) -> int:
        """`problem`, or another one in its place.

        Args:
            place: number of the rollout and of the group in it, which decide what is drawn.
        """
        draw = Random(f"{self.seed} {place[0]} {place[1]}")
        for _ in range(_TRIES):
            if problem not in self.settled or draw.random() < self.share:
                break
            problem = draw.randrange(self.problems)
        return problem

    def update(self, problems: Sequence[int], taught: Sequence[bool]) -> None:
        """Note for each group's problem whether its rewards differed."""
        for problem, has_taught in zip(problems, taught, strict=True):
            (self.settled.discard if has_taught else self.settled.add)(problem)
