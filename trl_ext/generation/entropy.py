"""The entropy of a policy, estimated from the log-probabilities of the tokens that it has sampled.

The mean of -log p over tokens drawn from p is an unbiased estimate of p's entropy, and it needs nothing but what
generation knows already: no forward pass, and so no choice of rows to spend one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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
