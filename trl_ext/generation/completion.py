"""What a sampler is asked for, what it answers, and the entropy of what it sampled from, estimated from the samples.

The mean of -log p over tokens drawn from p is an unbiased estimate of p's entropy, and it needs nothing but what
generation knows already: no forward pass, and so no choice of rows to spend one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def derive_seed(seed: int, number: int) -> int:
    """The seed of the part `number` of what `seed` decides; neighboring seeds share no part below a million."""
    return seed * 1_000_003 + number


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    text: str
    tokens: int
    finished: bool  # ended by itself, not cut by the length limit
    logp: float | None = None  # sum over its tokens, under the model that sampled it
    entropy_estimate: float | None = None  # mean of -log p of its tokens, where p is what they were drawn from
    turns: list[dict[str, Any]] | None = None  # where tools may be called: the model's and theirs, as a log has them


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 1024  # of a response
    min_tokens: int = 0
    stop: tuple[str, ...] = ("</answer>",)  # strings that end a response and stay in it
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.max_tokens < 1 or self.min_tokens < 0:
            raise ValueError(f"needed: temperature >= 0, 0 < top_p <= 1, max_tokens >= 1, min_tokens >= 0; got {self}")
        if not all(self.stop):
            raise ValueError("stop has an empty string, at which every response would end; leave it out")


def entropy_estimates(
    completion_ids: Sequence[Sequence[int]], logps: Sequence[Sequence[float | None]] | None
) -> list[float | None]:
    """The mean of -log p over each completion's tokens, in nats; None where it is not known.

    Args:
        logps: of each completion's tokens, under the distribution that they were drawn from; None if not recorded.
    """
    if logps is None or len(logps) != len(completion_ids):
        return [None] * len(completion_ids)
    return [
        -sum(p for p in row if p is not None) / len(row) if ids and len(row) == len(ids) and None not in row else None
        for ids, row in zip(completion_ids, logps, strict=True)
    ]


def mean_over_tokens(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The `entropy_estimate` of rows by their `tokens`: the mean over all tokens; None if no row has one."""
    known = [row for row in rows if row.get("entropy_estimate") is not None]
    tokens = sum(row["tokens"] for row in known)
    return sum(row["entropy_estimate"] * row["tokens"] for row in known) / tokens if tokens else None
