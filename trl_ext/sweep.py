"""Many runs of recipes: those that are not done yet, a few at a time, each with its own log."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trl_ext.arguments import InputError
from trl_ext.files import write_text
from trl_ext.pipeline import folder_of


def run_all(commands: Mapping[str, Sequence[str]], folder: Path, jobs: int = 1) -> dict[str, dict[str, Any]]:
    """Run a Python command for each name, in `folder/name`, unless it is done; returns the runs' summaries by name.

    Interrupted, it goes on when it is called again: what is done is not run again, what was cut off goes on from its
    last checkpoint.

    Args:
        commands: script and arguments; `--output_dir` is added, and `--resume auto` for a run that has begun.
        jobs: at a time; with several, each computes with its share of the machine's threads.

    Raises:
        InputError: a run failed, or was done before with other arguments; names its log or the arguments. The runs that
            had not begun are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_other_commands(commands, folder)
    todo = [name for name in commands if not _is_done(folder / name)]
    environment = dict(os.environ)
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))

    def run(name: str) -> int:
        output = folder / name
        script = Path(commands[name][0]).name
        more = ["--resume", "auto"] if output.exists() and script != "pipeline.py" else []
        command = [sys.executable, *commands[name], "--output_dir", str(output), *more]
        with (folder / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command[1:])}\n")
            log.flush()
            return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode

    with (
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(commands), initial=len(commands) - len(todo), desc="runs") as bar,
    ):
        running = {pool.submit(run, name): name for name in todo}
        try:
            for future in concurrent.futures.as_completed(running):
                if future.result():
                    raise InputError(f"a run failed: see the end of {folder / running[future]}.log")
                bar.set_postfix_str(running[future])
                bar.update()
        except BaseException:  # Ctrl-C as well: what has not begun is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: _summary(folder / name) for name in commands}


def _refuse_other_commands(commands: Mapping[str, Sequence[str]], folder: Path) -> None:
    """What is done must have been done with the same arguments."""
    path = folder / "commands.json"
    known: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = {name: [Path(script).name, *arguments] for name, (script, *arguments) in commands.items()}
    other = [name for name in now if name in known and known[name] != now[name] and _is_done(folder / name)]
    if other:
        raise InputError(
            f"{folder / other[0]} was run with other arguments: {shlex.join(known[other[0]])}. Choose another "
            "--output_dir, or remove it"
        )
    write_text(path, json.dumps(known | now, indent=1) + "\n")


def _is_done(output: Path) -> bool:
    return any((place / "summary.json").exists() for place in (output, *output.parent.glob(f"{output.name}-*")))


def _summary(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of(output) / "summary.json").read_text(encoding="utf-8"))
    return found
