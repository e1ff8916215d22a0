"""How long torch's launcher waits for its ranks between SIGTERM and SIGKILL."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TORCHS = 30.0  # default seconds: torch/distributed/launcher/api.py:LaunchConfig
_OURS = "600"  # seconds, for the launchers that we start


def patient_environment() -> dict[str, str]:
    """The environment for a launcher that leaves its ranks time to save a checkpoint after SIGTERM."""
    return {TIMEOUT: _OURS, **os.environ}


def seconds_allowed() -> float | None:
    """Seconds between SIGTERM and SIGKILL of torch's launcher; None if it did not start this process.

    Its agent forwards SIGTERM and waits that long (torch/distributed/elastic/multiprocessing/api.py: _close). The time
    is on its command line or in its environment, which the ranks inherit.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").replace("=", "\0").split("\0")
    except OSError:  # no Linux
        words = []
    given = {name.replace("-", "_"): value for name, value in itertools.pairwise(words)}
    return float(given.get("__shutdown_timeout", os.environ.get(TIMEOUT, _TORCHS)))
