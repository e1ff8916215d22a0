"""What an embedded task is: problems, how the base policy has read them worked out, and a check of every step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

Row = dict[str, Any]  # problem, solution, answer, level, subject


@dataclass(frozen=True)
class BasePolicyConfig:
    """Everything, besides the seed and the task, that decides the bytes of the policy."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int = 32
    intermediate: int = 384
    vocab: int = 640
    steps: int = 780
    batch: int = 24
    lr: float = 1.5e-2
    weight_decay: float = 0.01
    question_only_share: float = 0.15
    max_length: int = 512


@dataclass(frozen=True)
class Step:
    """A step of a response's working: `response[start:end]`."""

    start: int
    end: int
    valid: bool  # it follows from what is written before it
    true: bool  # what it states is what a solution without an error states here


@dataclass(frozen=True)
class Task:
    """An embedded task.

    Args:
        problems: split and seed to endless rows.
        work: a row to a working and the answer stated at its end, right or wrong, as the base policy reads them.
        steps: a problem and a response to the steps that can be checked, in their order.
        tokens: texts that are one token each, such as numbers.
        policy: the size of the base policy and of its pre-training, which is to take about a minute.
    """

    problems: Callable[[str, int], Iterator[Row]]
    work: Callable[[Row, Random], tuple[str, str]]
    steps: Callable[[str, str], list[Step]]
    tokens: tuple[str, ...] = ()
    policy: BasePolicyConfig = field(default_factory=BasePolicyConfig)


def first_rows(stream: Iterator[Row], split: str, n: int) -> list[Row]:
    """`n` rows of a split's stream; those of validation are distinct: a repeated problem would be counted twice.

    Raises:
        ValueError: there are fewer distinct problems.
    """
    if split == "train":
        return list(islice(stream, n))
    rows: dict[str, Row] = {}  # by problem
    since_new = 0
    while len(rows) < n:
        row = next(stream)
        since_new = since_new + 1 if row["problem"] in rows else 0
        rows.setdefault(row["problem"], row)
        if since_new == 5_000:
            raise ValueError(f"n={n} is more than the distinct problems of {split!r}: about {len(rows)}")
    return list(rows.values())
