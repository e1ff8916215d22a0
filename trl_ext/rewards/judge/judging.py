"""Cases to verdicts: from the cache, or from the model behind the endpoint, several at a time and within the limits."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from trl_ext.endpoint.budget import Budget, BudgetSpent
from trl_ext.endpoint.client import Client, Endpoint, EndpointError, Reply, RequestFailed
from trl_ext.errors import InputError, ServerError
from trl_ext.rewards.judge.cache import VerdictCache
from trl_ext.rewards.judge.prompt import Case, fingerprint, identifier_of, prompt, response_format
from trl_ext.rewards.judge.settings import JudgeSettings, read_judge
from trl_ext.rewards.judge.verdict import NoVerdict, Verdict, read_verdict

log = logging.getLogger(__name__)
_PROBE = Case("Two and two are four, so the answer is 4.", "How much is 2 + 2?", "4")


class JudgeError(ServerError):
    """The judge is lost: what is trained or measured without it would be something else."""


@dataclass(frozen=True)
class Judged:
    """A verdict, or why there is none."""

    verdict: Verdict | None
    why: str = ""


@dataclass(frozen=True)
class Judgment:
    """What one call of a judge gave, and what it took."""

    judged: list[Judged]
    calls: int
    cache_hits: int
    seconds: float

    @property
    def failures(self) -> int:
        """Cases without a verdict."""
        return sum(one.verdict is None for one in self.judged)


class Judge:
    """A rubric and the model that applies it. One call at a time; its requests run side by side."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings, self.rubric = settings, settings.rubric
        self.cache = VerdictCache(settings.cache_folder, settings.rubric)
        limits, sampling = settings.limits, settings.sampling
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.budget = Budget(calls=None if limits.calls is None else max(1, limits.calls // ranks))
        seed = {} if sampling.seed is None else {"seed": sampling.seed}
        key_advice = f"look at {settings.api_key_env}" if settings.api_key_env else "name its variable in api_key_env"
        endpoint = Endpoint(
            settings.url, settings.model, settings.key, sampling.max_tokens, sampling.temperature, limits.timeout,
            limits.tries, extra_body={**seed, **sampling.extra_body}, key_advice=key_advice,
        )  # fmt: skip
        try:
            self.client = Client(endpoint, self.budget)
        except ImportError as error:
            raise InputError("a judge needs the package openai: pip install 'trl_ext[judge]'") from error
        self._has_schema: bool | None = None  # not known yet
        self._in_a_row, self._lock = 0, threading.Lock()

    def __call__(self, cases: Sequence[Case]) -> Judgment:
        """Judge the cases; equal ones once.

        Raises:
            JudgeError: too many in a row had no verdict, or none ever will.
        """
        began, calls = time.monotonic(), self.budget.used_calls
        keys = [fingerprint(self.settings, case) for case in cases]
        known = {key: Judged(verdict) for key in dict.fromkeys(keys) if (verdict := self.cache.get(key)) is not None}
        new = {key: case for key, case in zip(keys, cases, strict=True) if key not in known}
        hits = sum(key in known for key in keys)
        known |= self._ask_all(new)
        judged = [known[key] for key in keys]
        return Judgment(judged, self.budget.used_calls - calls, hits, time.monotonic() - began)

    def check(self) -> None:
        """Ask what can be asked before a run: does the endpoint serve the model, and does that give verdicts?

        Raises:
            InputError: one line that says what does not work.
        """
        of = f"judge {self.client.endpoint.shown_url}"
        try:
            served = self.client.models()
        except EndpointError as error:
            if "NotFoundError" not in str(error):  # a server without that list may still answer
                raise InputError(f"{of}: {error}; start the server, or change url in the judge's file") from None
            served = [self.settings.model]
        if self.settings.model not in served:
            raise InputError(
                f"{of} serves no model {self.settings.model!r}. It serves: {', '.join(served) or 'none'}; change model "
                "in the judge's file"
            )
        try:
            (judged,) = self([_PROBE]).judged
        except JudgeError as error:
            raise InputError(f"{of}: {error}") from None
        if judged.verdict is None:
            raise InputError(f"{of} gave no verdict on a first small problem: {judged.why}")

    def question(self, case: Case, identifier: str, fault: str) -> str:
        """What the model is asked; `scripts/benchmarks/judge.py` measures others."""
        return prompt(self.rubric, case, identifier, fault)

    def _ask_all(self, cases: dict[str, Case]) -> dict[str, Judged]:
        if not cases:
            return {}
        self.client.stopped.clear()
        pool = ThreadPoolExecutor(min(self.settings.limits.concurrency, len(cases)), thread_name_prefix="judge")
        try:
            asked: dict[str, Future[Judged]] = {key: pool.submit(self._counted, key, cases[key]) for key in cases}
            for ended in wait(asked.values(), return_when=FIRST_EXCEPTION).done:
                ended.result()  # raises what it has raised
            return {key: one.result() for key, one in asked.items()}
        except BaseException:  # a time limit or Ctrl-C too: requests in flight end by themselves
            self.client.stopped.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _counted(self, key: str, case: Case) -> Judged:
        try:
            judged = self._judge(key, case)
        except EndpointError as error:
            raise JudgeError(f"the judge cannot be asked: {error}") from None
        with self._lock:
            self._in_a_row = 0 if judged.verdict else self._in_a_row + 1
            in_a_row = self._in_a_row
        if in_a_row >= self.settings.limits.failures:
            raise JudgeError(
                f"the judge gave no verdict on {in_a_row} responses in a row (limits.failures), the last time because "
                f"{judged.why}"
            )
        return judged

    def _judge(self, key: str, case: Case) -> Judged:
        fault = why = ""
        for ask in range(self.settings.limits.asks):
            try:
                reply = self._reply(self.question(case, identifier_of(key, ask), fault))
            except (BudgetSpent, RequestFailed) as error:
                return Judged(None, f"{error}{' (limits.calls)' if isinstance(error, BudgetSpent) else ''}")
            try:
                verdict = read_verdict(reply.text, self.rubric)
            except NoVerdict as error:
                is_cut = reply.finish_reason == "length"
                fault = "it was cut off, so be brief" if is_cut else str(error)
                why = "its answer was longer than sampling.max_tokens" if is_cut else f"of its answer: {error}"
                continue
            return Judged(self.cache.put(key, verdict, self.settings.model))
        return Judged(None, why)

    def _reply(self, question: str) -> Reply:
        """The judge's answer, held to the schema where the server can do so."""
        messages = [{"role": "user", "content": question}]
        most = self.client.most_tokens(messages)
        if self._has_schema is not False:
            self.budget.take(most)
            try:
                reply = self.client.ask(messages, response_format=response_format(self.rubric))
            except RequestFailed as error:
                if self._has_schema or not error.is_refused:
                    raise
            else:
                self._has_schema = True
                return reply
        self.budget.take(most)
        reply = self.client.ask(messages)
        if self._has_schema is None:
            log.warning("the judge's server refuses response_format json_schema: its answers are checked here alone")
            self._has_schema = False
        return reply


@functools.cache
def judge_of(path: str) -> Judge:
    """The judge of a file; a reward and a grader of one process share it, with its limits."""
    return Judge(read_judge(Path(path)))
