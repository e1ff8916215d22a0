"""Secrets in settings and commands are masked before they are written: by the name of a setting, and by what they look
like wherever they stand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "<masked>"

_SECRET_NAME = re.compile(
    r"(token|password|passwd|passphrase|secret|apikey|accesskey|secretkey|privatekey|wandbkey|credentials?"
    r"|authorization|auth|cookie)$"
)
_NO_SECRET_NAME = re.compile(
    r"(eos|bos|pad|unk|sep|cls|mask|stop|image|video|audio|end|start|special|prompt|min|max|new)token$"
)
_NAME_OF_A_HASH = re.compile(r"(revision|commit|sha\d*|hash|fingerprint)$")
_LOOKS_SECRET = re.compile(
    r"\b(hf_(oauth_|jwt_)?[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|wandb_v1_\w{16,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_USERINFO = re.compile(r"(?<=://)[^/\s\"']*@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}")
_ASSIGNED = re.compile(
    r"""(?ix) ([\w.-]* (?:token|passw(?:or)?d|passphrase|secret|[_-]?key|credentials?|authorization|auth|cookie))
    (["']?\s*[=:]\s*) ("[^"]*"|'[^']*'|[^\s"',}\]&;]+)"""
)
_SHORTEST = 8  # of a secret in the environment, which is looked for everywhere


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `hub_token`, `api_key`; `eos_token` is none."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return bool(_SECRET_NAME.search(letters)) and not _NO_SECRET_NAME.search(letters)


def redact(value: Any, name: str = "") -> Any:
    """A setting's value with the secrets in it masked, in dicts and lists of any depth; others are left as they are."""
    if type(value) is dict:
        inherited = name if is_secret_name(name) else ""
        return {key: redact(item, inherited or str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redact(item, name) for item in value)
    if not isinstance(value, str):
        return value
    if is_secret_name(name):
        return MASK if value else value
    if _WANDB_KEY.fullmatch(value) and not _NAME_OF_A_HASH.search(re.sub(r"[^a-z0-9]", "", name.lower())):
        return MASK
    masked = redact_text(value)
    return value if masked == value else masked


def redact_text(text: str) -> str:
    """A text with what looks like a secret masked: tokens, passwords in URLs, `name=value` and JSON, the environment's
    secrets.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except ValueError:
            pass
        else:
            return text if redact(content) == content else json.dumps(redact(content))
    for secret in _of_the_environment():
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(f"{MASK}@", text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _LOOKS_SECRET.sub(MASK, text)
    return _ASSIGNED.sub(_masked_value, text)


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line with its secrets masked."""
    shown, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            shown.append(redact_text(word))
        else:
            shown.append(redact(word, name))
    return shown


def masked_names(value: Any, name: str = "") -> Iterator[str]:
    """Names, as `dict.key`, of the settings in which something was masked."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from masked_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from masked_names(item, name)
    elif isinstance(value, str) and MASK in value:
        yield name


def _of_the_environment() -> list[str]:
    return [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST]


def _masked_value(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    if not is_secret_name(name):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{MASK}{quote}"
