"""Prompt templates: files with one placeholder, `{question}`, of a text or of a conversation.

`r1_zero.prompt` (arXiv:2501.12948, table 1) and `question_only.prompt` are texts, which the model continues as they
are. `chat.yaml` is a list of messages with `role` and `content`, which the model's own chat template makes a text of.
Any other file can be named by its path: a list of messages where it ends in .yaml, .yml or .json, else a text. An
editor's newline at the end of a text is not part of the template.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeAlias

import yaml

from trl_ext.generation.conversation import Conversation, conversation, with_system
from trl_ext.registry import unknown

Template: TypeAlias = str | Conversation
PLACEHOLDER, CHAT = "{question}", "chat"
_TEXT, _CONVERSATIONS = ".prompt", (".yaml", ".yml", ".json")
_SHIPPED = files(__package__) / "templates"


def prompt_names() -> list[str]:
    """The names of the shipped templates, sorted."""
    names = (Path(file.name) for file in _SHIPPED.iterdir())
    return sorted(name.stem for name in names if name.suffix in (_TEXT, *_CONVERSATIONS))


def load_template(name_or_path: str | Path) -> Template:
    """Read a template by its shipped name (`r1_zero`, `chat`) or by the path of a file.

    Raises:
        ValueError: neither a shipped name nor an existing file, no `{question}`, or no conversation that a user ends.
    """
    shipped = _SHIPPED / f"{name_or_path}{_CONVERSATIONS[0]}"
    if str(name_or_path) in prompt_names() and shipped.is_file():
        return _conversation(shipped.read_text(encoding="utf-8"), str(name_or_path))
    if Path(name_or_path).suffix in _CONVERSATIONS and Path(name_or_path).is_file():
        return _conversation(Path(name_or_path).read_text(encoding="utf-8"), str(name_or_path))
    return load_prompt(name_or_path)


def load_prompt(name_or_path: str | Path) -> str:
    """Read a text template by its shipped name (`r1_zero`) or by the path of a file.

    Raises:
        ValueError: neither a shipped name nor an existing file, or the template lacks `{question}`.
    """
    text = _SHIPPED / f"{name_or_path}{_TEXT}"
    if str(name_or_path) in prompt_names() and text.is_file():
        template = text.read_text(encoding="utf-8")
    elif Path(name_or_path).is_file():
        template = Path(name_or_path).read_text(encoding="utf-8")
    elif (_SHIPPED / f"{name_or_path}{_CONVERSATIONS[0]}").is_file():
        raise ValueError(f"prompt {str(name_or_path)!r} is a conversation, not a text: load_template reads it")
    else:
        raise ValueError(f"{unknown('prompt', str(name_or_path), prompt_names())}, or a file's path")
    return _checked(template.removesuffix("\n"), str(name_or_path))


@dataclass(frozen=True)
class Asking:
    """How a problem is put to the model.

    Attributes:
        template: a text, or a conversation.
        system_prompt: the system message of every conversation; None leaves them as they are.
        keeps_conversations: whether a problem that is a conversation is the prompt as it stands; if not, the template
            is filled with what its last message says.
    """

    template: Template
    system_prompt: str | None = None
    keeps_conversations: bool = False

    @classmethod
    def named(cls, name_or_path: str, system_prompt: str | None = None) -> Asking:
        """The template of this name or path; a ValueError for a system prompt in front of a text."""
        template = load_template(name_or_path)
        if system_prompt is not None and isinstance(template, str):
            raise ValueError(
                f"system_prompt is a message of a conversation, and prompt {name_or_path!r} is a text: choose --prompt "
                "chat or a file of messages, or write it into the template"
            )
        return cls(template, system_prompt, name_or_path == CHAT)

    @property
    def is_chat(self) -> bool:
        """Whether prompts are conversations."""
        return not isinstance(self.template, str)

    def prompt(self, problem: str | Conversation) -> Template:
        """A text, or messages of which a chat template makes one."""
        question = problem if isinstance(problem, str) else problem[-1]["content"]
        if isinstance(self.template, str):
            return format_prompt(self.template, question)
        if self.keeps_conversations and not isinstance(problem, str):
            return with_system(problem, self.system_prompt)
        filled = [{**said, "content": said["content"].replace(PLACEHOLDER, question)} for said in self.template]
        return with_system(filled, self.system_prompt)


def format_prompt(template: str, question: str) -> str:
    """Put `question` where the template says `{question}`; every other brace, in either text, is left as it is.

    Raises:
        ValueError: the template has no `{question}`.
    """
    return _checked(template, template).replace(PLACEHOLDER, question)


def _conversation(text: str, label: str) -> Conversation:
    try:
        messages = conversation(yaml.safe_load(text))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"prompt {label!r}: {' '.join(str(error).split())}") from error
    _checked("".join(message["content"] for message in messages), label)
    return messages


def _checked(template: str, label: str) -> str:
    if PLACEHOLDER not in template:
        raise ValueError(f"prompt {label!r} has no {PLACEHOLDER} placeholder")
    return template
