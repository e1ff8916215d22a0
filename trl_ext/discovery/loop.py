"""The loop: ask, judge, remember, ask again. Requests and verdicts overlap; what is paid for is on the disk at once.

The main thread decides, writes and shows; daemon threads ask and judge and hold nothing that could be lost. A run that
is interrupted, killed or refused by the endpoint goes on from its log, and judges what had been answered first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from trl_ext.discovery.archive import Attempt, best_valid
from trl_ext.discovery.budget import BudgetSpent
from trl_ext.discovery.client import Client, EndpointError, Reply, RequestFailed
from trl_ext.discovery.log import Log, answer_entry, redacted, verdict_entry
from trl_ext.discovery.problem import CUT_OFF, NO_PROGRAM, Polished, Problem, Verdict
from trl_ext.discovery.strategies import Proposal
from trl_ext.io import write_text

_FAILED_IN_A_ROW = 5  # requests without an answer: the endpoint is down, or all requests are too long


@dataclass(frozen=True)
class Plan:
    """How a run goes about it.

    Attributes:
        propose: a strategy with its options: (problem, attempts, rng) to a request or None.
        concurrency: requests on their way at a time.
        judges: programs that run at a time.
        polish_seconds: for the numeric method, per program.
    """

    problem: Problem
    propose: Callable[..., Proposal | None]
    folder: Path
    seed: int = 0
    concurrency: int = 4
    judges: int = 2
    polish_seconds: float = 60.0


@dataclass(frozen=True)
class _Event:
    """What a thread has to tell the main one about an attempt."""

    kind: str
    attempt: Attempt
    what: Any


_INTERRUPT = _Event("interrupt", Attempt(-1), None)
_INTERRUPTED = "interrupted"


class Loop:
    """A run. `run` returns why it ended.

    Args:
        attempts: of earlier processes of the same run.
        show: called with every attempt that is through, and with None when the totals have changed.
    """

    def __init__(
        self, plan: Plan, client: Client, log: Log, attempts: list[Attempt], show: Callable[..., None] = lambda *_: None
    ) -> None:
        self.plan, self.client, self.log, self.show = plan, client, log, show
        self.attempts = attempts  # those through first, in the order of their answers; pending ones among them
        self.best = best_valid(attempts)
        self.asking = self.judging = 0
        self._next_id = max((attempt.id for attempt in attempts), default=-1) + 1
        self._end = ""
        self._error: BaseException | None = None
        self._failed_in_a_row = 0
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()  # which a signal handler may put to
        self._to_ask: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._to_judge: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()

    def run(self) -> str:
        """Run to the end of the strategy or of the budget; after `interrupt`, to the end of what is on its way.

        When the time is over, programs that still run are left unjudged; a resumed run judges them.

        Raises:
            EndpointError: the endpoint will answer no request; what was on its way besides is in the log.
        """
        if self.best is not None:
            self._write_best(*self.best)  # a process that was killed may have logged the verdict only
        jobs = ((self._ask, self._to_ask, self.plan.concurrency), (self._judge, self._to_judge, self.plan.judges))
        for work, _, threads in jobs:
            for _ in range(threads):
                threading.Thread(target=work, daemon=True).start()
        try:
            for attempt in [a for a in self.attempts if a.is_pending]:
                self._route(attempt)
            while self._dispatch_requests() or self.asking or self.judging:
                self.show(None)
                event = self._next_event()
                if event is None or (event is _INTERRUPT and self._end == _INTERRUPTED):
                    break
                self._handle_event(event)
        finally:
            for _, waiting, threads in jobs:
                for _ in range(threads):
                    waiting.put(None)
        if self._error is not None:
            raise self._error
        return self._end or "the strategy has nothing more to ask"

    def interrupt(self) -> None:
        """End the run when what is on its way has come; called again, at once. For signal handlers, or a thread."""
        self._events.put(_INTERRUPT)

    def _next_event(self) -> _Event | None:
        """What a thread has to tell; None when the time is over and nothing that is paid for is on its way."""
        while True:
            is_over = not self.asking and self.client.budget.seconds_left() <= 0
            try:
                return self._events.get(timeout=0.0 if is_over else 1.0)
            except queue.Empty:
                if is_over:
                    self._end = self._end or "the budget: the time is over"
                    return None

    def _stop(self) -> None:
        self._end = _INTERRUPTED
        self.client.stopped.set()
        if self.asking or self.judging:
            print(
                f"\nwaiting for {self.asking} answers and {self.judging} programs; once more to leave now", flush=True
            )

    def _dispatch_requests(self) -> bool:
        """Start as many requests as may be on their way; whether any was started."""
        started = 0
        plan = self.plan
        while not self._end and self.asking < plan.concurrency and self.judging < plan.concurrency + plan.judges:
            rng = Random(f"{plan.seed}-{self._next_id}")  # the same request whichever process makes it
            proposal = plan.propose(plan.problem, self.attempts, rng)
            if proposal is None:
                break
            most = self.client.most_tokens(proposal.messages)
            try:
                self.client.budget.take(most)
            except BudgetSpent as spent:
                if self.asking == 0:  # else what is on its way may take less than is reserved for it
                    self._end = f"the budget: {spent}"
                break
            attempt = Attempt(self._next_id, proposal.group, proposal.parents, proposal.polish, proposal.messages)
            self.attempts.append(attempt)
            self._next_id += 1
            self.asking += 1
            started += 1
            self.log.add("asked", id=attempt.id, calls=self.client.budget.used_calls, tokens=most)
            self._to_ask.put(attempt)
        return started > 0

    # In the threads

    def _ask(self) -> None:
        while (attempt := self._to_ask.get()) is not None:
            try:
                event = _Event("answer", attempt, self.client.ask(attempt.messages))
            except RequestFailed as error:
                event = _Event("no answer", attempt, error)
            except BaseException as error:
                event = _Event("end", attempt, error)
            self._events.put(event)

    def _judge(self) -> None:
        while (attempt := self._to_judge.get()) is not None:
            try:
                event = _Event("verdict", attempt, self._judged(attempt))
            except BaseException as error:
                event = _Event("end", attempt, error)
            self._events.put(event)

    def _judged(self, attempt: Attempt) -> tuple[Verdict, Polished | str]:
        program, problem = attempt.program, self.plan.problem
        if program is None:
            return Verdict(False, (), CUT_OFF if attempt.finish_reason == "length" else NO_PROGRAM), ""
        verdict = problem.verify(program)
        if not attempt.polish or problem.polish is None:
            return verdict, ""
        return verdict, problem.polish(program, self.plan.seed + attempt.id, self.plan.polish_seconds)

    # In the main thread

    def _handle_event(self, event: _Event) -> None:
        if event.kind == "answer":
            self._answered(event.attempt, event.what)
        elif event.kind == "no answer":
            self._unanswered(event.attempt, event.what)
        elif event.kind == "verdict":
            self._record_verdict(event.attempt, *event.what)
        elif event is _INTERRUPT:
            self._stop()
        else:
            self._handle_worker_error(event.attempt, event.what)

    def _answered(self, attempt: Attempt, reply: Reply) -> None:
        self.asking -= 1
        self._failed_in_a_row = 0
        attempt.response, attempt.finish_reason = self.client.redact(reply.text), reply.finish_reason
        self._write_answer(attempt, reply)
        self._route(attempt)

    def _unanswered(self, attempt: Attempt, error: RequestFailed) -> None:
        self.asking -= 1
        self._failed_in_a_row += 1
        attempt.error = str(error)
        self._write_answer(attempt, Reply("", "", error.tokens, 0, error.tries, 0.0, is_estimated=True))
        self.show(attempt)
        if self._failed_in_a_row >= _FAILED_IN_A_ROW and not self._end:
            self._fail(EndpointError(f"{self._failed_in_a_row} requests in a row got no answer; the last: {error}"))

    def _handle_worker_error(self, attempt: Attempt, error: BaseException) -> None:
        """Forget a request, or leave a program unjudged, whose error ends the run: a resumed one does it again."""
        if attempt.response is None:
            self.asking -= 1
            self.attempts.remove(attempt)
            self.log.add("refused", id=attempt.id, error=str(error))
        else:
            self.judging -= 1
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the run with the error once what is on its way has come."""
        self._error = self._error or error
        self._end = self._end or "an error"
        self.client.stopped.set()

    def _write_answer(self, attempt: Attempt, reply: Reply) -> None:
        attempt.second = round(self.client.budget.used_seconds(), 3)
        attempt.tokens = reply.prompt_tokens + reply.completion_tokens
        self.attempts.remove(attempt)  # to the end: the order of the answers is what a resumed run will see
        self.attempts.append(attempt)
        self.log.add("answer", **answer_entry(attempt, reply, self.client.budget.used_calls))

    def _route(self, attempt: Attempt) -> None:
        """To a judge, unless the same program has been judged before."""
        self.judging += 1
        known = None if attempt.polish else self._known(attempt.program)
        if known is None or known.verdict is None:
            self._to_judge.put(attempt)
            return
        told = f"the same program as in attempt {known.id}: {known.verdict.message}"
        self._record_verdict(
            attempt, Verdict(known.verdict.valid, known.verdict.score, told, known.verdict.details), ""
        )

    def _known(self, program: str | None) -> Attempt | None:
        same = (a for a in self.attempts if program is not None and a.verdict and not a.polish and a.program == program)
        return next(same, None)

    def _record_verdict(self, attempt: Attempt, verdict: Verdict, polished: Polished | str) -> None:
        self.judging -= 1
        redact, finish_file = self.client.redact, ""
        attempt.verdict = redacted(verdict, redact)
        if isinstance(polished, Polished):
            attempt.polished, finish_file = redacted(polished.verdict, redact), _polished_file(attempt)
            (self.plan.folder / "programs").mkdir(exist_ok=True)
            write_text(self.plan.folder / finish_file, redact(polished.program))
        else:
            attempt.polish_note = redact(polished)
        self.log.add(
            "verdict",
            id=attempt.id,
            second=round(self.client.budget.used_seconds(), 3),
            verdict=verdict_entry(attempt.verdict),
            finished=attempt.polished and verdict_entry(attempt.polished),
            finish_file=finish_file,
            finish_note=attempt.polish_note,
        )
        new = best_valid([attempt])
        if new is not None and (self.best is None or new[1].score > self.best[1].score):
            self.best = new
            self._write_best(*new)
        self.show(attempt)

    def _write_best(self, attempt: Attempt, verdict: Verdict) -> None:
        by, program = "the answer", attempt.program or ""
        if verdict is attempt.polished:
            by = "the numeric method from the program of the answer"
            program = (self.plan.folder / _polished_file(attempt)).read_text(encoding="utf-8")
        told = next(iter(verdict.message.splitlines()), "")
        write_text(self.plan.folder / "best.py", f"# Attempt {attempt.id}, made by {by}. {told}\n{program}")


def _polished_file(attempt: Attempt) -> str:
    return f"programs/{attempt.id:04d}_finished.py"
