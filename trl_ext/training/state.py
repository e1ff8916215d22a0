"""A trainer's state as plain values and back, so that reading a checkpoint runs no code."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch


def to_plain(value: object) -> Any:
    """Convert to the types that `torch.load` reads without running code; other types become text."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [to_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)) else str(value)


def from_plain(like: object, value: Any) -> Any:
    """Invert `to_plain`, with the container types of the value that it replaces."""
    if isinstance(like, deque):
        return deque(value, maxlen=like.maxlen)
    if isinstance(like, defaultdict):
        found: defaultdict[Any, Any] = defaultdict(like.default_factory)
        for key, item in value.items():
            found[key] = from_plain(found[key], item)
        return found
    if isinstance(like, dict):
        return {key: from_plain(like.get(key), item) for key, item in value.items()}
    return value
