"""Find words that are not the field's, such as "finetuning", and say what to write instead.

The words are in retired_words.toml next to this file. Prints one line `file:line: word -> use` for each, and exits with
status 1 if there are any. Without arguments it reads everything in the repository that a person reads.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_suffix(".toml")
READ = (
    "trl_ext",
    "recipes",
    "scripts",
    "accelerate_configs",
    "tests",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    ".github",
    "pyproject.toml",
)
SUFFIXES = {".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
# What a program of the discovery loop has written, labeled answers, pinned versions, and the words themselves.
NOT_READ = ("recipes/kissing_number/scripted/*", "tests/data/*", "scripts/constraints*", "scripts/retired_words.*",
            "tests/test_retired_words.py")  # fmt: skip
SPACE = r"(?:[ _-]|\s*\n[\s#>*]*)"  # of a phrase: in prose, in an identifier, and where a line or a comment ends


class Word(NamedTuple):
    """A retired word, what to use instead, and where it is looked for."""

    pattern: re.Pattern[str]
    use: str
    only: list[str]
    exceptions: list[str]

    def applies_to(self, path: str) -> bool:
        """Whether the word is retired in this file."""
        return (not self.only or matches(path, self.only)) and not matches(path, self.exceptions)


def matches(path: str, patterns: list[str] | tuple[str, ...]) -> bool:
    """Whether a path relative to the repository fits one of the patterns; `*` is any text, `/` included."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def load_words() -> list[Word]:
    """The table of retired words."""
    entries = tomllib.loads(WORDS.read_text(encoding="utf-8"))["word"]
    return [
        Word(
            re.compile(rf"(?<![a-z])(?:{entry['find'].replace(' ', SPACE)})(?![a-z])", re.IGNORECASE),
            entry["use"], entry.get("only", []), entry.get("except", []),
        )
        for entry in entries
    ]  # fmt: skip


def files_in(paths: list[Path]) -> Iterator[Path]:
    """The files under `paths` that a person reads."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.is_file() and not matches(relative(file), NOT_READ):
                yield file


def relative(path: Path) -> str:
    """The path as the table writes it."""
    return path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else path.name


def find_in(text: str, path: str, words: list[Word]) -> Iterator[tuple[int, str, str]]:
    """Line, word and what to use instead, for every retired word in a file's text, from its top."""
    hits = [(match.start(), match[0], word.use) for word in words if word.applies_to(path)
             for match in word.pattern.finditer(text)]  # fmt: skip
    for start, said, use in sorted(hits):
        yield text.count("\n", 0, start) + 1, " ".join(said.split()), use


def main() -> None:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders (default: all of the repository)")
    paths = parser.parse_args().paths or [ROOT / name for name in READ]
    if missing := [str(path) for path in paths if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    words = load_words()
    count = 0
    for file in files_in(paths):
        name = relative(file)
        for line, said, use in find_in(file.read_text(encoding="utf-8"), name, words):
            print(f"{name}:{line}: {said} -> {use}")
            count += 1
    if count:
        sys.exit(f"{count} retired words")


if __name__ == "__main__":
    main()
