"""Prompt templates: text files with one placeholder, `{question}`.

`r1_zero.prompt` (arXiv:2501.12948, table 1) and `question_only.prompt` ship with the package; any other file can be
named by its path. An editor's newline at the end of the file is not part of the template.
"""

from importlib.resources import files
from pathlib import Path

from trl_ext.registry import unknown

PLACEHOLDER = "{question}"


def prompt_names() -> list[str]:
    """The names of the shipped templates, sorted."""
    return sorted(f.name.removesuffix(".prompt") for f in files(__package__).iterdir() if f.name.endswith(".prompt"))


def load_prompt(name_or_path: str | Path) -> str:
    """Read a template by its shipped name (`r1_zero`) or by the path of a file.

    Raises:
        ValueError: neither a shipped name nor an existing file, or the template lacks `{question}`.
    """
    names = prompt_names()
    if str(name_or_path) in names:
        text = (files(__package__) / f"{name_or_path}.prompt").read_text(encoding="utf-8")
    elif Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        raise ValueError(f"{unknown('prompt', str(name_or_path), names)}, or a file's path")
    return _checked(text.removesuffix("\n"), str(name_or_path))


def format_prompt(template: str, question: str) -> str:
    """Put `question` where the template says `{question}`; every other brace, in either text, is left as it is.

    Raises:
        ValueError: the template has no `{question}`.
    """
    return _checked(template, template).replace(PLACEHOLDER, question)


def _checked(template: str, label: str) -> str:
    if PLACEHOLDER not in template:
        raise ValueError(f"prompt {label!r} has no {PLACEHOLDER} placeholder")
    return template
