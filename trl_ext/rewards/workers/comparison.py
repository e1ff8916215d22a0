"""The function that a worker runs: it compares one answer with one reference answer, by the import path given."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping

_comparison = functools.cache(pkgutil.resolve_name)


def compare(function: str, options: Mapping[str, object], answer: str, reference: str) -> tuple[bool, str]:
    """Verdict and reason of the function at `module:name`."""
    correct, reason = _comparison(function)(answer, reference, **options)
    return bool(correct), str(reason)
