"""Completions on their way: requested of servers, while the process that will read them does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread that does not keep a process from ending, as those of a pool do."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True)
class InFlight:
    """A rollout's completions of this rank that were requested ahead."""

    prompts: list[list[int]]
    version: int  # optimizer steps that the weights which sample have had
    answers: Future[Any]  # of `Servers.generate`

    @classmethod
    def arrived(cls, prompts: list[list[int]], version: int, answers: object) -> InFlight:
        """Of answers that are there, as a checkpoint has them."""
        there: Future[Any] = Future()
        there.set_result(answers)
        return cls(prompts, version, there)

    def of(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The answers, waited for.

        Raises:
            RuntimeError: they are of other prompts.
            ServerError: a server is lost, or has answered with an error.
        """
        if [list(ids) for ids in prompts] != self.prompts:
            raise RuntimeError("a rollout that was sampled ahead is of other prompts than the one that is due")
        return self.answers.result()
