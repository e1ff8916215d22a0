"""The function that a worker runs: it compares one answer with one reference answer, by the import path given."""

from __future__ import annotations

import importlib
from collections.abc import Mapping


def compare(function: str, options: Mapping[str, object], answer: str, reference: str) -> tuple[bool, str]:
    """Verdict and reason of the function at `module:name`."""
    module, _, name = function.partition(":")
    correct, reason = getattr(importlib.import_module(module), name)(answer, reference, **options)
    return bool(correct), str(reason)
