"""`conversation_log.json`: every message, answer and verdict of a run, a valid JSON array after every entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trl_ext.discovery.archive import Attempt
from trl_ext.discovery.client import Reply
from trl_ext.discovery.problem import Verdict
from trl_ext.io import write_text

_END = b"\n]\n"
Entry = dict[str, Any]


class LogError(ValueError):
    """The log of an earlier run cannot be gone on with; the message says why and what to do."""


def read_log(path: Path) -> list[Entry]:
    """The entries of a log, one per line of it; what a power cut tore off at the end is left out.

    Raises:
        LogError: another line is no entry.
    """
    lines = [line.removesuffix(b",") for line in path.read_bytes().split(b"\n")]
    lines = [line for line in lines if line not in (b"", b"[", b"]")]
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or "kind" not in entry:
                raise ValueError("not an object with a `kind`")
            entries.append(entry)
        except ValueError as error:
            if number < len(lines):
                raise LogError(f"{path.name}, entry {number}: {error}. Move the file away to begin anew.") from None
    return entries


class Log:
    """The log of this run, which entries are added to. Adding one costs the same however long it is.

    Args:
        redact: what every text goes through before it is written.
    """

    def __init__(self, path: Path, entries: list[Entry], redact: Callable[[str], str] = str) -> None:
        self.path, self.redact = path, redact
        write_text(path, "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + _END.decode())
        self._is_empty = not entries

    def add(self, kind: str, **entry: Any) -> None:
        """Append an entry, on the disk when this returns."""
        data = json.dumps({"kind": kind, **each_text(entry, self.redact)}).encode()
        with self.path.open("r+b", buffering=0) as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write((b"" if self._is_empty else b",\n") + data + _END)  # in one write: never half an entry
            os.fsync(file.fileno())
        self._is_empty = False


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON's types with `change` applied to every text in it but the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: each_text(entry, change) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(entry, change) for entry in value]
    return value


def redacted(verdict: Verdict, redact: Callable[[str], str]) -> Verdict:
    """The verdict with `redact` applied to its texts, in which a program may have had a hand."""
    return Verdict(verdict.valid, verdict.score, redact(verdict.message), each_text(verdict.details, redact))


def answer_entry(attempt: Attempt, reply: Reply, calls: int) -> Entry:
    """What is known of an attempt once its answer is there, or none came; `calls`: of the run so far."""
    return {
        "id": attempt.id,
        "second": attempt.second,
        "group": attempt.group,
        "parents": list(attempt.parents),
        "finish": attempt.polish,
        "messages": list(attempt.messages),
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


def verdict_entry(verdict: Verdict) -> Entry:
    """A verdict in JSON's types."""
    return {
        "valid": verdict.valid,
        "score": list(verdict.score),
        "message": verdict.message,
        "details": dict(verdict.details),
    }


def _verdict(entry: Mapping[str, Any] | None) -> Verdict | None:
    if entry is None:
        return None
    return Verdict(entry["valid"], tuple(entry["score"]), entry["message"], entry["details"])


def attempts_of(entries: list[Entry]) -> list[Attempt]:
    """The attempts that a log tells of, in the order of their answers; some may lack their verdict still."""
    found: dict[int, Attempt] = {}
    for entry in entries:
        if entry["kind"] == "answer":
            found[entry["id"]] = Attempt(
                entry["id"],
                entry["group"],
                tuple(entry["parents"]),
                entry["finish"],
                entry["messages"],
                entry["response"],
                entry["finish_reason"],
                entry["error"],
                second=entry["second"],
                tokens=entry["prompt_tokens"] + entry["completion_tokens"],
            )
        elif entry["kind"] == "verdict":
            attempt = found[entry["id"]]
            attempt.verdict = _verdict(entry["verdict"])
            attempt.polished = _verdict(entry["finished"])
            attempt.polish_note = entry["finish_note"]
    return list(found.values())
