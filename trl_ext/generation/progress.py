"""Progress of long sampling: a line every half minute, in a terminal and in a log file alike.

Whoever samples opens `reporting` with what it is for; the loops that decode call `advance` after each token. Nothing is
passed between them, because TRL's and vLLM's calls lie in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

from trl_ext.generation.interruption import stop_if_told
from trl_ext.io import print_line

FIRST_SECONDS, SECONDS = 10.0, 30.0  # until the first line, and between two
_clock = time.monotonic


@dataclass
class SamplingProgress:
    """Counts tokens and finished completions.

    Attributes:
        purpose: such as `validation at step 20`.
        completions: that will be sampled.
        longest: tokens that one may have.
    """

    purpose: str
    completions: int
    longest: int
    tokens: int = 0
    finished: int = 0
    show: Callable[[str], None] = print_line
    began: float = field(default_factory=lambda: _clock())
    due: float = field(default_factory=lambda: _clock() + FIRST_SECONDS)

    def advance(self, tokens: int, finished: int = 0) -> None:
        """Count what one more step has decoded, and print a line when it is time."""
        self.tokens += tokens
        self.finished += finished
        if (now := _clock()) >= self.due:
            self.due = now + SECONDS
            self.show(self.line(now - self.began))

    def line(self, seconds: float) -> str:
        """What is done after that many seconds, and the most that is left."""
        rate = self.tokens / max(seconds, 1e-9)
        done = f"{self.purpose}: {self.finished} of {self.completions} completions"
        if not self.tokens:
            return f"{done} after {_duration(seconds)}"
        left = _duration((self.completions - self.finished) * self.longest / rate)
        return f"{done}, {self.tokens:,} tokens, {rate:.3g} tokens/s, at most {left} left"


_CURRENT: ContextVar[SamplingProgress | None] = ContextVar("sampling progress", default=None)


@contextlib.contextmanager
def reporting(purpose: str, completions: int, longest: int) -> Iterator[None]:
    """Report on what is sampled in the block, on the first rank; within another such block, that one's is kept."""
    if _CURRENT.get() is not None or not PartialState().is_main_process:
        yield
        return
    before = _CURRENT.set(SamplingProgress(purpose, completions, longest))
    try:
        yield
    finally:
        _CURRENT.reset(before)


def advance(tokens: int, finished: int = 0) -> None:
    """Count a step of whatever is being reported, nothing outside of `reporting`; ends sampling that is to stop."""
    stop_if_told()
    if (current := _CURRENT.get()) is not None:
        current.advance(tokens, finished)


class CountedTokens(StoppingCriteria):
    """Ends nothing; reports the tokens of the loop of transformers, whose finished rows are padded."""

    def __init__(self, config: GenerationConfig | None) -> None:
        pad = None if config is None else config.pad_token_id
        self.pad_token_id = -1 if pad is None else pad

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """(rows,) False, called after every token."""
        advance(int((input_ids[:, -1] != self.pad_token_id).sum()))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
