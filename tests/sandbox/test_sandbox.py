"""Programs that misbehave in every way: each gets a clear outcome, and no process or file remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from trl_ext.sandbox import run_program
from trl_ext.sandbox.limits import (
    Limits,
    ProgramFailure,
    ProgramOutcome,
    ProgramResult,
    describe_isolation,
)

SHORT = Limits(seconds=1.0, memory_mb=256)
LONG = replace(SHORT, seconds=60.0)  # what ends by itself may take its time on a busy machine
ENDLESS = {"infinite loop", "deaf to signals", "fork bomb"}
ROOT = Path(__file__).parents[2]
NAP = "import time; time.sleep(98.7)"
AWAY = f"import sys\n    os.setsid()\n    if os.fork() == 0:\n        os.execve(sys.executable, [sys.executable, '-c', '{NAP}'], {{}})\n    os._exit(0)"

# name: (program, kind of failure or None, the global `x` or a part of the detail)
PROGRAMS: dict[str, tuple[str | bytes, str | None, Any]] = {
    "plain": ("x = [[1, -2], [10**50, 0]]", None, [[1, -2], [10**50, 0]]),
    "types stay apart": ("x = [1, 1.0, True, None, 'é']", None, [1, 1.0, True, None, "é"]),
    "numpy": ("import numpy as np\nx = [np.arange(2), np.int64(7), np.float32(1)]", None, [[0, 1], 7, 1.0]),
    "main guard": ("if __name__ == '__main__': x = 1", None, 1),
    "exit at the end": ("x = 1\nexit()", None, 1),
    "no global": ("y = 1", None, "absent"),
    "patched builtins": ("import builtins\nbuiltins.len = builtins.isinstance = None\nx = 5", "crash", "status 70"),
    "patched json": ("import json\njson.dumps = lambda *a, **k: '[1'\nx = 5", "crash", "no result"),
    "exit with a status": ("exit(3)", "error", "SystemExit: 3"),
    "os._exit": ("import os\nx = 1\nos._exit(0)", "crash", "ended with status 0 before its globals"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "crash", "signal 11"),
    "exception": ("def f():\n    return 1 / 0\nf()", "error", 'line 2, in f\n    return 1 / 0'),
    "syntax error": ("x = (", "error", "SyntaxError: '(' was never closed"),
    "not utf-8": (b"x = '\xff'", "error", "SyntaxError"),
    "null byte": ("x = '\0'", "error", "null bytes"),
    "unprintable exception": ("class E(Exception):\n def __str__(s): raise s\nraise E", "error", "E: <exception str() failed>"),
    "recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "memory": ("x = bytearray(2**34)", "memory", "more than 256 MiB"),
    "memory in small steps": ("x = []\nwhile True: x.append(bytearray(2**22))", "memory", "more than 256 MiB"),
    "memory of many": ("import os, time\nfor _ in range(3): os.fork()\ny = b'x' * (2**20 * 100)\ntime.sleep(60)", "memory", "its processes need more than 256 MiB"),
    "shared memory of many": ("import mmap, os, signal, time\nfor _ in range(3):\n  if os.fork() == 0:\n    shared = mmap.mmap(-1, 2**20 * 120)\n    for k in range(0, len(shared), 4096): shared[k] = 1\n    time.sleep(60)\nif os.fork() == 0:\n  while True: os.kill(os.getppid(), signal.SIGSTOP), os.kill(os.getppid(), signal.SIGCONT)\ntime.sleep(60)", "memory", "its processes need more than 256 MiB"),
    "others' results": ("from recipes.kissing_number.program import points as x", "error", "No module named 'recipes'"),
    "path of others": (f"import sys\nx = {str(ROOT)!r} in sys.path", None, False),
    "infinite loop": ("while True: pass", "timeout", "did not end within 1 s"),
    "deaf to signals": ("import signal, time\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\ntime.sleep(99)", "timeout", ""),
    "huge output": ("print('x' * 10**7)", "output", "printed more than 1048576 bytes"),
    "huge result": ("x = 'x' * 10**7", "result", "more than 4194304 bytes"),
    "long number": ("x = 10**100_000", "result", "4300 digits"),
    "long number, sent": ("import os\nos.write(RESULT, b'{\"values\": {\"x\": ' + b'9' * 10**6 + b'}}')\nos._exit(0)", "crash", "no result"),
    "deep": ("x = []\nfor _ in range(10**5): x = [x]", "result", "RecursionError"),
    "deep, sent": ("import os\nos.write(RESULT, b'[' * 10**6)\nos._exit(0)", "crash", "no result"),
    "bytes that are no text, sent": ("import os\nos.write(RESULT, b'\\xff\\xfe')\nos._exit(0)", "crash", "no result"),
    "another object, sent": ("import os\nos.write(RESULT, b'{\"valid\": true}')\nos._exit(0)", "crash", "no result"),
    "two results, sent": ("import os\nos.write(RESULT, b'{\"values\": {\"x\": 1}}')\nx = 2", "crash", "no result"),
    "circle": ("x = []\nx.append(x)", "result", "Circular reference"),
    "set": ("x = {1}", "result", "it holds a set"),
    "generator": ("x = (i for i in range(3))", "result", "it holds a generator"),
    "own class": ("class I(int):\n  def __repr__(s): return '7'\nx = [I(5)]", None, [5]),
    "closed files": ("import os\nos.closerange(0, 64)\nx = 1", "crash", "ended with status 70"),
    "reads input": ("import sys\nx = sys.stdin.read()", None, ""),
    "copies of itself": ("import os\nx = os.fork() == 0", None, False),
    "fork bomb": ("import os\nwhile True: os.fork()", None, "any failure"),
    "left behind": (f"import os\nif os.fork() == 0:\n    {AWAY}\nx = 1", None, 1),
    "own files": ("open('a', 'w').write('b')\nimport os\nx = os.listdir('.')", None, ["a"]),
    "large file": ("open('a', 'wb').write(b'b' * 2**25)", "error", "File too large"),
}  # fmt: skip
# What takes seconds, and what differs from others in detail only.
SLOW = {
    "memory of many", "shared memory of many", "infinite loop", "deaf to signals", "fork bomb", "recursion", "null byte", "not utf-8", "two results, sent", "deep, sent",
    "another object, sent", "bytes that are no text, sent", "generator", "memory in small steps", "huge result",
    "unprintable exception", "reads input", "copies of itself", "own class", "closed files", "no global", "exit with a status",
    "patched json", "deep", "circle",
}  # fmt: skip
# The file that the result goes to: a hostile program can find it, so the suite does too.
FIND = "import os as _o\nRESULT = max(int(f) for f in _o.listdir('/proc/self/fd') if _o.path.exists(f'/proc/self/fd/{f}'))\n"


def run(program: str | bytes, limits: Limits) -> ProgramOutcome:
    if isinstance(program, str) and "RESULT" in program:
        program = FIND + program
    return run_program(program, ["x"], limits)


def run_all(names: list[str], folder: Path) -> dict[str, ProgramOutcome]:
    """Several at a time; where their folders were is empty afterwards."""
    folder.chmod(0o777)
    os.environ["TMPDIR"] = str(folder)
    with ThreadPoolExecutor(4) as pool:
        ran = list(pool.map(lambda name: run(PROGRAMS[name][0], SHORT if name in ENDLESS else LONG), names))
    assert list(folder.iterdir()) == []
    return dict(zip(names, ran, strict=True))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProgramOutcome]:
    return run_all([name for name in PROGRAMS if name not in SLOW], tmp_path_factory.mktemp("sandboxes"))


@pytest.fixture(scope="module")
def slow_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProgramOutcome]:
    return run_all(sorted(SLOW), tmp_path_factory.mktemp("sandboxes"))


def check(name: str, outcome: ProgramOutcome) -> None:
    _, kind, expected = PROGRAMS[name]
    if expected == "any failure":
        assert isinstance(outcome, ProgramFailure)
    elif kind is None:
        assert isinstance(outcome, ProgramResult), outcome
        assert outcome.values == ({} if expected == "absent" else {"x": expected})
        assert repr(outcome.values.get("x")) == repr(None if expected == "absent" else expected)  # 1 is not 1.0
    else:
        assert isinstance(outcome, ProgramFailure)
        assert outcome.kind == kind, outcome
        assert expected in outcome.detail


@pytest.mark.moderate
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SLOW])
def test_every_program_has_a_clear_outcome(outcomes: dict[str, ProgramOutcome], name: str) -> None:
    check(name, outcomes[name])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_every_slower_program_has_a_clear_outcome(slow_outcomes: dict[str, ProgramOutcome], name: str) -> None:
    check(name, slow_outcomes[name])


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and p.info["cmdline"][-1] == NAP]


def test_nothing_that_a_program_started_is_left(outcomes: dict[str, ProgramOutcome]) -> None:
    assert isinstance(outcomes["left behind"], ProgramResult)
    assert sleepers() == []


@pytest.mark.moderate
def test_traceback_does_not_reveal_local_paths() -> None:
    outcome = run("import json\njson.loads('[')", LONG)
    assert isinstance(outcome, ProgramFailure)
    assert "JSONDecodeError" in outcome.detail
    assert sys.base_prefix not in outcome.detail


ISOLATED = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "processes": "import os\nassert os.getpid() != 1 or os.kill(-1, 9)",
    "files": "try: open(PATH, 'w')\nexcept FileNotFoundError: pass  # /tmp is gone\nopen('/trl_ext_was_here', 'w')",
}


@pytest.mark.moderate
@pytest.mark.parametrize("what", ISOLATED)
def test_reported_isolation_is_in_force(tmp_path: Path, what: str) -> None:
    import socket

    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = f"PORT = {server.getsockname()[1]}\nPATH = {str(tmp_path / 'a')!r}\n"
        outcome = run(names + ISOLATED[what], LONG)
    if what not in outcome.isolation:
        pytest.skip(f"this system isolates no {what}")
    assert isinstance(outcome, ProgramFailure)
    assert {"network": "unreachable", "processes": "No such process", "files": "Read-only"}[what] in outcome.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.moderate
def test_no_socket_where_services_put_them_can_be_used(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        server.bind(f"{folder}/a")
        os.chmod(f"{folder}/a", 0o777)
        server.listen()
        for at in (folder, str(tmp_path)):  # next to the program's own folder, too
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TMPDIR", at)
                connects = f"import socket\nopen('b', 'w')\nsocket.socket(socket.AF_UNIX).connect('{folder}/a')"
                outcome = run(connects, LONG)
            if "files" not in outcome.isolation:
                pytest.skip("this system isolates no files")
            assert isinstance(outcome, ProgramFailure)
            assert "FileNotFoundError" in outcome.detail


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_without_writable_uid_map_there_are_only_limits() -> None:
    code = """if True:
        from types import SimpleNamespace
        from trl_ext.sandbox import isolation
        isolation._LIBC = SimpleNamespace(unshare=lambda spaces: 0 if spaces & isolation._NEWUSER else -1)
        isolation.open = lambda name, mode: 1 / 0 if name.endswith("uid_map") else open("/dev/null", mode)
        print(isolation.enter_namespaces())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.moderate
@pytest.mark.skipif(os.getuid() != 0, reason="another user is what root becomes")
def test_programs_without_namespaces_are_of_different_users() -> None:
    users = set()
    for _ in range(2):
        outcome = run("import os\nx = os.getuid()", replace(LONG, namespaces=False))
        assert isinstance(outcome, ProgramResult)
        users.add(outcome.values["x"])
    assert len(users) == 2
    assert 0 not in users


@pytest.mark.moderate
def test_the_program_sees_no_secret_and_has_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    outcome = run("import os\nx = [sorted(os.environ), open('/proc/self/status').read()]", LONG)
    assert isinstance(outcome, ProgramResult)
    names, status = outcome.values["x"]
    assert "OPENAI_API_KEY" not in names
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    if "rights" in outcome.isolation:
        assert [int(fields[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
        assert fields["NoNewPrivs"] == "1"
        assert fields["Uid"].split()[0] != "0"


@pytest.mark.parametrize(
    "name",
    [
        "left behind",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("plain", "fork bomb", "infinite loop", "shared memory of many")
        ),
    ],
)
def test_without_namespaces_limits_hold_and_nothing_is_left(name: str) -> None:
    limits = replace(SHORT if name in ENDLESS else LONG, namespaces=False)
    outcome = run(PROGRAMS[name][0], limits)
    assert isinstance(outcome, ProgramResult if name in ("plain", "left behind") else ProgramFailure)
    assert name != "shared memory of many" or (isinstance(outcome, ProgramFailure) and outcome.kind == "memory")
    assert set(outcome.isolation) <= {"rights"}
    assert "can reach the network" in describe_isolation(outcome.isolation)
    assert sleepers() == []
    assert not [p for p in psutil.Process().children(recursive=True) if "supervisor" in " ".join(p.cmdline())]


def busy_seconds(process: psutil.Process) -> float:
    """0 for one that has ended, such as the probe."""
    try:
        return float(process.cpu_times().user)
    except psutil.Error:
        return 0.0


@pytest.mark.slow
def test_when_the_parent_is_killed_its_programs_are_too(tmp_path: Path) -> None:
    code = "from trl_ext.sandbox import run_program\nrun_program('while True: pass', [])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    below: list[psutil.Process] = []
    until = time.monotonic() + 30
    while not any(busy_seconds(process) > 0.3 for process in below) and time.monotonic() < until:  # it loops by now
        time.sleep(0.02)
        below = psutil.Process(parent.pid).children(recursive=True)
    assert len(below) == 2  # the supervisor and the program
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_limits_that_limit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="the sandbox's limit seconds must be positive, got 0"):
        Limits(seconds=0)
