"""A problem without a sandbox, for tests of the loop: a program is `score N`, valid if it also says `ok`."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from trl_ext.endpoint.budget import Budget
from trl_ext.endpoint.client import Client, Endpoint
from trl_ext.tools.discovery.archive import Attempt
from trl_ext.tools.discovery.log import Log, attempts_of, read_log
from trl_ext.tools.discovery.loop import Loop, SearchConfig
from trl_ext.tools.discovery.problem import Polished, Problem, Verdict
from trl_ext.tools.discovery.strategies import STRATEGIES


def verify(program: str) -> Verdict:
    words = program.split()
    if "score" not in words:
        return Verdict(False, (), "it says no score")
    score = float(words[words.index("score") + 1])
    return Verdict("ok" in words, (score, -1.0), f"it says {score:g}{' and ok' if 'ok' in words else ''}")


def polish(program: str, seed: int, seconds: float) -> Polished | str:
    verdict = verify(program)
    if not verdict.score:
        return "nothing to polish"
    better = f"score {verdict.score[0] + 0.5} ok"
    return Polished(better, verify(better))


PROBLEM = Problem("toy", "Say a score.", verify, "points", "Say a score; it will be polished.", polish)


TLS = ssl.create_default_context()  # making one takes longer than a test


def client(url: str, budget: Budget | None = None, **settings: Any) -> Client:
    with mock.patch("ssl.create_default_context", return_value=TLS):
        return Client(
            Endpoint(url, "scripted", **{"first_wait": 0.01, "timeout": 5.0, **settings}), budget or Budget(calls=50)
        )


def loop(
    folder: Path,
    asks: Client,
    strategy: str = "refine",
    problem: Problem = PROBLEM,
    concurrency: int = 2,
    **options: Any,
) -> Loop:
    """A loop in `folder`, which resumes from the log that is there."""
    path = folder / "conversation_log.json"
    entries = read_log(path) if path.exists() else []
    log = Log(path, entries)
    if not entries:
        log.add("run")
    propose = STRATEGIES.build(strategy, **options)
    return Loop(SearchConfig(problem, propose, folder, concurrency=concurrency), asks, log, attempts_of(entries))


def attempt(id: int, score: Sequence[float] = (), valid: bool | None = None, group: int = 0, **more: Any) -> Attempt:  # noqa: A002
    verdict = Verdict(bool(score) if valid is None else valid, tuple(score), f"message {id}")
    response = f"```python\nprogram {id}\n```"
    return Attempt(id, group, **{"response": response, "verdict": verdict, **more})
