"""The tool `python`: code in a sandbox, many calls at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from trl_ext.sandbox.limits import Limits, ProgramFailure, ProgramOutcome, SandboxError
from trl_ext.sandbox.pool import SandboxPool
from trl_ext.turns.calls import MEMORY_MB, MOST_CHARACTERS, Answer, Call, Kind, cores

_OUTPUT_BYTES = 2**16
_AT_ONCE = 2  # programs per core: what isolates one waits for the kernel as long as it computes


class Python:
    """Code in a sandbox, many calls at a time.

    Args:
        keeps_state: a call sees what the response's earlier ones have defined, which are executed again for it.
    """

    def __init__(self, seconds: float, keeps_state: bool = False) -> None:
        limits = Limits(seconds=seconds, memory_mb=MEMORY_MB, output_bytes=_OUTPUT_BYTES, shown=MOST_CHARACTERS)
        self.pool, self.keeps_state = SandboxPool(limits), keeps_state
        self.function = python

    def answers(self, calls: Sequence[Call]) -> list[Answer]:
        """What the code prints, and the value of an expression at its end."""
        with ThreadPoolExecutor(_AT_ONCE * cores()) as threads:
            return list(threads.map(self._answer, calls))

    def close(self) -> None:
        """End the process that sandboxes are forked from."""
        self.pool.close()

    def _answer(self, call: Call) -> Answer:
        began = time.monotonic()
        earlier = [str(arguments["code"]) for arguments in call.earlier if "code" in arguments]
        try:
            code = dict(call.arguments or {})["code"]
            outcome = self.pool.run_blocks([*(earlier if self.keeps_state else ()), str(code)])
        except KeyError:
            return Answer("Error: the argument 'code' is missing", "failed")
        except SandboxError as error:
            return Answer(f"Error: {' '.join(str(error).split())[:200]}", "failed", time.monotonic() - began)
        return Answer(_printed(outcome), _kind_of(outcome), time.monotonic() - began)


def python(code: str) -> str:
    """Execute Python code and return what it prints, and the value of an expression at its end.

    Args:
        code: the code; it has no network, no files and a few seconds.

    Returns:
        The output, or the error.
    """
    raise NotImplementedError(f"{code[:40]!r} runs in a sandbox, see `Python`")


def _kind_of(outcome: ProgramOutcome) -> Kind:
    if not isinstance(outcome, ProgramFailure):
        return "ok"
    return "timeout" if outcome.kind == "timeout" else "failed"


def _printed(outcome: ProgramOutcome) -> str:
    """Output and error as a model reads them."""
    parts = [outcome.output.strip("\n")]
    if isinstance(outcome, ProgramFailure):
        said = outcome.detail.rstrip(".")
        parts.append(said if outcome.kind == "error" else f"Error: {said}")
    return "\n".join(part for part in parts if part) or "(no output)"
