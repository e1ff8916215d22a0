"""The limits of a program in the sandbox, and its possible outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# What each means where it is in force, and the risk where it is not.
_WORDS = {
    "processes": ("its own processes", "other processes are in sight"),
    "network": ("no network", "the program can reach the network"),
    "files": ("read-only files without homes and devices", "it can read and write what its user can"),
    "rights": ("no capabilities and no new namespaces", "it may have rights"),
}
ISOLATION = tuple(_WORDS)
Kind = Literal["timeout", "memory", "output", "crash", "error", "result"]


class SandboxError(RuntimeError):
    """The sandbox itself does not work here; the program is not at fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall-clock time.
        memory_mb: MiB of address space per process, and of memory, files in memory included, for all processes.
        processes: number of processes and threads.
        result_bytes: size of the globals that are read.
        output_bytes: size of the printed output.
        shown: characters of the printed output that are kept.
        file_bytes: size of each file that it writes.
        namespaces: whether to isolate it from network, processes and files where the system allows that.
    """

    seconds: float = 60.0
    memory_mb: int = 2048
    processes: int = 64
    result_bytes: int = 4 * 2**20
    output_bytes: int = 2**20
    shown: int = 2000
    file_bytes: int = 16 * 2**20
    namespaces: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 and name != "namespaces":
                raise ValueError(f"the sandbox's limit {name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The requested globals that the program has, its output, and how it was isolated."""

    values: dict[str, Any]
    output: str
    seconds: float
    isolation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramFailure:
    """Why there are no values. `detail` is addressed to the program's author."""

    kind: Kind
    detail: str
    output: str = ""
    seconds: float = 0.0
    isolation: tuple[str, ...] = ()


ProgramOutcome = ProgramResult | ProgramFailure


def describe_isolation(isolation: Sequence[str]) -> str:
    """The isolation of a program in one line, for people."""
    kept = [words for name, (words, _) in _WORDS.items() if name in isolation]
    open_to_it = [risk for name, (_, risk) in _WORDS.items() if name not in isolation]
    text = ", ".join(["limits on time, memory, processes and output", *kept])
    return text + (f"; not in force here: {', '.join(open_to_it)}" if open_to_it else "")
