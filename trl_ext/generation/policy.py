"""How completions are sampled from a policy while it is trained: settings, and the state that has to be put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

# vLLM looks for stop strings in its own text, without special tokens unless it is told so.
VLLM_SEES_SPECIAL_TOKENS = {"skip_special_tokens": False, "spaces_between_special_tokens": False}


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode while the block runs."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextlib.contextmanager
def overridden(owner: object, asked: dict[str, Any]) -> Iterator[None]:
    """Other values of the owner's attributes while the block runs; None leaves one as it is."""
    before = {name: getattr(owner, name) for name, value in asked.items() if value is not None}
    for name in before:
        setattr(owner, name, asked[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def sampling_kwargs(config: Any) -> dict[str, Any]:
    """`stop` and `sampling_min_tokens` in the words of the engine that generates."""
    kwargs = dict(getattr(config, "generation_kwargs", None) or {})
    if config.use_vllm and config.stop:
        kwargs |= {"stop": config.stop, "include_stop_str_in_output": True, **VLLM_SEES_SPECIAL_TOKENS}
    if config.sampling_min_tokens:
        kwargs["min_tokens" if config.use_vllm else "min_new_tokens"] = config.sampling_min_tokens
    return kwargs
