"""`conversation_log.json`: every message, answer and verdict of a run, a valid JSON object after every entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from trl_ext.endpoint.client import Reply
from trl_ext.io import write_text
from trl_ext.tools.discovery.archive import Attempt
from trl_ext.tools.discovery.problem import Verdict

_BEGIN, _END = '{"entries": [', "\n]}\n"
_BRACKETS = {_BEGIN.encode(), _END.strip().encode(), b"", b"[", b"]"}  # the last two: an array, as before
Entry = dict[str, Any]


class LogError(ValueError):
    """An earlier run's log cannot be resumed; the message says why and what to do."""


def read_log(path: Path) -> list[Entry]:
    """The entries of a log, one per line; an incomplete last entry, torn by a power cut, is left out.

    Raises:
        LogError: another line is not an entry.
    """
    lines = [line.removesuffix(b",") for line in path.read_bytes().split(b"\n")]
    lines = [line for line in lines if line not in _BRACKETS]
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or "kind" not in entry:
                raise ValueError("not an object with a `kind`")
            entries.append(entry)
        except ValueError as error:
            if number < len(lines):
                raise LogError(f"{path.name}, entry {number}: {error}. Move the file away to start over.") from None
    return entries


class Log:
    """The log of a run. The cost of an entry does not depend on the log's length.

    Args:
        redact: applied to every text before it is written.
    """

    def __init__(self, path: Path, entries: list[Entry], redact: Callable[[str], str] = str) -> None:
        self.path, self.redact = path, redact
        write_text(path, f"{_BEGIN}\n" + ",\n".join(json.dumps(entry) for entry in entries) + _END)
        self._is_empty = not entries

    def add(self, kind: str, **entry: object) -> None:
        """Append an entry; it is on disk when this returns."""
        data = json.dumps({"kind": kind, **map_texts(entry, self.redact)}).encode()
        with self.path.open("r+b", buffering=0) as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write((b"" if self._is_empty else b",\n") + data + _END.encode())  # in one write: never half an entry
            os.fsync(file.fileno())
        self._is_empty = False


def map_texts(value: object, change: Callable[[str], str]) -> Any:
    """`value` in JSON's types, with `change` applied to every text in it except the names of fields."""
    if isinstance(value, str):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return map_texts(asdict(value), change)
    if isinstance(value, Mapping):
        return {name: map_texts(entry, change) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(entry, change) for entry in value]
    return value


def redacted(verdict: Verdict, redact: Callable[[str], str]) -> Verdict:
    """The verdict with `redact` applied to its texts, which the program may have influenced."""
    return replace(verdict, message=redact(verdict.message), details=map_texts(verdict.details, redact))


def answer_entry(attempt: Attempt, reply: Reply, calls: int) -> Entry:
    """The log's fields for an answer, or for a request that got none; `calls` are those of the run so far."""
    return {
        "id": attempt.id,
        "second": attempt.second,
        "group": attempt.group,
        "parents": attempt.parents,
        "finish": attempt.polish,
        "messages": attempt.messages,
        "response": attempt.response,
        "reasoning": reply.reasoning,
        "finish_reason": attempt.finish_reason,
        "error": attempt.error,
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "tokens_are_estimated": reply.is_estimated,
        "tries": reply.tries,
        "seconds": reply.seconds,
        "calls": calls,
    }


def attempts_of(entries: list[Entry]) -> list[Attempt]:
    """The attempts in a log, in the order of their answers; some may not have a verdict yet."""
    attempts: dict[int, Attempt] = {}
    for entry in entries:
        if entry["kind"] == "answer":
            same = ("id", "group", "messages", "response", "finish_reason", "error", "second")
            attempts[entry["id"]] = Attempt(
                parents=tuple(entry["parents"]),
                polish=entry["finish"],
                tokens=entry["prompt_tokens"] + entry["completion_tokens"],
                **{name: entry[name] for name in same},
            )
        elif entry["kind"] == "verdict":
            attempt = attempts[entry["id"]]
            attempt.verdict = _verdict(entry["verdict"])
            attempt.polished = _verdict(entry["finished"])
            attempt.polish_note = entry["finish_note"]
    return list(attempts.values())


def _verdict(entry: Entry | None) -> Verdict | None:
    return None if entry is None else Verdict(**{**entry, "score": tuple(entry["score"])})
