"""A vLLM server on the loopback, on the CPU, with the flags of `trl_ext.generation.server.start_command`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import requests

from tests.grpo.test_distributed import ROOT, free_port
from trl_ext.generation.server import start_command


class VllmServer:
    """A server that is starting.

    Args:
        flags: added to those of the start command, or replacing them.
        rank: of the adapters that it has room for.
        port: to listen on, by default a free one.
    """

    def __init__(self, model: Path, *flags: str, rank: int = 0, port: int | None = None) -> None:
        self.port = port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        words = shlex.split(start_command(str(model), rank))
        command, modes = words[words.index("python") + 1 :], words[: words.index("python")]
        here = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        here |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
        here |= dict(mode.split("=", 1) for mode in modes)
        small = ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "32", "--max-model-len", "128"]
        self.said = model.parent / f"server_{port}.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port), *small, *flags],
                env={**os.environ, **here}, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 240) -> VllmServer:
        """Until it answers."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            said = self.said.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.3)

    def kill(self) -> None:
        """It and its engine's process, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def serving(model: Path, *flags: str, rank: int = 0, port: int | None = None) -> Iterator[VllmServer]:
    """A server that is starting; it is killed at the end of the block."""
    server = VllmServer(model, *flags, rank=rank, port=port)
    try:
        yield server
    finally:
        server.kill()
