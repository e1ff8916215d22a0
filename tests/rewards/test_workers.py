"""A job that hangs, crashes or eats memory costs itself only, and no worker outlives its parent."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trl_ext.rewards.workers.pool import Failure, Pool, PoolError, WorkerLimits, _wait

ACT = "tests.support.hostile:act"
SHORT = WorkerLimits(seconds=0.5, memory_mb=64)
GOOD = ["echo", 1]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(ACT, SHORT) as pool:
        yield pool


def kinds(outcomes: list[Any]) -> list[Any]:
    return [outcome.kind if isinstance(outcome, Failure) else outcome for outcome in outcomes]


def children(pid: int | None = None) -> set[psutil.Process]:
    return set(psutil.Process(pid).children())


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> float:
    """How long it took until `holds()`."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + seconds
        time.sleep(0.005)
    return time.monotonic() - start


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Outcomes


def test_results_come_in_the_order_of_the_jobs(pool: Pool) -> None:
    assert pool.map([["echo", i] for i in range(1000)]) == list(range(1000))
    assert pool.map([]) == []
    assert pool.map([["sleep", 0.1], GOOD]) == [0.1, 1]


def test_started_workers_are_those_that_get_the_jobs() -> None:
    with Pool(ACT, WorkerLimits(workers=2)) as pool:
        pool.start()
        started = pool.pids()
        assert len(started) == 2
        assert pool.map([GOOD] * 3) == [1, 1, 1]
        assert pool.pids() == started


TEXTS = ["", "\n", '["result", 1]\n', "\0", "\ud800", "\r\n\x85\u2028", "é😀", "\\", '"', "x" * 300_000]


@pytest.mark.parametrize("text", TEXTS, ids=[repr(text[:20]) for text in TEXTS])
def test_any_text_comes_back_as_it_was(pool: Pool, text: str) -> None:
    assert pool.map([["echo", text], GOOD]) == [text, 1]


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("job", "kind", "detail"),
    [
        (["hang"], "timeout", "no result in 0.5 s"),
        (["hang_ignoring_signals"], "timeout", "no result in 0.5 s"),
        (["hang_in_c"], "timeout", "no result in 0.5 s"),
        (["eat_memory"], "memory", "MemoryError"),
        (["eat_memory_slowly"], "memory", "MemoryError"),
        (["leave"], "crash", "exited with status 3"),
        (["segfault"], "crash", f"was killed by signal 11 ({signal.strsignal(11)})"),
        (["call_sys_exit"], "error", "SystemExit(4)"),
        (["fail", "no \ud800"], "error", "ValueError('no \\ud800')"),
        (["fail", "x" * 10_000], "error", "ValueError('" + "x" * 488),
        (["fail_unprintably"], "error", "ValueError"),
        (["no_such_function"], "error", "KeyError('no_such_function')"),
        (["result_that_is_no_json"], "error", "TypeError('Object of type object is not JSON serializable')"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_failure_is_named_and_its_neighbors_have_results(pool: Pool, job: list[str], kind: str, detail: str) -> None:
    pool.map([GOOD, GOOD])  # both workers are there, whichever test is the first
    before, restarted = children(), pool.restarted
    jobs = [["echo", i] for i in range(20)]
    outcomes = pool.map([*jobs[:10], job, *jobs[10:]])
    assert outcomes.pop(10) == Failure(kind, detail)  # type: ignore[arg-type]
    assert outcomes == list(range(20))
    lost = kind != "error"
    assert pool.restarted == restarted + lost
    assert (pool.map([GOOD, GOOD]), len(children() - before)) == ([1, 1], lost)


def test_what_a_function_prints_disturbs_nothing(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.map([["shout"], GOOD, ["shout"]]) == ["said", 1, "said"]
    assert capfd.readouterr() == ("", "")


def test_a_function_that_reads_input_gets_none(pool: Pool) -> None:
    assert pool.map([["read_input"], GOOD, GOOD]) == ["", 1, 1]


def test_a_function_can_write_no_file(pool: Pool, tmp_path: Path) -> None:
    assert kinds(pool.map([["write_file", str(tmp_path / "file")], GOOD])) == ["error", 1]
    assert (tmp_path / "file").stat().st_size == 0


@pytest.mark.moderate
def test_results_too_deep_for_the_parent_are_errors(pool: Pool) -> None:
    depths = [["nested", depth] for depth in range(700, 1100)]
    outcomes = kinds(pool.map([job for depth in depths for job in (depth, GOOD)]))[::2]
    assert all(outcome == "error" or isinstance(outcome, list) for outcome in outcomes)
    assert kinds(pool.map([["nested", 100_000], GOOD])) == ["error", 1]


def test_big_jobs_and_big_results_do_not_block_each_other(pool: Pool) -> None:
    texts = [chr(97 + i) * 1_000_000 for i in range(20)]
    assert pool.map([["echo", text] for text in texts]) == texts


@pytest.mark.slow
def test_ten_thousand_jobs_some_of_which_hang_or_crash() -> None:
    jobs: list[list[Any]] = [["echo", i] for i in range(10_000)]
    bad = {3000: "hang", 3001: "hang", 3002: "leave", 5000: "eat_memory", 7000: "hang", 9999: "segfault"}
    for index, name in bad.items():
        jobs[index] = [name]
    with Pool(ACT, SHORT) as pool:
        outcomes = pool.map(jobs)
        assert pool.restarted == 6
    assert {index: kind for index, kind in enumerate(kinds(outcomes)) if kind != index} == {
        3000: "timeout", 3001: "timeout", 3002: "crash", 5000: "memory", 7000: "timeout", 9999: "crash",
    }  # fmt: skip


@pytest.mark.moderate
def test_the_limit_is_per_job(pool: Pool) -> None:
    assert pool.map([["sleep", 0.2]] * 8) == [0.2] * 8
    restarted = pool.restarted
    time.sleep(0.6)  # nor does it run between maps,
    assert pool.map([GOOD]) == [1]  # in which a worker may have nothing to do
    assert pool.map([GOOD] * 8) == [1] * 8
    assert pool.restarted == restarted


@pytest.mark.moderate
def test_slow_jobs_are_balanced_between_the_workers(pool: Pool) -> None:
    pool.map([GOOD] * 2)
    start = time.monotonic()
    pool.map([["sleep", 0.2]] * 8)
    assert time.monotonic() - start < 1.4


def test_memory_is_counted_beyond_the_imports() -> None:
    with Pool(ACT, WorkerLimits(memory_mb=8, workers=1)) as pool:
        assert kinds(pool.map([["big", 2**20], ["big", 2**24]])) == ["x" * 2**20, "memory"]


# A worker's surroundings


def test_worker_gets_no_secret_and_no_gpu_and_no_torch_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Pool(ACT, WorkerLimits(workers=1)) as pool:
        environment, modules = pool.map([["environment"], ["loaded"]])
    assert "secret" not in environment.values()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("", "1")
    assert not {"torch", "trl", "transformers", "multiprocessing"} & set(modules)


def test_a_function_is_found_where_the_parent_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_verifier.py").write_text("def double(x): return 2 * x")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Pool("my_verifier:double") as pool:
        assert pool.map([[4]]) == [8]


def test_workers_start_at_the_first_map_and_at_most_one_per_job() -> None:
    before = len(children())
    with Pool(ACT) as pool:
        assert len(children()) == before
        pool.map([GOOD])
        assert len(children()) == before + 1
        pool.map([GOOD] * 3)
        assert len(children()) == before + 2
    assert len(children()) == before


def test_a_worker_that_dies_between_maps_costs_no_job(pool: Pool) -> None:
    pool.map([GOOD, GOOD])
    for process in pool._processes:
        worker = psutil.Process(process.popen.pid)
        worker.kill()
        wait_until(functools.partial(is_gone, worker))
    assert pool.map([GOOD] * 10) == [1] * 10


def test_worker_killed_while_jobs_are_sent_loses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(ACT, SHORT) as pool:
        pool.map([GOOD])
        idle = pool._processes[0]
        wait_until(lambda: idle.receive() == [] and not idle.sent)
        with monkeypatch.context() as patch:
            patch.setattr(idle.popen, "poll", lambda: None)  # the signal comes just after the look at it
            os.kill(idle.popen.pid, signal.SIGKILL)
            wait_until(lambda: is_gone(psutil.Process(idle.popen.pid)))
            assert pool.map([GOOD]) == [1]


@pytest.mark.moderate
def test_a_closed_pool_starts_again() -> None:
    before = children()
    pool = Pool(ACT)
    assert pool.map([GOOD]) == [1]
    pool.close()
    assert children() == before
    assert pool.map([GOOD]) == [1]
    del pool
    assert children() == before


# Loud errors


@pytest.mark.moderate
def test_a_worker_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PoolError, match=r"(?s)no_such.module:f did not start: it exited with status 1.*No module"):
        Pool("no_such.module:f").map([[1]])
    with pytest.raises(PoolError, match="has no function 'no_such_function'"):
        Pool("tests.support.hostile:no_such_function").map([[1]])
    (tmp_path / "slow_module.py").write_text("import sys, time; sys.stderr.write('x' * 10**6 + 'still'); time.sleep(9)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("trl_ext.rewards.workers.process._START_SECONDS", 0.5)
    with pytest.raises(PoolError, match=r"(?s)it took too long\. It wrote:\nx+still$"):
        Pool("slow_module:f").map([[1]])


@pytest.mark.moderate
def test_starting_does_not_count_as_the_first_jobs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_start.py").write_text("import time; time.sleep(0.6); from tests.support.hostile import act")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Pool("slow_start:act", SHORT) as pool:
        assert kinds(pool.map([GOOD, ["hang"], GOOD])) == [1, "timeout", 1]
        assert pool.restarted == 1


@pytest.mark.slow
def test_a_map_whose_jobs_all_fail_is_an_error() -> None:
    with Pool(ACT, WorkerLimits(seconds=0.05)) as pool:
        with pytest.raises(
            PoolError, match=r"all 8 jobs of a map got no result from tests.support.hostile:act \(e.g. timeout"
        ):
            pool.map([["hang"]] * 8)
        assert kinds(pool.map([["hang"]] * 7)) == ["timeout"] * 7
        assert kinds(pool.map([["hang"]] * 7 + [GOOD])) == ["timeout"] * 7 + [1]


@pytest.mark.slow
def test_many_failures_in_a_row_over_several_maps_are_an_error() -> None:
    with Pool(ACT) as pool:
        for _ in range(4):
            assert kinds(pool.map([["leave"]] * 7)) == ["crash"] * 7
        pool.map([GOOD])
        for _ in range(4):
            pool.map([["leave"]] * 7)
        with pytest.raises(PoolError, match=r'32 jobs in a row .* exited with status 3.*\["leave"\]'):
            pool.map([["leave"]] * 7)
        assert kinds(pool.map([["leave"]] * 7)) == ["crash"] * 7  # counted from the start again


def test_a_function_that_always_raises_is_an_error_too(pool: Pool) -> None:
    with pytest.raises(PoolError, match=r"all 8 jobs of a map .*ValueError\('no'\)"):
        pool.map([["fail", "no"]] * 8)


def test_non_json_arguments_are_refused_and_limits_are_checked(pool: Pool) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        pool.map([GOOD, ["echo", object()]])
    assert pool.map([GOOD]) == [1]
    with pytest.raises(ValueError, match="every limit must be positive"):
        WorkerLimits(workers=0)


# Threads, forks, interrupts and the end of the parent


@pytest.mark.moderate
def test_threads_take_turns_and_workers_outlive_their_threads() -> None:
    found: dict[int, list[Any]] = {}
    with Pool(ACT, SHORT) as pool:

        def work(thread: int) -> None:
            found[thread] = pool.map([["echo", [thread, i]] for i in range(2000)])

        threads = [threading.Thread(target=work, args=[thread]) for thread in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {thread: [[thread, i] for i in range(2000)] for thread in range(3)}
        assert pool.map([["sleep", 0.1]] * 2) == [0.1] * 2
        assert pool.restarted == 0


SCRIPT = """
import os, psutil, signal, sys, threading, time
from trl_ext.rewards.workers.pool import *
pool = Pool("tests.support.hostile:act", WorkerLimits(seconds=60, workers=1))
good = [["pid"]] * 100
first = set(pool.map(good))
"""


def script(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A parent without a `__main__` guard, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "always::ResourceWarning", "-c", SCRIPT + code, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


def worker_once_it_runs(parent: subprocess.Popen[str], marker: Path) -> psutil.Process:
    """The worker of a script in whose job `marker` is made."""
    wait_until(marker.exists, seconds=60)  # a process has to start, on a machine that may have other work
    (worker,) = [child for child in children(parent.pid) if "trl_ext.rewards.workers.worker" in child.cmdline()]
    return worker


@pytest.mark.moderate
def test_no_worker_outlives_a_parent_that_ends() -> None:
    code = """
other = Pool("tests.support.hostile:act", WorkerLimits(workers=3))  # some of its workers are still starting
other.map(good)
print(*(child.pid for child in psutil.Process().children()), flush=True)
sys.exit(7)
"""
    parent = script(code)
    out, err = parent.communicate(timeout=30)
    assert (parent.returncode, err, len(out.split())) == (7, "", 4)
    assert not any(psutil.pid_exists(int(pid)) for pid in out.split())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends with its job")
@pytest.mark.parametrize("name", ["hang", "hang_ignoring_signals"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path, name: str) -> None:
    fork = "if not os.fork(): time.sleep(20); os._exit(0)\n"  # a child that lives on must not hold the pipe
    parent = script(f"{fork}pool.map([['{name}', sys.argv[1]]])", tmp_path / "hangs")
    worker = worker_once_it_runs(parent, tmp_path / "hangs")
    (forked,) = children(parent.pid) - {worker}
    parent.kill()
    assert wait_until(lambda: is_gone(worker)) < 1
    forked.kill()
    parent.communicate()


@pytest.mark.moderate
def test_ctrl_c_raises_and_leaves_a_working_pool_and_no_worker(tmp_path: Path) -> None:
    code = """
try:
    pool.map([['hang', sys.argv[1]]])
except KeyboardInterrupt:
    print(len(psutil.Process().children()), len(set(pool.map(good)) & first), len(pool.map(good)))
    pool.map([['hang', sys.argv[1] + '2']])
"""
    parent = script(code, tmp_path / "hangs")
    for marker in ("hangs", "hangs2"):
        worker = worker_once_it_runs(parent, tmp_path / marker)
        os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=10)
    assert out == "0 0 100\n"
    assert err.endswith("KeyboardInterrupt\n")
    assert "worker.py" not in err
    assert is_gone(worker)


@pytest.mark.moderate
def test_pool_wakes_every_second_for_a_signal_before_its_wait() -> None:
    with Pool(ACT, WorkerLimits(seconds=60)) as idle:
        assert idle.map([GOOD]) == [1]
        began = time.monotonic()
        _wait(idle._processes)  # nothing comes, and nothing is due
        assert 0.5 < time.monotonic() - began < 20


@pytest.mark.moderate
def test_workers_left_by_an_uncleaned_map_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Pool(ACT) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("trl_ext.rewards.workers.pool._wait", interrupted)
            patch.setattr("trl_ext.rewards.workers.pool._kill_all", interrupted)  # the second Ctrl-C
            pool._start(2)
            wait_until(lambda: all(process.receive() == [] and process.is_ready for process in pool._processes))
            with pytest.raises(KeyboardInterrupt):
                pool.map([["echo", "stale"]] * 4)
        assert pool.map([["echo", "fresh"]]) == ["fresh"]


@pytest.mark.moderate
def test_signal_handled_by_the_parent_does_not_reach_the_workers(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGINT, lambda *_: print("handled"))
print(pool.map([["sleep", 0.3, sys.argv[1]]]))
"""
    parent = script(code, tmp_path / "sleeps")
    worker_once_it_runs(parent, tmp_path / "sleeps")
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.communicate(timeout=10)[0] == "handled\n[0.3]\n"


@pytest.mark.moderate
def test_forked_child_has_its_own_workers_and_spares_the_parent() -> None:
    code = """
if not os.fork():
    sys.exit(len(pool.map(good)) - 100)
thread = threading.Thread(target=pool.map, args=[[["sleep", 0.5]]])  # holds the lock
thread.start()
time.sleep(0.1)
child = os.fork()
mine = set(pool.map(good))
print(len(mine & first), flush=True)
if not child:
    sys.exit(0)
thread.join()
print(os.waitpid(child, 0)[1], len(set(pool.map(good)) - first), pool.restarted)
"""
    out, err = script(code).communicate(timeout=30)
    assert "ResourceWarning" not in err
    assert sorted(out.splitlines()) == ["0", "0 0 0", "1"]
