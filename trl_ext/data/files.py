"""Rows of a file, with texts as they stand in it: what cannot be read as it was meant is named with its place."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_ext.data.sample import Table
from trl_ext.io import read_jsonl, unencodable

_MISSING = frozenset(("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None"))  # how tables write a missing cell
_LONGEST_CELL = 2**31 - 1
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_file(path: Path) -> Table:
    """The rows of a file of a kind in `READERS`: a list, or a `datasets.Dataset` of a .parquet file.

    Raises:
        ValueError: it cannot be read as what it is called; with the file, and the line or row if there is one.
    """
    try:
        return READERS[path.suffix](path)
    except (UnicodeError, csv.Error, ValueError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{str(path)!r} cannot be read as {path.suffix}: {error}") from error


def _read_json(path: Path) -> Table:
    """A list of objects, or one object a line as in .jsonl."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return read_jsonl(path)  # which names the line
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is no JSON object: {str(row)[:80]!r}")
        if field := unencodable(row):
            raise ValueError(f"row {number}: field {field!r} has half of a surrogate pair, which UTF-8 cannot hold")
    return rows


def _read_csv(path: Path) -> Table:
    """Every cell is a text: 007, 1e3 and True are what is written there."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows = list[dict[str, Any]]()
        for number, cells in enumerate(reader):
            if None in cells or None in cells.values():
                raise ValueError(
                    f"row {number} has {'more' if None in cells else 'fewer'} cells than the head's "
                    f'{len(reader.fieldnames or ())}: write a text with a comma in "quotes"'
                )
            rows.append({name: None if cell in _MISSING else cell for name, cell in cells.items()})
    return rows


def _read_parquet(path: Path) -> Table:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return load_dataset("parquet", data_files=str(path), split="train")
    except DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error


READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": read_jsonl,  # names the line where `datasets` would not, and takes a number here and a text there
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def control_character(text: str) -> str:
    r"""A sentence about the first control character in a text but tabs and line ends; the empty text if it has none.

    JSON reads `"\frac"` as a form feed before `rac`, where LaTeX was written with one backslash.
    """
    match = _CONTROL.search(text)
    if match is None:
        return ""
    letter = {"\x08": "b", "\x0c": "f"}.get(match[0])
    hint = rf', as JSON has for "\{letter}..." where "\\{letter}..." was meant' if letter else ""
    return f"has the control character {match[0]!r}{hint}"
