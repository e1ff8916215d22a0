"""Blocks of code in sandboxes that are forked from one process: the same outcomes, many at once, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trl_ext import sandbox
from trl_ext.sandbox import pool as pool_module
from trl_ext.sandbox import run_blocks
from trl_ext.sandbox.limits import ISOLATION, Limits, ProgramFailure, ProgramOutcome, ProgramResult, SandboxError
from trl_ext.sandbox.pool import SandboxPool

LIMITS = Limits(seconds=20.0, memory_mb=256, output_bytes=10_000)
SHORT = replace(LIMITS, seconds=1.0)
ROOT = Path(__file__).parents[2]

# name: (blocks, kind of failure or None, what was printed, a part of the detail)
BLOCKS: dict[str, tuple[list[str], str | None, str, str]] = {
    "an expression at the end": (["2**10"], None, "1024\n", ""),
    "nothing": ([""], None, "", ""),
    "None at the end": (["print(1)"], None, "1\n", ""),
    "earlier blocks": (["x = 3\nprint('unseen')\n1/0", "def f(): return x", "print(f())\nx * 2"], None, "3\n6\n", ""),
    "exit": (["print(1)\nexit()"], None, "1\n", ""),
    "exception": (["print(1)\n1/0"], "error", "1\n", "line 2, in <module>\n    1/0"),
    "syntax error": (["x = ("], "error", "", "SyntaxError: '(' was never closed"),
    "death": (["import os\nprint(1)\nos._exit(3)"], "crash", "1\n", "ended with status 3"),
    "flood": (["print('x' * 10**7)"], "output", "x" * 2000, "more than 10000 bytes"),
    "memory": (["x = bytearray(2**34)"], "memory", "", "more than 256 MiB"),
    "network": (["import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"], "error", "", "unreachable"),
    "another's memory": (["import os\nos.kill(1, 0)\nprint(sorted(os.listdir('/proc'))[0])"], None, "1\n", ""),
    "hang": (["print(1)\nwhile True: pass"], "timeout", "1\n", "did not end within 1 s"),
}

pytestmark = pytest.mark.moderate


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    try:
        with SandboxPool(LIMITS) as pool:
            yield pool
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def outcomes(pool: SandboxPool) -> dict[str, ProgramOutcome]:
    def run(name: str) -> ProgramOutcome:
        own = SandboxPool(SHORT) if name == "hang" else pool
        return own.run_blocks(BLOCKS[name][0])

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(BLOCKS, threads.map(run, BLOCKS), strict=True))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_has_a_clear_outcome(outcomes: dict[str, ProgramOutcome], name: str) -> None:
    _, kind, printed, detail = BLOCKS[name]
    outcome = outcomes[name]
    assert (outcome.output, outcome.isolation) == (printed, ISOLATION), outcome
    assert isinstance(outcome, ProgramResult) == (kind is None), outcome
    if isinstance(outcome, ProgramFailure):
        assert outcome.kind == kind
        assert detail in outcome.detail


@pytest.mark.parametrize("name", ["an expression at the end", "exception", "flood"])
def test_a_python_of_its_own_says_the_same(outcomes: dict[str, ProgramOutcome], name: str) -> None:
    alone = run_blocks(BLOCKS[name][0], LIMITS)
    assert replace(alone, seconds=0.0) == replace(outcomes[name], seconds=0.0)


def test_many_calls_at_once_have_their_own_outcomes(pool: SandboxPool) -> None:
    with ThreadPoolExecutor(16) as threads:
        printed = [outcome.output for outcome in threads.map(lambda n: pool.run_blocks([f"{n} * 3"]), range(48))]
    assert printed == [f"{3 * n}\n" for n in range(48)]
    server = psutil.Process(psutil.Process().children()[0].pid)
    assert not server.children(recursive=True)


def test_a_killed_server_is_started_again(pool: SandboxPool) -> None:
    pool.run_blocks(["1"])
    assert pool._server is not None
    first = pool._server.popen
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert pool.run_blocks(["1 + 1"]).output == "2\n"
    assert pool._server.popen.pid != first.pid


def test_where_nothing_isolates_there_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    run = sandbox.run_program
    without = replace(LIMITS, namespaces=False)
    monkeypatch.setattr(pool_module, "run_program", lambda program, names, limits: run(program, names, without))
    with pytest.raises(SandboxError, match="cannot be isolated on this machine: not in force: processes, network, "):
        SandboxPool(LIMITS)


@pytest.mark.slow
def test_when_the_parent_is_killed_all_of_it_ends(pool: SandboxPool) -> None:
    code = (
        "from trl_ext.sandbox.limits import Limits\nfrom trl_ext.sandbox.pool import SandboxPool\n"
        "SandboxPool(Limits()).run_blocks(['while True: pass'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    below: list[psutil.Process] = []
    until = time.monotonic() + 60
    while len(below) < 3 and time.monotonic() < until:  # the server, a supervisor and the program
        time.sleep(0.05)
        below = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert len(below) == 3
    assert psutil.wait_procs(below, timeout=20)[1] == []
