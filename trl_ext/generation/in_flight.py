"""Completions on their way: requested of servers, while the process that will read them does something else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from trl_ext.generation.progress import advance

TICK = 1.0  # seconds between two looks at the progress and at a request to stop, while nothing arrives


def in_background(calls: Sequence[Callable[[], Any]], at_once: int = 1) -> list[Future[Any]]:
    """The calls' results, in threads that do not keep a process from ending, as those of a pool do."""
    futures: list[Future[Any]] = [Future() for _ in calls]
    due: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
    for pair in zip(calls, futures, strict=True):
        due.put(pair)

    def run() -> None:
        while True:
            try:
                call, future = due.get_nowait()
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(len(calls), at_once)):
        threading.Thread(target=run, daemon=True).start()
    return futures


def result_of(future: Future[Any], report: Callable[[], object] = lambda: advance(0)) -> Any:
    """A result that is waited for, with `report` called every second until it is there."""
    while not wait([future], TICK).done:
        report()
    return future.result()


def finish(tokens: int) -> None:
    """Count a completion that is there as progress."""
    advance(tokens, finished=1)


@dataclass(frozen=True)
class InFlight:
    """A rollout's completions of this rank that were requested ahead."""

    prompts: list[list[int]]
    version: int  # optimizer steps that the weights which sample have had
    answers: Future[Any]  # of `Servers.generate`
    arrived: list[int] = field(default_factory=list)  # tokens of each completion that is there

    @classmethod
    def complete(cls, prompts: list[list[int]], version: int, answers: object) -> InFlight:
        """Of answers that are there, as a checkpoint has them."""
        there: Future[Any] = Future()
        there.set_result(answers)
        return cls(prompts, version, there)

    def of(self, prompts: Sequence[Sequence[int]]) -> Any:
        """The answers, waited for; what arrives counts as progress.

        Raises:
            RuntimeError: they are of other prompts.
            ServerError: a server is lost, or has answered with an error.
        """
        if [list(ids) for ids in prompts] != self.prompts:
            raise RuntimeError("a rollout that was sampled ahead is of other prompts than the one that is due")
        seen = 0

        def report() -> None:
            nonlocal seen
            new = self.arrived[seen:]
            seen += len(new)
            advance(sum(new), finished=len(new))

        report()
        return result_of(self.answers, report)
