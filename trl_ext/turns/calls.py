"""A call of a model, the answer that it reads, and what answers: a tool."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MOST_CHARACTERS = 20_000  # of an answer, before its tokens are counted
MEMORY_MB = 512  # of a program or a worker

Kind = Literal["ok", "failed", "timeout"]


@dataclass(frozen=True)
class Call:
    """What a model asks a tool for.

    Attributes:
        arguments: by name; None if they cannot be read, and `fault` says why.
        earlier: the arguments of this response's earlier calls of the same tool.
        place: of the response, among those that are sampled together.
    """

    name: str
    arguments: Mapping[str, Any] | None
    fault: str = ""
    earlier: tuple[Mapping[str, Any], ...] = ()
    place: int = 0


@dataclass(frozen=True)
class Answer:
    """What a tool says to a call."""

    text: str
    kind: Kind = "ok"
    seconds: float = 0.0


class Tool(Protocol):
    """A function that a model may call."""

    function: Callable[..., Any]  # with types and a docstring, of which its description is made

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """One answer per call, in their order; many calls run at once."""

    def close(self) -> None:
        """End its processes. Another call would start new ones."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
