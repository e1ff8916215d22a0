"""Which problems a rollout is made of: those that are expected to teach nothing come back less often.

A group without a gradient, as one has whose completions all got the same reward, was sampled for nothing. Sampling by
pass rate as measured on the way: DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) draws until a batch is full;
here a batch is drawn once, and the choice costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from random import Random
from typing import Any

from torch import Tensor, inf

_TRIES = 64  # draws; where nearly all problems are settled, the last one is taken as it is
_RECENT = 0.05  # weight of a group in the share of its kind that taught


def kinds_of(rows: Any) -> list[Hashable]:
    """For each row of a dataset its subject and level, as far as it has them; None where all are of one kind.

    Args:
        rows: a `datasets.Dataset`.
    """
    columns = [rows[name] for name in ("subject", "level") if name in rows.column_names]
    kinds: list[Hashable] = list(zip(*columns, strict=True))
    return kinds if len(set(kinds)) > 1 else [None] * len(rows)


class Curriculum:
    """Problems by their number, each with a chance to be taken when its turn comes.

    A problem whose last group taught, with a gradient, is always taken. One that is settled, without any in its last
    group, is taken with `share`. One that was never visited is taken with the
    share of the recent groups of its kind that taught, if that is more: a kind that is mastered has nothing to offer.

    Args:
        kinds: for each problem, what it has in common with others, such as its subject and level; None: nothing.
        share: of their usual visits that settled problems keep, 0 to 1.
        seed: of the choices, which are the same on every rank.
    """

    def __init__(self, kinds: Sequence[Hashable], share: float, seed: int) -> None:
        self.kinds, self.share, self.seed = kinds, share, seed
        self.taught: dict[int, bool] = {}  # by its last group, for each problem visited
        self.of_kind: dict[Hashable, float] = {}  # share of recent groups that taught

    @property
    def settled(self) -> list[int]:
        """Problems whose last group taught nothing, in order."""
        return sorted(problem for problem, taught in self.taught.items() if not taught)

    def choose(self, problem: int, place: tuple[int, int]) -> int:
        """`problem`, or another one in its place.

        Args:
            place: number of the rollout and of the group in it, which decide what is drawn.
        """
        draw = Random(f"{self.seed} {place[0]} {place[1]}")
        for _ in range(_TRIES):
            if draw.random() < self._chance(problem):
                break
            problem = draw.randrange(len(self.kinds))
        return problem

    def choose_all(self, problems: Sequence[int], groups: Sequence[int], rollout: int) -> list[int]:
        """For each row the problem that its group is made of instead; a group is chosen for once."""
        number_of = {
            group: self.choose(problem, (rollout, group))
            for group, problem in dict(zip(groups, problems, strict=True)).items()
        }
        return [number_of[group] for group in groups]

    def update(self, problems: Sequence[int], taught: Sequence[bool]) -> None:
        """Note for each group's problem whether it had a gradient."""
        for problem, has_taught in zip(problems, taught, strict=True):
            self.taught[problem] = has_taught
            kind = self.kinds[problem]
            before = self.of_kind.get(kind, 1.0)
            self.of_kind[kind] = before + _RECENT * (has_taught - before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, of plain values."""
        return {"taught": dict(self.taught), "of_kind": dict(self.of_kind)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.taught, self.of_kind = dict(state["taught"]), dict(state["of_kind"])

    def _chance(self, problem: int) -> float:
        taught = self.taught.get(problem)
        if taught is None:
            kind = self.kinds[problem]
            return 1.0 if kind is None else max(self.share, self.of_kind.get(kind, 1.0))
        return 1.0 if taught else self.share


def key_of(prompt: Any) -> str:
    """A text or a conversation as a key to look its problem up by."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def rewards_differ(rewards: Tensor) -> Tensor:
    """(P, G) rewards, NaN where nothing scored -> (P,) bool: groups with different ones.

    For TRL's advantages, which for equal rewards may be rounding errors.
    """
    scored = [rewards.masked_fill(rewards.isnan(), nothing) for nothing in (-inf, inf)]
    return scored[0].amax(1) > scored[1].amin(1)
