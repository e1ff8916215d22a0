"""TRL's fused LM head on a device that is not a GPU: in tiles that fit it, or computing as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils

TILE = 1024  # columns; others are in docs/results/step.md
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
def tiles_in_cache(vocabulary: int, device: torch.device) -> Iterator[None]:
    """In the block, on a CPU, a tile of the head's logits has at most 1,024 of the vocabulary's columns.

    TRL's has 32,768, for a GPU's matrix products. On a CPU such a tile and the temporary tensors of its folding do not
    fit into the caches, and rows lie 128 KiB apart, however small the vocabulary is.

    Args:
        vocabulary: number of tokens.
        device: of the model.
    """
    if device.type != "cpu":
        yield
        return
    with patch.object(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", min(vocabulary, TILE)):
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
