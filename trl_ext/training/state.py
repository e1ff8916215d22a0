"""State of a trainer as plain values, and back: what a checkpoint may hold without code that runs when it is read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch


def plain_state(value: Any) -> Any:
    """`value` in the types that `torch.load` takes without running code; what is of another type, as text."""
    if isinstance(value, Mapping):
        return {key: plain_state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain_state(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)) else str(value)


def restored(like: Any, value: Any) -> Any:
    """`plain_state` taken back, in the containers of the value that it replaces."""
    if isinstance(like, deque):
        return deque(value, maxlen=like.maxlen)
    if isinstance(like, defaultdict):
        found: defaultdict[Any, Any] = defaultdict(like.default_factory)
        for key, item in value.items():
            found[key] = restored(found[key], item)
        return found
    if isinstance(like, dict):
        return {key: restored(like.get(key), item) for key, item in value.items()}
    return value
