"""Many runs of recipes: those that are not done yet, a few at a time, each with its own log."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.hosts.shutdown_timeout import patient_environment
from trl_ext.io import read_json, write_json
from trl_ext.redaction import redact_command
from trl_ext.runs.fingerprint import fingerprints_of_named_files, texts_in
from trl_ext.runs.layout import finished
from trl_ext.tools.experiments.process import run_process
from trl_ext.tools.experiments.progress import ProgressDisplay

_REFRESH = 2.0  # seconds
_RESUME_BY_THEMSELVES = ("pipeline.py", "leaderboard.py")


def run_all(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    jobs: int = 1,
    keep_going: bool = False,
    on_end: Callable[[Mapping[str, dict[str, Any]]], None] = lambda summaries: None,
) -> dict[str, dict[str, Any]]:
    """Run a Python command for each name, in `folder/name`, unless it is done; returns the runs' summaries by name.

    Interrupted, it resumes when it is called again: what is done is not run again, what was cut off resumes from its
    last checkpoint.

    Args:
        commands: script and arguments; `--output_dir` is added, and `--resume auto` for a run that has begun.
        jobs: at a time; with several, each computes with its share of the machine's threads. A run has one of its GPUs.
        keep_going: a run that fails does not end the others; its summary says what its log ends with, as `failed`.
        on_end: called with the summaries that there are by now: those from before, and again as each run ends.

    Raises:
        InputError: a run failed, or was done before with other arguments; names its log or the arguments. The runs that
            had not begun are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_changes(commands, folder)
    todo = [name for name in commands if not finished(folder / name)]
    slots = list(range(jobs))  # one for each thread
    summaries = {name: _summary(folder / name) for name in commands if name not in todo}
    on_end(summaries)
    with (
        contextlib.closing(ProgressDisplay(folder, len(commands), len(commands) - len(todo), jobs)) as display,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        running = {pool.submit(_run, commands[name], folder, name, jobs, slots, display): name for name in todo}
        try:
            for name, status in _as_they_end(running, display):
                if status and not keep_going:
                    raise InputError(f"a run failed: see the end of {folder / name}.log")
                summaries[name] = {"failed": _last_line(folder / f"{name}.log")} if status else _summary(folder / name)
                display.ended(name, summaries[name].get("failed"))
                on_end(summaries)
        except BaseException:  # Ctrl-C as well: do not start the runs that wait
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: summaries[name] for name in commands}


def _as_they_end(
    running: dict[concurrent.futures.Future[int], str], display: ProgressDisplay
) -> Iterator[tuple[str, int]]:
    """Names and exit statuses of runs in the order in which they end; the display is refreshed meanwhile."""
    while running:
        done, _ = concurrent.futures.wait(running, _REFRESH, concurrent.futures.FIRST_COMPLETED)
        display.refresh()
        for future in done:
            yield running.pop(future), future.result()


def _run(command: Sequence[str], folder: Path, name: str, jobs: int, slots: list[int], display: ProgressDisplay) -> int:
    """Run a command in the next free slot and return its exit status."""
    output, slot = folder / name, slots.pop(0)
    more = ["--resume", "auto"] if output.exists() and Path(command[0]).name not in _RESUME_BY_THEMSELVES else []
    whole = [sys.executable, *command, "--output_dir", str(output), *more]
    try:
        with display.running(name), (folder / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(redact_command(whole[1:]))}\n")
            log.flush()
            return run_process(whole, environment=_environment(command[0], slot, jobs), log=log)
    finally:
        slots.append(slot)


def _environment(script: str, slot: int, jobs: int) -> dict[str, str]:
    """The share of the machine that a run has; pipelines launch their stages on as many GPUs as they are told to."""
    shared = patient_environment()
    if jobs > 1:
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    if "CUDA_VISIBLE_DEVICES" not in os.environ and Path(script).name not in _RESUME_BY_THEMSELVES:
        import torch  # slow to import, and `--help` does not need it

        gpus = torch.cuda.device_count()
        if gpus > 1:
            shared["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)
    return shared


def _last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-1].strip()[:300]


def _refuse_changes(commands: Mapping[str, Sequence[str]], folder: Path) -> None:
    """What is done must have been done with the same arguments and files: data, a model, own functions, YAML files."""
    noted = {name: folder / f"{name}.json" for name in ("commands", "inputs")}
    known = {name: read_json(path) if path.exists() else {} for name, path in noted.items()}
    words = {name: redact_command([Path(script).name, *arguments]) for name, (script, *arguments) in commands.items()}
    named = {name: [str(Path(script).with_suffix(".yaml")), *rest] for name, (script, *rest) in commands.items()}
    hashes = fingerprints_of_named_files(list(named.values()))
    inputs = {name: {text: hashes[text] for text in texts_in(texts) if text in hashes} for name, texts in named.items()}
    for name in filter(lambda name: finished(folder / name), commands):
        if (before := known["commands"].get(name, words[name])) != words[name]:
            raise InputError(
                f"{folder / name} was run with other arguments: {shlex.join(before)}. Choose another --output_dir, or "
                "remove it"
            )
        earlier, now = known["inputs"].get(name, inputs[name]), inputs[name]
        if changed := [text for text in {**earlier, **now} if earlier.get(text) != now.get(text)]:
            raise InputError(
                f"{folder / name} is finished, and {', '.join(changed)} changed since it began: it would be taken for "
                "a run of what is there now. Choose another --output_dir, or remove it"
            )
    write_json(noted["commands"], known["commands"] | words)
    write_json(noted["inputs"], known["inputs"] | inputs)


def _summary(output: Path) -> dict[str, Any]:
    run = finished(output)
    assert run is not None  # it has ended well, or was done before
    return dict(run.summary())
