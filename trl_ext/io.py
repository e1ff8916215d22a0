"""Writing files so that an interruption leaves the old one or the new one, never half of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from trl_ext.redaction import redact

_DISK_FAULTS = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENODEV, errno.ENOSPC, errno.ENXIO, errno.EPERM,
    errno.EROFS, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes that are no UTF-8
_PART = 2**26  # bytes of a file that one thread reads
_SHOWN_BEFORE = 60  # bytes before one that cannot be read
_SHOWN = 1500  # characters of a text in a page


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file next to `path`, of the same suffix, that takes its place when the block ends without an error."""
    scratch = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; None where it is empty."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def read_jsonl(path: Path, any_text: bool = False) -> list[dict[str, Any]]:
    """The file's rows. A text may hold any of Unicode's line ends; only a newline ends a row.

    Args:
        any_text: take texts with half of a surrogate pair, too, which JSON can escape and no UTF-8 file can hold.

    Raises:
        ValueError: a row is no JSON object, or has such a text; with the file, the line and the field.
    """
    rows, data = [], path.read_bytes().rstrip()
    for number, line in enumerate(data.split(b"\n") if data else (), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not JSON: {_unreadable(error)}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{str(path)!r}, line {number}: not a JSON object: {line[:80]!r}")
        if not any_text and (field := unencodable(row) if _SURROGATE.search(line) else None):
            raise ValueError(
                f"{str(path)!r}, line {number}: field {field!r} has half of a surrogate pair, which UTF-8 cannot hold, "
                "as where a text was cut within a character: write the character whole or remove it"
            )
        rows.append(row)
    return rows


def _unreadable(error: ValueError | RecursionError) -> str:
    """Python's reason, but where it is about Python."""
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        before = error.object[max(0, error.start - _SHOWN_BEFORE) : error.start].decode(errors="replace")
        return f"byte 0x{error.object[error.start]:02x} is no UTF-8, after {before!r}"
    return "a number has more than 4,300 digits" if "int_max_str_digits" in str(error) else str(error)


def unencodable(value: Any, name: str = "") -> str | None:
    """Where a text stands that UTF-8 cannot hold, such as `messages.0.content`; None if there is none."""
    if isinstance(value, str):
        return name if any("\ud800" <= character <= "\udfff" for character in value) else None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        place = f"{name}.{key}" if name else str(key)
        if inner := unencodable(item, place) or unencodable(str(key), repr(place)):
            return inner
    return None


def drop_torn_line(path: Path) -> None:
    """Take away what follows the last line's end: a power cut may have torn a line in two."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def append_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a JSONL file; unbuffered, so that no line is cut in two."""
    with path.open("ab", buffering=0) as file:
        file.write(_lines(rows).encode())


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file atomically."""
    write_text(path, _lines(rows))


def write_csv(path: Path, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a CSV file atomically."""
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([heads, *rows])


def digest_of(path: Path) -> str:
    """A hash of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def digest_of_files(paths: Iterable[Path]) -> str:
    """A hash of the names and the whole content of files; gigabytes take seconds, since all threads read."""
    files = sorted(paths, key=lambda path: path.name)
    parts = [(path, start) for path in files for start in range(0, path.stat().st_size, _PART)]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_digest_of_part, parts))
    named = [(path.name, path.stat().st_size) for path in files]
    return hashlib.sha256(json.dumps([named, digests]).encode()).hexdigest()[:16]


def _digest_of_part(part: tuple[Path, int]) -> str:
    path, start = part
    digest, block = hashlib.sha256(), memoryview(bytearray(2**22))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _PART
        while left and (read := file.readinto(block[: min(left, len(block))])):
            digest.update(block[:read])
            left -= read
    return digest.hexdigest()


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def is_disk_fault(error: BaseException | None) -> bool:
    """Whether a disk refused to be written, in the words of the system or of the libraries that write checkpoints.

    safetensors says so as `I/O error: ... (os error N)`; torch's writer of archives (torch/serialization.py:
    _open_zipfile_writer_file) finds itself at another position than it has written to.
    """
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
        return True
    words = re.compile(r"I/O error: .*os error|PytorchStreamWriter failed writing|unexpected pos")
    said = isinstance(error, (RuntimeError, SafetensorError)) and words.search(str(error))
    return bool(said) or is_disk_fault(error.__cause__ or error.__context__)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as a recipe's command line has them."""
    args: list[str] = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            values = [json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            values = [str(item) for item in value]
        else:
            values = [str(value).lower() if isinstance(value, bool) else str(value)]
        args += [f"--{name}", *values]
    return args


def as_yaml(settings: dict[str, Any]) -> str:
    """Settings in a form that a YAML file can hold and `--config` reads; secrets are masked."""
    return str(yaml.safe_dump(redact(plain(settings)), sort_keys=True, allow_unicode=True))


def plain(value: Any) -> Any:
    """`value` in the types of YAML and JSON; what they do not know, as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_line(text: str) -> None:
    """Print above the progress bar."""
    from tqdm import tqdm

    tqdm.write(text)


def fence_of(text: str, shortest: int = 3) -> str:
    """Backticks that nothing in the text can end."""
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])


def fenced(text: str) -> list[str]:
    """A Markdown code block that nothing in the text can end; of a long text its beginning."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text) - _SHOWN} characters more)"
    return [f"{fence_of(text)}text", *shown.strip().splitlines(), fence_of(text), ""]
