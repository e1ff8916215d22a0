"""What the pages of experiments have in common: intervals, commands, where runs come from, and pages of findings."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trl_ext.io import read_yaml, write_text
from trl_ext.redaction import redact_command
from trl_ext.runs.recipes import shown_command


def in_figures(interval: tuple[float, float]) -> str:
    """An interval of a difference."""
    return "{:+.3f} to {:+.3f}".format(*interval)


def in_code(command: Sequence[str]) -> str:
    """Script and arguments as they are typed, secrets masked, in Markdown."""
    return f"`{shlex.join(shown_command(command[0], redact_command(list(command[1:]))))}`"


def write_page_of_findings(
    page: Path, findings: Path, tables: Mapping[str, str], section: Callable[[str, str], str]
) -> None:
    """Write a page of what several experiments have found.

    Args:
        findings: a YAML file with `intro`, in which the names of `tables` are replaced by them, and a text for each
            experiment, in the order of the page.
        section: an experiment's part of the page, from its name and text.
    """
    texts = read_yaml(findings)
    intro = str(texts.pop("intro")).strip()
    for name, table in tables.items():
        intro = intro.replace(f"{{{name}}}", table)
    sections = [section(name, text) for name, text in texts.items()]
    write_text(page, "\n".join([f"{intro}\n", *sections]))
    print(f"wrote {page}")
