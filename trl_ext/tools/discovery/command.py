"""The command line of every problem's `discover.py`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from filelock import FileLock, Timeout

from trl_ext.endpoint.budget import Budget
from trl_ext.endpoint.client import Client, Endpoint, EndpointError
from trl_ext.io import digest_of_files
from trl_ext.registry import parse_options
from trl_ext.sandbox import run_program
from trl_ext.sandbox.isolation import set_nondumpable
from trl_ext.sandbox.limits import ISOLATION, SandboxError, describe_isolation
from trl_ext.tools.discovery.archive import Attempt
from trl_ext.tools.discovery.arguments import discover_parser
from trl_ext.tools.discovery.log import Entry, Log, LogError, attempts_of, read_log
from trl_ext.tools.discovery.loop import Loop, SearchConfig
from trl_ext.tools.discovery.problem import Problem, shown_score
from trl_ext.tools.discovery.replay import MODEL, replaying
from trl_ext.tools.discovery.report import HEADER, row, status, write_report
from trl_ext.tools.discovery.strategies import STRATEGIES

LOG = "conversation_log.json"


def discover(problems: Mapping[str, Callable[[], Problem]], description: str | None, folder: str) -> None:
    """Parse the command line and run; the last line of a recipe.

    Args:
        problems: the choices of `--task`; the first is the default.
        folder: the default `--output_dir`.
    """
    set_nondumpable()
    arguments = discover_parser(problems, description, folder).parse_args()
    try:
        with replaying(arguments.replay) if arguments.replay else contextlib.nullcontext(arguments.base_url) as address:
            arguments.base_url, arguments.model = address, MODEL if arguments.replay else arguments.model
            sys.exit(run(problems[arguments.task](), arguments))
    except (ValueError, OSError, EndpointError, SandboxError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # before or after the loop, which has its own handlers
        sys.exit(130)


def run(problem: Problem, arguments: argparse.Namespace) -> int:
    """Run with these arguments; returns the exit status: 0, or 130 when interrupted.

    Raises:
        ValueError: the arguments do not fit together, or the log does not fit them.
        EndpointError: the endpoint answers nothing.
    """
    options = parse_options("strategy_options", arguments.strategy_options) or {}
    propose = STRATEGIES.build(arguments.strategy, **options)
    if arguments.show_prompt:
        print(problem.hybrid_task if arguments.strategy == "hybrid" else problem.task)
        return 0
    if min(arguments.concurrency, arguments.judges, arguments.tries, arguments.max_tokens) < 1:
        raise ValueError("--concurrency, --judges, --tries and --max_tokens must be at least 1")
    _check_sandbox(arguments.require_isolation)
    folder = Path(arguments.output_dir)
    if arguments.resume and not (folder / LOG).exists():
        raise ValueError(f"--resume: there is no {LOG} in {folder}")
    config = SearchConfig(
        problem, propose, folder, arguments.seed, arguments.concurrency, arguments.judges, arguments.finish_seconds
    )
    propose(problem, [], Random(0))  # raises here if an option is out of range
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "_in_use", timeout=0):  # before the log is read, because it will be rewritten
            if (folder / LOG).exists() and not arguments.resume:
                raise ValueError(
                    f"{folder} already has a run: --resume continues it, --output_dir names another folder"
                )
            entries = read_log(folder / LOG) if arguments.resume else []
            client = _client(arguments, _budget(arguments, entries))
            return _run(config, client, _about(config, client, arguments, options), entries)
    except Timeout:
        raise ValueError(f"another process is using {folder}; name another --output_dir") from None


def _check_sandbox(is_required: bool) -> None:
    """Try the sandbox before any call is paid for, and print what is in force."""
    isolation = run_program("", []).isolation
    print(f"sandbox: {describe_isolation(isolation)}")
    missing = [name for name in ISOLATION if name not in isolation]
    if is_required and missing:
        raise ValueError(f"--require_isolation: not in force here: {', '.join(missing)}")


def _budget(arguments: argparse.Namespace, entries: list[Entry]) -> Budget:
    """The limits, and what earlier processes of the run have used of them."""
    answers = [entry for entry in entries if entry["kind"] == "answer"]
    return Budget(
        arguments.max_calls,
        arguments.max_total_tokens,
        arguments.max_seconds,
        used_calls=max((entry.get("calls", 0) for entry in entries), default=0),
        used_tokens=sum(e["prompt_tokens"] + e["completion_tokens"] for e in answers) + _lost_tokens(entries),
        seconds_before=max((entry.get("second", 0.0) for entry in entries), default=0.0),
    )


def _lost_tokens(entries: list[Entry]) -> int:
    """An upper bound on the tokens of requests that were in flight when a process was killed."""
    asked: dict[int, int] = {}
    tokens = 0
    for entry in entries:
        if entry["kind"] == "asked":
            tokens += asked.get(entry["id"], 0)  # a resumed run asks again under the same number
            asked[entry["id"]] = entry["tokens"]
        elif entry["kind"] in ("answer", "refused"):
            asked.pop(entry["id"], None)
    return tokens + sum(asked.values())


def _client(arguments: argparse.Namespace, budget: Budget) -> Client:
    if not arguments.base_url:
        raise ValueError(
            "no endpoint: give --base_url or set OPENAI_BASE_URL (a local vLLM: http://localhost:8000/v1), or --replay"
        )
    endpoint = Endpoint(
        arguments.base_url,
        arguments.model or "",
        arguments.api_key or os.environ.get(arguments.api_key_env, ""),
        arguments.max_tokens,
        arguments.temperature,
        arguments.request_timeout,
        arguments.tries,
        extra_body=arguments.extra_body,
    )
    client = Client(endpoint, budget)
    if not endpoint.model:
        served = client.models()
        if len(served) != 1:
            raise ValueError(f"which model? {endpoint.shown_url} serves: {', '.join(served) or 'none'}; give --model")
        client.endpoint = replace(endpoint, model=served[0])
    return client


def _about(
    config: SearchConfig, client: Client, arguments: argparse.Namespace, options: Mapping[str, object]
) -> dict[str, object]:
    """What identifies the run, for its log; a resumed run must agree in all but the note."""
    return {
        "problem": config.problem.name,
        "judged_by": _digest_of_verifier(config.problem.verify),
        "strategy": arguments.strategy,
        "options": dict(options),
        "model": client.endpoint.model,
        "seed": config.seed,
        "max_tokens": client.endpoint.max_tokens,
        "temperature": client.endpoint.temperature,
        "note": client.redact(arguments.note),
    }


def _digest_of_verifier(verify: Callable[..., object]) -> str:
    """A hash of the Python files next to what judges programs: another verifier's scores cannot be continued."""
    while isinstance(verify, functools.partial):
        verify = verify.func
    try:
        path = Path(inspect.getfile(inspect.unwrap(verify)))
    except TypeError:  # an object with __call__, which may hold anything
        return ""
    return digest_of_files(path.parent.glob("*.py"))


def _run(config: SearchConfig, client: Client, about: dict[str, object], entries: list[Entry]) -> int:
    _check_same(about, entries, config.folder)
    log = Log(config.folder / LOG, entries, client.redact)
    log.add("resumed" if entries else "run", **about, at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    loop = Loop(config, client, log, attempts_of(entries))
    loop.show = lambda attempt: _show(loop, attempt)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: loop.interrupt()) for number in numbers]
    print(HEADER)
    end = "an error"
    try:
        end = loop.run()
    except EndpointError as error:
        end = f"an error: {error}"
        raise
    finally:
        log.add("ended", reason=end, second=round(client.budget.used_seconds(), 3))
        write_report(config.folder, config.problem, about, loop.attempts, client.budget, end)
        best = f"{shown_score(loop.best[1].score)}, in {config.folder / 'best.py'}" if loop.best else "none"
        print(f"\nended: {end}\nbest valid: {best}\nreport: {config.folder / 'report.md'}")
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if end == "interrupted":
        print("to continue, run the same command with --resume")
        return 130
    return 0


def _check_same(about: Mapping[str, object], entries: Sequence[Entry], folder: Path) -> None:
    """Raise unless the run in the log is the one that the arguments describe."""
    if not entries:
        return
    started = next((entry for entry in entries if entry["kind"] == "run"), None)
    if started is None:
        raise LogError(f"{folder / LOG} does not say which run it belongs to; name another --output_dir")
    for name, value in about.items():
        if name != "note" and started.get(name) != value and (name != "judged_by" or name in started):
            raise LogError(
                f"--resume: the run in {folder} has {name} {started.get(name)!r}, not {value!r}; "
                "give the same, or name another --output_dir"
            )


def _show(loop: Loop, attempt: Attempt | None) -> None:
    """Print a row for the attempt, if there is one, and below it, on a terminal, the totals."""
    is_terminal = sys.stdout.isatty()
    if attempt is not None:
        print(("\r\x1b[K" if is_terminal else "") + row(attempt), flush=True)
    if is_terminal:
        totals = status(loop.best[1] if loop.best else None, loop.client.budget, loop.asking, loop.judging)
        print(f"\r\x1b[K{totals}", end="", flush=True)
