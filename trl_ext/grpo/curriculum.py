"""Which problems a rollout is made of: those of zero reward variance are revisited less often.

A group without a gradient, such as one whose completions all got the same reward, was sampled for nothing. DAPO's
dynamic sampling (arXiv:2503.14476, section 3.2) samples until the batch is full; here a batch is sampled once, and
problems are selected by what their earlier groups showed, at no cost.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from random import Random
from typing import Any

from datasets import Dataset

_MAX_DRAWS = 64  # if nearly all problems are uninformative, the last draw is taken
_RECENT = 0.05  # weight of a new group in the informative fraction of its kind


def kinds_of(rows: Dataset) -> list[Hashable]:
    """Each row's subject and level, as far as the dataset has these columns; None if all rows are of one kind."""
    columns = [rows[name] for name in ("subject", "level") if name in rows.column_names]
    kinds: list[Hashable] = list(zip(*columns, strict=True))
    return kinds if len(set(kinds)) > 1 else [None] * len(rows)


class Curriculum:
    """Accepts or replaces the problems of a rollout at random; problems are known by their number.

    A problem whose last group had a gradient is always accepted, an uninformative one (without a gradient in its last
    group) with probability `keep_prob`. A problem that was never visited is accepted with the fraction of recent
    groups of its kind that had a gradient, but at least `keep_prob`.

    Args:
        kinds: the kind of each problem, such as its subject and level; None: all problems are of one kind.
        keep_prob: the acceptance probability of uninformative problems.
        seed: of the draws, which are the same on every rank.
    """

    def __init__(self, kinds: Sequence[Hashable], keep_prob: float, seed: int) -> None:
        self.kinds, self.keep_prob, self.seed = kinds, keep_prob, seed
        self.informative: dict[int, bool] = {}  # for each visited problem, whether its last group had a gradient
        self.of_kind: dict[Hashable, float] = {}  # fraction of recent groups with a gradient
        self.number_of: dict[str, int] = {}  # each problem's, by the key of its prompt

    @classmethod
    def of_dataset(cls, rows: object, keep_prob: float, seed: int) -> Curriculum:
        """The curriculum of a training set, which has to be a `datasets.Dataset`."""
        if not isinstance(rows, Dataset):
            raise TypeError(
                "uninformative_keep_prob and dynamic_sampling_tries need a train_dataset whose rows can be looked up, "
                "a datasets.Dataset"
            )
        curriculum = cls(kinds_of(rows), keep_prob, seed)
        curriculum.number_of = {_key_of(prompt): i for i, prompt in enumerate(rows["prompt"])}
        return curriculum

    @property
    def uninformative(self) -> list[int]:
        """Problems whose last group had no gradient, in order."""
        return sorted(problem for problem, informative in self.informative.items() if not informative)

    def select(
        self, prompts: Sequence[object], first_row: int, group_size: int, rollout: int, attempt: int = 0
    ) -> list[int]:
        """The problem of each row of a rank, selected once per group, given the rows' own prompts.

        Args:
            first_row: place of the rank's first row among those of all ranks.
            attempt: above 0, problems are drawn at random in place of the rows' own.
        """
        groups = [(first_row + i) // group_size for i in range(len(prompts))]
        prompt_of = dict(zip(groups, prompts, strict=True))
        chosen = {
            group: self.choose(self.number_of[_key_of(prompt)], (rollout, group, attempt)[: 3 if attempt else 2])
            for group, prompt in prompt_of.items()
        }
        return [chosen[group] for group in groups]

    def choose(self, problem: int, place: tuple[int, ...]) -> int:
        """`problem`, or another one in its place.

        Args:
            place: numbers of the rollout, of the group in it, and of a further attempt at it, which seed the draws.
        """
        draw = Random(f"{self.seed} {' '.join(map(str, place))}")
        if len(place) > 2:
            problem = draw.randrange(len(self.kinds))
        for _ in range(_MAX_DRAWS):
            if draw.random() < self._probability(problem):
                break
            problem = draw.randrange(len(self.kinds))
        return problem

    def update(self, problems: Sequence[int], informative: Sequence[bool]) -> None:
        """Record for each group's problem whether the group had a gradient."""
        for problem, has_gradient in zip(problems, informative, strict=True):
            self.informative[problem] = has_gradient
            kind = self.kinds[problem]
            before = self.of_kind.get(kind, 1.0)
            self.of_kind[kind] = before + _RECENT * (has_gradient - before)

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run, as plain values."""
        return {"taught": dict(self.informative), "of_kind": dict(self.of_kind)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.informative, self.of_kind = dict(state["taught"]), dict(state["of_kind"])

    def _probability(self, problem: int) -> float:
        informative = self.informative.get(problem)
        if informative is None:
            kind = self.kinds[problem]
            return 1.0 if kind is None else max(self.keep_prob, self.of_kind.get(kind, 1.0))
        return 1.0 if informative else self.keep_prob


def _key_of(prompt: object) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)  # a text, or a conversation
