"""What a worker runs: the comparison of one answer with one reference answer, by the function's import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def compare(function: str, options: Mapping[str, Any], answer: str, truth: str) -> tuple[bool, str]:
    """Verdict and reason of `function`, as `module:name`, which is imported when it is first asked for.

    Raises:
        ImportError, AttributeError: there is no such function.
    """
    module, _, name = function.partition(":")
    correct, reason = getattr(importlib.import_module(module), name)(answer, truth, **options)
    return bool(correct), str(reason)
