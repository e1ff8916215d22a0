"""What a sampler is asked for and what it answers."""

from __future__ import annotations

from dataclasses import dataclass


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
