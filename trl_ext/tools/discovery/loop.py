"""The loop: ask, judge, record, ask again. Requests and verdicts overlap; every paid answer is on disk at once.

The main thread decides, writes and prints; daemon threads ask and judge, and hold nothing that could be lost. A run
that was interrupted, killed or refused by the endpoint resumes from its log, and first judges unjudged answers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

from trl_ext.endpoint.budget import BudgetSpent
from trl_ext.endpoint.client import Client, EndpointError, Reply, RequestFailed
from trl_ext.io import write_text
from trl_ext.tools.discovery.archive import Attempt, best_valid
from trl_ext.tools.discovery.log import Log, answer_entry, redacted
from trl_ext.tools.discovery.problem import Polished, Problem, Verdict, no_program_message
from trl_ext.tools.discovery.strategies import Proposal

_MAX_FAILED_IN_A_ROW = 5  # the endpoint is down, or all requests are too long
_INTERRUPTED = "interrupted"
Strategy = Callable[[Problem, Sequence[Attempt], Random], Proposal | None]
_Event = Callable[[], None]  # handles a worker's result; called in the main thread


@dataclass(frozen=True)
class SearchConfig:
    """The settings of a run.

    Attributes:
        propose: a strategy with its options.
        concurrency: the number of requests in flight at a time.
        judges: the number of programs that run at a time.
        polish_seconds: time limit of the numeric method, per program.
    """

    problem: Problem
    propose: Strategy
    folder: Path
    seed: int = 0
    concurrency: int = 4
    judges: int = 2
    polish_seconds: float = 60.0


class Loop:
    """One run.

    Args:
        attempts: those of earlier processes of the same run.
        show: called with every attempt that is complete, and with None when the totals have changed.
    """

    def __init__(
        self,
        config: SearchConfig,
        client: Client,
        log: Log,
        attempts: list[Attempt],
        show: Callable[[Attempt | None], None] = lambda _: None,
    ) -> None:
        self.config, self.client, self.log, self.show = config, client, log, show
        self.attempts = attempts  # answered ones in the order of their answers, pending ones among them
        self.best = best_valid(attempts)
        self.asking = self.judging = 0
        self._next_id = max((attempt.id for attempt in attempts), default=-1) + 1
        self._end = ""
        self._error: BaseException | None = None
        self._failed_in_a_row = 0
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()  # safe to use in a signal handler
        self._to_ask: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()
        self._to_judge: queue.SimpleQueue[Attempt | None] = queue.SimpleQueue()

    def run(self) -> str:
        """Run until the strategy or the budget ends, or after `interrupt` until nothing is in flight; returns why.

        When the time is over, programs that still run are left unjudged; a resumed run judges them.

        Raises:
            EndpointError: the endpoint will answer no request; other answers in flight are in the log.
        """
        if self.best is not None:
            self._write_best(*self.best)  # a process that was killed may have logged the verdict only
        workers = (
            (self._ask, self._to_ask, self.config.concurrency),
            (self._judge, self._to_judge, self.config.judges),
        )
        for work, tasks, threads in workers:
            for _ in range(threads):
                threading.Thread(target=self._work, args=(work, tasks), daemon=True).start()
        try:
            for attempt in [a for a in self.attempts if a.is_pending]:
                self._route(attempt)
            while self._dispatch_requests() or self.asking or self.judging:
                self.show(None)
                event = self._next_event()
                if event is None or (event == self._stop and self._end == _INTERRUPTED):
                    break
                event()
        finally:
            for _, tasks, threads in workers:
                for _ in range(threads):
                    tasks.put(None)
        if self._error is not None:
            raise self._error
        return self._end or "the strategy has nothing more to ask"

    def interrupt(self) -> None:
        """End the run when nothing is in flight, on the second call at once. For signal handlers and other threads."""
        self._events.put(self._stop)

    def _next_event(self) -> _Event | None:
        """The next event; None when the time is over and no request is in flight."""
        while True:
            is_over = not self.asking and self.client.budget.seconds_left() <= 0
            try:
                return self._events.get(timeout=0.0 if is_over else 1.0)
            except queue.Empty:
                if is_over:
                    self._end = self._end or "the budget: the time is over"
                    return None

    def _dispatch_requests(self) -> bool:
        """Start as many requests as may be in flight; whether any was started."""
        first_id, config, budget = self._next_id, self.config, self.client.budget
        while not self._end and self.asking < config.concurrency and self.judging < config.concurrency + config.judges:
            rng = Random(f"{config.seed}-{self._next_id}")  # the same request whichever process makes it
            proposal = config.propose(config.problem, self.attempts, rng)
            if proposal is None:
                break
            most = self.client.most_tokens(proposal.messages)
            try:
                budget.take(most)
            except BudgetSpent as spent:
                if self.asking == 0:  # requests in flight may use less than is reserved for them
                    self._end = f"the budget: {spent}"
                break
            attempt = Attempt(self._next_id, proposal.group, proposal.parents, proposal.polish, proposal.messages)
            self.attempts.append(attempt)
            self._next_id += 1
            self.asking += 1
            self.log.add("asked", id=attempt.id, calls=budget.used_calls, tokens=most)
            self._to_ask.put(attempt)
        return self._next_id > first_id

    # In the threads

    def _work(self, work: Callable[[Attempt], _Event], tasks: queue.SimpleQueue[Attempt | None]) -> None:
        while (attempt := tasks.get()) is not None:
            try:
                event = work(attempt)
            except BaseException as error:
                event = partial(self._handle_worker_error, attempt, error)
            self._events.put(event)

    def _ask(self, attempt: Attempt) -> _Event:
        try:
            return partial(self._record_answer, attempt, self.client.ask(attempt.messages))
        except RequestFailed as error:
            return partial(self._record_failed_request, attempt, error)

    def _judge(self, attempt: Attempt) -> _Event:
        program, problem = attempt.program, self.config.problem
        polished: Polished | str = ""
        if program is None:
            verdict = Verdict(False, (), no_program_message(attempt.finish_reason))
        else:
            verdict = problem.verify(program)
            if attempt.polish and problem.polish is not None:
                polished = problem.polish(program, self.config.seed + attempt.id, self.config.polish_seconds)
        return partial(self._record_verdict, attempt, verdict, polished)

    # In the main thread

    def _stop(self) -> None:
        self._end = _INTERRUPTED
        self.client.stopped.set()
        if self.asking or self.judging:
            waiting = f"waiting for {self.asking} answers and {self.judging} programs"
            print(f"\n{waiting}; interrupt again to leave now", flush=True)

    def _record_answer(self, attempt: Attempt, reply: Reply) -> None:
        self._failed_in_a_row = 0
        attempt.response, attempt.finish_reason = self.client.redact(reply.text), reply.finish_reason
        self._log_answer(attempt, reply)
        self._route(attempt)

    def _record_failed_request(self, attempt: Attempt, error: RequestFailed) -> None:
        self._failed_in_a_row += 1
        attempt.error = str(error)
        self._log_answer(attempt, Reply("", "", error.tokens, 0, error.tries, is_estimated=True))
        self.show(attempt)
        if self._failed_in_a_row >= _MAX_FAILED_IN_A_ROW and not self._end:
            self._fail(EndpointError(f"{self._failed_in_a_row} requests in a row got no answer; the last: {error}"))

    def _log_answer(self, attempt: Attempt, reply: Reply) -> None:
        self.asking -= 1
        attempt.second = round(self.client.budget.used_seconds(), 3)
        attempt.tokens = reply.prompt_tokens + reply.completion_tokens
        self.attempts.remove(attempt)  # to the end: a resumed run sees the order of the answers
        self.attempts.append(attempt)
        self.log.add("answer", **answer_entry(attempt, reply, self.client.budget.used_calls))

    def _handle_worker_error(self, attempt: Attempt, error: BaseException) -> None:
        """End the run; the request is dropped or the program left unjudged, and a resumed run does it again."""
        if attempt.response is None:
            self.asking -= 1
            self.attempts.remove(attempt)
            self.log.add("refused", id=attempt.id, error=str(error))
        else:
            self.judging -= 1
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the run with the error once nothing is in flight."""
        self._error = self._error or error
        self._end = self._end or "an error"
        self.client.stopped.set()

    def _route(self, attempt: Attempt) -> None:
        """Judge the attempt, unless the same program has been judged before."""
        self.judging += 1
        known = None if attempt.polish else self._known(attempt.program)
        if known is None or known.verdict is None:
            self._to_judge.put(attempt)
        else:
            message = f"the same program as in attempt {known.id}: {known.verdict.message}"
            self._record_verdict(attempt, replace(known.verdict, message=message), "")

    def _known(self, program: str | None) -> Attempt | None:
        same = (a for a in self.attempts if program is not None and a.verdict and not a.polish and a.program == program)
        return next(same, None)

    def _record_verdict(self, attempt: Attempt, verdict: Verdict, polished: Polished | str) -> None:
        self.judging -= 1
        redact, finish_file = self.client.redact, ""
        attempt.verdict = redacted(verdict, redact)
        if isinstance(polished, Polished):
            attempt.polished, finish_file = redacted(polished.verdict, redact), _polished_file(attempt)
            (self.config.folder / "programs").mkdir(exist_ok=True)
            write_text(self.config.folder / finish_file, redact(polished.program))
        else:
            attempt.polish_note = redact(polished)
        self.log.add(
            "verdict",
            id=attempt.id,
            second=round(self.client.budget.used_seconds(), 3),
            verdict=attempt.verdict,
            finished=attempt.polished,
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
            program = (self.config.folder / _polished_file(attempt)).read_text(encoding="utf-8")
        told = next(iter(verdict.message.splitlines()), "")
        write_text(self.config.folder / "best.py", f"# Attempt {attempt.id}, made by {by}. {told}\n{program}")


def _polished_file(attempt: Attempt) -> str:
    return f"programs/{attempt.id:04d}_finished.py"
