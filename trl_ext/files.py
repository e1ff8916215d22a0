"""Writing files so that an interruption leaves the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, of the same suffix, that takes its place when the block ends without an error."""
    scratch = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def append_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a JSONL file; unbuffered, so that no line is cut in two."""
    with path.open("ab", buffering=0) as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
