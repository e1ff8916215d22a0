"""What of other libraries is ours in this process: functions that replace theirs, and entries of torch's registry."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch

import trl_ext

LIBRARIES = ("accelerate", "deepspeed", "peft", "torch", "transformers", "trl", "vllm")
OURS = str(Path(trl_ext.__file__).parent)


def patched() -> list[str]:
    """Names of modules of other libraries, and of their classes, whose code is in trl_ext."""
    modules = [(name, vars(module)) for name, module in [*sys.modules.items()] if name.split(".")[0] in LIBRARIES]
    found = {f"{name}.{key}" for name, members in modules for key, value in _of(name, members) if _is_ours(value)}
    return sorted(found | {"torch.load" for *_, restore in torch.serialization._package_registry if _is_ours(restore)})


def _of(module: str, members: dict[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in [*members.items()]:
        yield key, value
        if isinstance(value, type) and value.__module__ == module:
            yield from ((f"{key}.{name}", of) for name, of in [*vars(value).items()])


def _is_ours(value: object) -> bool:
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(OURS)
