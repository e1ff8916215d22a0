"""A verdict."""

from __future__ import annotations

from typing import NamedTuple


class Result(NamedTuple):
    """A verdict and a short reason for the log."""

    correct: bool
    reason: str
