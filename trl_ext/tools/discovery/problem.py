"""A problem: a task in words, and a verifier that judges programs exactly."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trl_ext.sandbox import run_program
from trl_ext.sandbox.limits import Limits, ProgramFailure, ProgramOutcome, describe_isolation

Score = tuple[float, ...]  # larger is better, compared from the first entry on; () is less than any other


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's judgment of a program.

    Attributes:
        valid: whether the program solves the problem, however badly.
        score: compared entry by entry, larger is better; () if there is nothing to score, which is never valid.
        message: the exact reason, which the model is shown unchanged.
        details: figures for people and reports, in JSON's types.
    """

    valid: bool
    score: Score
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.valid and not self.score:
            raise ValueError(f"a valid verdict needs a score; the verifier gave none with {self.message!r}")


@dataclass(frozen=True, slots=True)
class Polished:
    """A program that a numeric method made from the model's, with its own verdict."""

    program: str
    verdict: Verdict


@dataclass(frozen=True)
class Problem:
    """A problem that a model can work on.

    Attributes:
        name: a short name, for folders and logs.
        task: the first message to the model: what to write and what is checked.
        verify: judges a program; called from several threads.
        score_name: the unit of the score's first entry.
        hybrid_task: the first message where a numeric method polishes the model's program.
        polish: that method: takes a program, a seed and a limit in seconds; returns a better program, or why there is
            none.
    """

    name: str
    task: str
    verify: Callable[[str], Verdict]
    score_name: str = "score"
    hybrid_task: str = ""
    polish: Callable[[str, int, float], Polished | str] | None = None


def global_of(
    program: str | bytes, name: str, limits: Limits | None = None
) -> tuple[Any, Verdict | None, ProgramOutcome]:
    """Run the program in the sandbox: its global `name`, or None and the verdict on a program that leaves none."""
    ran = run_program(program, [name], limits)
    if isinstance(ran, ProgramFailure):
        return None, Verdict(False, (), f"{_KINDS[ran.kind]}: {ran.detail}"), ran
    if name not in ran.values:
        return None, Verdict(False, (), f"the program ended without a global `{name}`"), ran
    return ran.values[name], None, ran


_KINDS = {
    "timeout": "the program took too long",
    "memory": "the program took too much memory",
    "output": "the program printed too much",
    "crash": "the program crashed",
    "error": "the program failed",
    "result": "the program's result cannot be read",
}


def with_run(verdict: Verdict, ran: ProgramOutcome, otherwise: Mapping[str, Any] | None = None) -> Verdict:
    """The verdict with the program's run time, its isolation and its output among the details.

    Args:
        otherwise: details of a program that leaves nothing to judge.
    """
    more = {"program_seconds": ran.seconds, "sandbox": describe_isolation(ran.isolation)}
    shown = {"program_output": ran.output} if ran.output else {}
    return replace(verdict, details={**(otherwise or {}), **verdict.details, **more, **shown})


def shown_score(score: Score) -> str:
    """A score for people."""
    return ", ".join(f"{entry:.6g}" for entry in score) or "-"


NO_PROGRAM = (
    "There is no program in your answer. Put one complete Python program in a single block that begins with a line "
    "```python and ends with a line ```."
)
CUT_OFF = "Your answer was cut off before the program was complete. Think less, or write a shorter program."
_FENCE = re.compile(r"^[ \t]*(`{3,}+|~{3,}+)[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.M | re.S)


def no_program_message(finish_reason: str) -> str:
    """What the model is told of an answer without a program."""
    return CUT_OFF if finish_reason == "length" else NO_PROGRAM


def without_thought(response: str) -> str:
    """The answer after the `<think>` block; "" if that block never ends."""
    _, thought, answer = response.rpartition("</think>")
    if not thought and "<think>" in response:
        return ""
    return answer.strip()


@functools.lru_cache(maxsize=4096)  # strategies ask again for every request
def extract_program(response: str) -> str | None:
    """The last block marked as Python in an answer, else the last unmarked one, else None. A block may be unclosed."""
    fences = _FENCE.findall(without_thought(response))
    blocks = [(language.lower(), code) for _, language, code in fences if code.strip()]
    python = [code for language, code in blocks if language in ("python", "py", "python3")]
    chosen = python or [code for language, code in blocks if not language]
    return chosen[-1] if chosen else None
