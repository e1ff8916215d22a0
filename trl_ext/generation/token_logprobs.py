"""The log-probability of every token that HF `generate` samples."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
)


class TokenLogProbs(LogitsProcessor):
    """Records the log-probability of every sampled token at a temperature (1: the model's own), before top-p.

    It keeps one number per token: of a step's (N, V) distribution only what the next step needs.
    """

    def __init__(self, n: int, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self._rows: list[list[float]] = [[] for _ in range(n)]
        self._which = list(range(n))  # rows still in the batch
        self._previous: tuple[Tensor, Tensor] | None = None  # logits (U, V) whose token is not known yet, their sum
        self._taken: list[Tensor] = []  # (rows,) each

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by `generate` with the tokens so far and the logits of the next."""
        self.record(input_ids)
        logits = scores.float() if self.temperature == 1 else scores.float() / self.temperature
        self._previous = logits, logits.logsumexp(dim=-1)
        return scores

    def record(self, input_ids: Tensor, of_row: Tensor | None = None) -> None:
        """Record the last token's log-probability.

        Args:
            input_ids: (rows, tokens)
            of_row: (rows,) which of the logits each row's are; None where each row has its own.
        """
        if self._previous is not None:
            logits, normalizer = self._previous
            each = torch.arange(len(input_ids), device=logits.device) if of_row is None else of_row
            self._taken.append(logits[each, input_ids[:, -1]] - normalizer[each])
            self._previous = None

    def select_rows(self, kept: Tensor) -> None:
        """Continue with these rows of the batch only."""
        self._flush()
        self._which = [self._which[i] for i in kept.tolist()]

    def rows(self) -> list[list[float]]:
        """N lists, one number per token; what comes after a row's end means nothing."""
        self._flush()
        return self._rows

    def _flush(self) -> None:
        if self._taken:
            for row, values in zip(self._which, torch.stack(self._taken, dim=1).tolist(), strict=True):
                self._rows[row] += values
        self._taken = []
