"""TRL's fused LM head, as it computes on a GPU, for tensors of another device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from trl.kernels import chunked_logprob
from trl.trainer import utils

_Function: Any = chunked_logprob.ChunkedLogProbFunction


@contextlib.contextmanager
def head_as_on_gpu() -> Iterator[None]:
    """In the block the head scores valid positions only and folds its tiles in place, as with Triton.

    Without it, on a CPU, every position is scored, and a tile is folded by torch operations with copies of it. What is
    computed is not right: it is for tensors without values.
    """
    # In place of kernels that write into their arguments and allocate nothing.
    folds: dict[str, Any] = dict.fromkeys(("_forward_tile", "_backward_tile", "_addmm_fp32"), lambda *_, **__: None)
    with patch.multiple(chunked_logprob, **folds), patch.object(utils, "_use_triton", lambda device: True):
        yield


@contextlib.contextmanager
def head_within(block: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """In the block, the head's forward and backward passes run within a `block()` of their own each."""

    def within(method: Callable[..., Any]) -> staticmethod[..., Any]:
        def run(*args: object) -> Any:
            with block():
                return method(*args)

        return staticmethod(run)

    with patch.multiple(_Function, forward=within(_Function.forward), backward=within(_Function.backward)):
        yield
