"""A user's function as a tool, in processes that can be killed."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

from trl_ext.registry import import_function
from trl_ext.rewards.workers.pool import Failure, Pool, PoolError, WorkerLimits
from trl_ext.turns.calls import MEMORY_MB, MOST_CHARACTERS, Answer, Call, Kind, cores


class OwnFunction:
    """A user's function, in processes that can be killed; it needs no sandbox, since a user wrote it.

    Args:
        path: file.py:function.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self.function = import_function(path, "tool")
        self.seconds = seconds
        limits = WorkerLimits(seconds=seconds, memory_mb=2 * MEMORY_MB, workers=cores())
        self.pool = Pool(path, limits, all_may_fail=True)

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """What the function returns, as a text."""
        given = [self._bound(call) for call in calls]
        jobs = [arguments for arguments in given if not isinstance(arguments, Answer)]
        began = time.monotonic()
        try:
            outcomes = self.pool.map(jobs)
        except PoolError as error:
            outcomes = [Failure("error", f"the tool does not run: {str(error)[:200]}")] * len(jobs)
        each = (time.monotonic() - began) / max(len(jobs), 1)
        told = iter(self._said(outcome, each) for outcome in outcomes)
        return [arguments if isinstance(arguments, Answer) else next(told) for arguments in given]

    def close(self) -> None:
        """Kill the workers."""
        self.pool.close()

    def _bound(self, call: Call) -> list[Any] | Answer:
        try:
            bound = inspect.signature(self.function).bind(**(call.arguments or {}))
        except TypeError as error:
            return Answer(f"Error: {error}", "failed")
        return list(bound.args)

    def _said(self, outcome: Any, seconds: float) -> Answer:
        if not isinstance(outcome, Failure):
            return Answer(str(outcome)[:MOST_CHARACTERS], "ok", seconds)
        kind: Kind = "timeout" if outcome.kind == "timeout" else "failed"
        return Answer(f"Error: {outcome.detail}", kind, seconds)
