"""Plant faults of one line each, one at a time, and see whether the tests notice.

    python scripts/plant_faults.py                        all faults, two at a time
    python scripts/plant_faults.py --only losses          those whose file, text or tests contain `losses`
    python scripts/plant_faults.py --only '*clamp*' --jobs 4
    python scripts/plant_faults.py --changed origin/main --within 120   those of files that differ from there
    python scripts/plant_faults.py --list                 show them and plant none

The faults are in the faults.toml of each package's tests. Every worker plants them in its own copy of the tree, so
the checkout is never touched. First the named tests run there without a fault; then each fault alone, which must make
its tests fail or hang: they get four times what they took without a fault, and half a minute. They run in forks of a
process that has imported the libraries; what is not caught there is tried once more in a new process. Tests with ranks
or an engine need the whole machine, so their faults come last, one at a time, and each in a new process. A fault that
survives means that a test is missing. The exit status is 0 only if every fault was caught.

A fault is found by its code: where a formatter has broken or joined its line, spaces and trailing commas do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import os
import queue
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import psutil
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests"
COPIED = (
    "trl_ext tests recipes scripts docs accelerate_configs pyproject.toml README.md CHANGELOG.md CONTRIBUTING.md "
    "SECURITY.md CITATION.cff LICENSE"
).split()


Tests = tuple[tuple[str, ...], str]  # arguments of pytest, and the tier
CAUGHT, AT_IMPORT, HUNG = "caught", "caught at import", "caught by time"
SURVIVED, STALE, RED, BROKEN = "SURVIVED", "stale", "red unharmed", "not run"
NOTICED = (CAUGHT, AT_IMPORT, HUNG)
DEFAULT_MARK = "not slow and not distributed and not vllm and not hosts and not gpu"  # moderate ones too
OUTCOMES = {0: SURVIVED, 1: CAUGHT, 2: AT_IMPORT}  # exit status of pytest
MEANING = {
    CAUGHT: "a test failed",
    AT_IMPORT: "the tests could not be collected",
    HUNG: "the tests did not end in the time they had",
    SURVIVED: "no test failed: write one",
    STALE: "the text to find is not exactly once in its file: update faults.toml",
    RED: "the tests fail without any fault",
    BROKEN: "pytest ran no test",
}


@dataclass(frozen=True)
class Fault:
    """Replace `find`, whose code occurs once in `file`, by `replace`; `tests`, of one tier (`mark`), should go red."""

    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.find.strip()!r} -> {self.replace.strip()!r}"

    def planted(self, root: Path) -> str | None:
        """The file's text with the fault in it; None if `find` does not occur exactly once, however it is formatted."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.find) == 1:
            return text.replace(self.find, self.replace)
        places = list(re.finditer(as_code(self.find), text)) if self.find not in text else []
        if len(places) != 1:
            return None
        start, end = places[0].span()
        return text[:start] + self.replace.strip() + text[end:]

    def matches(self, pattern: str) -> bool:
        """Whether `pattern`, a part of the description or a glob over all of it, selects this fault."""
        text = f"{self} [{' '.join(self.tests)}]"
        return pattern in text or fnmatch.fnmatch(text, pattern)


def as_code(text: str) -> str:
    """A regular expression for the same code, however it is broken into lines, with or without trailing commas."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    pattern = ""
    for before, token in zip(["", *tokens], tokens, strict=False):
        gap = r"\s+" if before[-1:].isidentifier() and token[0].isidentifier() else r"\s*"
        pattern += (gap if pattern else "") + (r",?\s*" if token in ")]}" and before != "," else "") + re.escape(token)
    return pattern


def changed_files(since: str) -> set[str]:
    """The files that differ from where this branch has left a commit, those that git does not know included.

    Raises:
        SystemExit: git knows no such commit.
    """

    def said(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: --changed {since}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    return {*said("diff", "--name-only", "--merge-base", since), *said("ls-files", "--others", "--exclude-standard")}


def want_the_machine(mark: str) -> bool:
    """Whether tests of this tier start ranks or an engine; the others share the cores, as in scripts/test.sh."""
    return bool(mark) and "slow" not in mark


def read_faults(path: Path) -> list[Fault]:
    """The `[[fault]]` tables of a TOML file, or of every `faults.toml` in a folder.

    Raises:
        TypeError: an entry lacks a key or has one that is not known.
    """
    files = sorted(path.rglob("faults.toml")) if path.is_dir() else [path]
    entries = [entry for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(to: Path) -> Path:
    """A copy of what the tests need, without caches.

    Raises:
        SystemExit: Python would import another `trl_ext` than the copy.
    """
    ignore = shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=ignore)
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, to / name)
    command = [sys.executable, "-c", "import trl_ext; print(trl_ext.__file__)"]
    imported = subprocess.run(command, cwd=to, env=environment(to), capture_output=True, text=True, check=True).stdout
    if Path(imported.strip()).resolve() != (to / "trl_ext" / "__init__.py").resolve():
        sys.exit(f"error: the copy's tests would import {imported.strip()}, not the copy")
    return to


def environment(root: Path) -> dict[str, str]:
    """The copy's modules, and no bytecode, which a fault of the same length and second would not invalidate."""
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


class Copy:
    """A copy of the tree, and a process with the libraries in whose forks pytest runs there."""

    def __init__(self, root: Path) -> None:
        self.root, self.said = copy_tree(root), root / "said"
        environ = environment(root)
        self.warm = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_pytest"], cwd=root, env=environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run_tests(self, tests: Sequence[str], mark: str, timeout: float, *, fork: bool) -> str:
        """Run pytest until the first failure; the outcome if there is a fault in the copy."""
        arguments = ["-x", "-q", "--nightly", "-p", "no:cacheprovider", *tests, "-m", mark or DEFAULT_MARK]
        if fork and not want_the_machine(mark):
            status = self._in_a_fork(arguments, timeout)
        else:
            status = self._in_a_process(arguments, {} if want_the_machine(mark) else {"OMP_NUM_THREADS": "1"}, timeout)
        return HUNG if status is None else OUTCOMES.get(status, BROKEN)

    def _in_a_fork(self, arguments: list[str], timeout: float) -> int | None:
        assert self.warm.stdin is not None
        assert self.warm.stdout is not None
        print(json.dumps([arguments, str(self.said)]), file=self.warm.stdin, flush=True)
        in_time = bool(select.select([self.warm.stdout], [], [], timeout)[0])
        self._end_processes()
        status = int(self.warm.stdout.readline())
        return status if in_time else None

    def _in_a_process(self, arguments: list[str], environ: dict[str, str], timeout: float) -> int | None:
        with self.said.open("w") as said, subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments], cwd=self.root, env=environment(self.root) | environ,
            start_new_session=True, stdout=said, stderr=said,
        ) as process:  # fmt: skip
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                self._end_processes()

    def _end_processes(self) -> None:
        """End every process that runs the copy's code, but for the warm one: a fault may have let a worker escape."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.warm.pid and str(self.root) in process.environ().get("PYTHONPATH", ""):
                    process.kill()


def try_fault(fault: Fault, copies: queue.Queue[Copy], timeout: float) -> tuple[str, float]:
    """Plant `fault` in a free copy, run its tests, repair the copy. Returns the outcome and the seconds it took."""
    copy, began = copies.get(), time.monotonic()
    try:
        text = fault.planted(copy.root)
        if text is None:
            return STALE, 0.0
        path = copy.root / fault.file
        unharmed = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            outcome = copy.run_tests(fault.tests, fault.mark, timeout, fork=True)
            if outcome not in NOTICED:
                outcome = copy.run_tests(fault.tests, fault.mark, timeout, fork=False)
            return outcome, time.monotonic() - began
        finally:
            path.write_text(unharmed, encoding="utf-8")
    finally:
        copies.put(copy)


def try_in_time(fault: Fault, copies: queue.Queue[Copy], timeout: float, deadline: float) -> tuple[str, float] | None:
    """`try_fault`, or None if the deadline is over."""
    return try_fault(fault, copies, timeout) if time.monotonic() <= deadline else None


def unharmed(faults: Sequence[Fault], copies: queue.Queue[Copy], timeout: float) -> dict[Tests, float]:
    """Seconds of the tests that pass without a fault."""

    def seconds(case: Tests) -> float | None:
        copy, began = copies.get(), time.monotonic()
        try:
            if copy.run_tests(*case, timeout, fork=True) == SURVIVED:
                return time.monotonic() - began
            words = copy.said.read_text(errors="replace")[-3000:]
            tqdm.write(f"{' '.join(case[0])} without a fault:\n{words}", file=sys.stderr)
            return None
        finally:
            copies.put(copy)

    cases = sorted({(fault.tests, fault.mark) for fault in faults})
    with ThreadPoolExecutor(copies.qsize()) as pool:
        took = list(tqdm(pool.map(seconds, cases), total=len(cases), desc="unharmed", unit="run"))
    return {case: seconds for case, seconds in zip(cases, took, strict=True) if seconds is not None}


def plant(
    faults: Sequence[Fault], jobs: int, timeout: float, within: float = math.inf
) -> dict[Fault, tuple[str, float]]:
    """Outcome and seconds of every fault, `jobs` at a time, but for those that are not begun in `within` seconds."""
    if not faults:
        return {}
    deadline = time.monotonic() + within
    with tempfile.TemporaryDirectory(prefix="plant_faults_") as folder, contextlib.ExitStack() as at_end:
        copies: queue.Queue[Copy] = queue.Queue()
        for i in range(jobs):
            copy = Copy(Path(folder) / str(i))
            at_end.callback(copy.warm.kill)
            copies.put(copy)
        green = unharmed(faults, copies, timeout)
        results = {fault: (RED, 0.0) for fault in faults if (fault.tests, fault.mark) not in green}
        rest = [fault for fault in faults if fault not in results]
        with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(rest), desc="faults", unit="fault") as bar:
            running = {
                pool.submit(try_in_time, fault, copies, 30 + 4 * green[fault.tests, fault.mark], deadline): fault
                for fault in rest
            }
            try:
                for done in as_completed(running):
                    fault, result = running[done], done.result()
                    if result is None:
                        continue
                    outcome, results[fault] = result[0], result
                    counts = Counter(outcome for outcome, _ in results.values())
                    bar.set_postfix_str(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
                    bar.update()
                    if outcome not in NOTICED:
                        bar.write(f"{outcome}: {fault}", file=sys.stderr)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
    return {fault: results[fault] for fault in faults if fault in results}


def print_table(results: dict[Fault, tuple[str, float]]) -> None:
    """One line per fault, then the counts."""
    for fault, (outcome, seconds) in results.items():
        print(f"{outcome:<16} {seconds:5.1f} s  {fault}")
    print()
    for outcome, n in Counter(outcome for outcome, _ in results.values()).most_common():
        print(f"{n:4d} {outcome:<16} {MEANING[outcome]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog="examples:\n" + more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults tried at a time (default: 2)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a part of a fault's line or tests, or a glob")
    parser.add_argument(
        "--tier", choices=("fast", "beyond"), help="only faults whose tests are of the fast tier, or not"
    )
    parser.add_argument("--changed", metavar="COMMIT", help="only faults of files that differ from this commit's")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="S", help="begin no fault after so many seconds"
    )
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds unharmed (default: 300)")
    parser.add_argument("--faults", type=Path, default=FAULTS, metavar="FILE", help="another list")
    args = parser.parse_args(arguments)
    tiers = (False, True) if args.tier is None else (args.tier == "beyond",)
    faults = [fault for fault in read_faults(args.faults) if fault.matches(args.only) and bool(fault.mark) in tiers]
    if args.changed is not None:
        changed = changed_files(args.changed)
        files = [{fault.file, *(test.partition("::")[0] for test in fault.tests)} for fault in faults]
        faults = [fault for fault, of in zip(faults, files, strict=True) if of & changed]
        if not faults:
            print(f"no fault is of a file that differs from {args.changed}")
            return 0
    if not faults or args.jobs < 1:
        parser.error(f"no fault matches {args.only!r}" if not faults else f"--jobs must be at least 1, got {args.jobs}")
    if args.list:
        print(*(f"{fault}  [{' '.join(fault.tests)}]" for fault in faults), sep="\n")
        return 0
    alone = [fault for fault in faults if want_the_machine(fault.mark)]
    sharing = [fault for fault in faults if fault not in alone]
    began = time.monotonic()
    results = plant(sharing, args.jobs, args.timeout, args.within)
    results |= plant(alone, 1, args.timeout, args.within - (time.monotonic() - began))
    print_table(results)
    if left := len(faults) - len(results):
        print(f"{left:4d} not tried        --within {args.within:g} seconds were over")
    return int(any(outcome not in NOTICED for outcome, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
