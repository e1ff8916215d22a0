"""Rows to one HTML file: rows as compressed chunks that the browser decodes when it shows them, and an index of all.

A rollout's text is untrusted. It is in the file only as gzip in base64, whose alphabet has no markup; the script puts
it on the page as text only; and its Content-Security-Policy allows no script or style but the file's own.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from trl_ext.browse.rows import Row
from trl_ext.browse.second_opinion import disagree
from trl_ext.io import replacing

CHUNK = 128  # rows; what the browser decodes at a time
VERDICTS = ("correct", "format_only", "neither", "unknown")
CUT, DISAGREE, HAS_TOKENS = 1, 2, 4  # the bits of `flags`, as filters.js reads them
_SCRIPTS = ("store.js", "filters.js", "tokens.js", "detail.js", "page.js")


@dataclass
class Index:
    """One value per row in each list: what the browser's list shows and filters without decoding a row."""

    step: list[int | None] = field(default_factory=list)
    problem: list[int] = field(default_factory=list)  # numbers of distinct prompts, in the order of their appearance
    source: list[int] = field(default_factory=list)
    reward: list[float | None] = field(default_factory=list)
    verdict: list[int] = field(default_factory=list)  # a place in VERDICTS
    flags: list[int] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    problems: dict[str, int] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Append a row in the form of `plain_row`."""
        self.step.append(row["step"])
        self.problem.append(self.problems.setdefault(row["prompt"], len(self.problems)))
        self.source.append(self.sources.setdefault(row["source"], len(self.sources)))
        self.reward.append(row["reward"] if isinstance(row["reward"], (int, float)) else None)
        self.verdict.append(VERDICTS.index(row["verdict"]))
        self.flags.append(CUT * bool(row["cut"]) + DISAGREE * disagree(row) + HAS_TOKENS * bool(row["per_token"]))
        self.tokens.append(row["tokens"])

    def content(self, title: str) -> dict[str, Any]:
        """What the page's script reads."""
        columns = ("step", "problem", "source", "reward", "verdict", "flags", "tokens")
        named = {"title": title, "sources": list(self.sources), "verdicts": VERDICTS, "chunk": CHUNK}
        return named | {name: getattr(self, name) for name in columns}


def packed(content: object) -> str:
    """JSON, gzip, base64: letters, digits, `+`, `/` and `=` only, the same for the same content."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def data_block(name: str, content: object) -> str:
    """An element whose type no browser runs."""
    return f'<script type="application/octet-stream" id="{name}">{packed(content)}</script>\n'


def policy(script: str, style: str) -> str:
    """A Content-Security-Policy that allows this script and this style, and nothing else from anywhere."""

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed(script)}; style-src {hashed(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def write_page(path: Path, title: str, rows: Iterable[Row]) -> Index:
    """Write the page atomically, chunk by chunk; the index that it holds comes back.

    Args:
        title: shown on the page, as text.
        rows: in the form of `plain_row`.
    """
    parts = resources.files("trl_ext.browse")
    script = "\n".join(parts.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS)
    style = parts.joinpath("page.css").read_text(encoding="utf-8")
    before, after = parts.joinpath("page.html").read_text(encoding="utf-8").split("<!-- data -->\n")
    index = Index()
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        file.write(before.replace("{policy}", policy(script, style)).replace("{style}", style))
        for number, chunk in enumerate(_chunks(rows)):
            for row in chunk:
                index.add(row)
            file.write(data_block(f"rows-{number}", chunk))
        file.write(data_block("index", index.content(title)))
        file.write(after.replace("{script}", script))
    return index


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk
