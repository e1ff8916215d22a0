"""TRL's fused LM head on a device that is not a GPU: in tiles that fit it, or computing as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.kernels import chunked_logprob
from trl.trainer import utils

TILE = 1024  # columns; others are in docs/results/step.md
_Function: Any = chunked_logprob.ChunkedLogProbFunction
_trl_forward, _trl_backward = chunked_logprob._forward_tile, chunked_logprob._backward_tile


@contextlib.contextmanager
def head_as_on_gpu() -> Iterator[None]:
    """In the block the head scores valid positions only and folds its tiles in place, as with Triton.

    Without it, on a CPU, every position is scored, and a tile is folded by torch operations that copy it. What is
    computed is not right: it is for tensors without values.
    """
    # In place of kernels that write into their arguments and allocate nothing.
    folds: dict[str, Any] = dict.fromkeys(("_forward_tile", "_backward_tile", "_addmm_fp32"), lambda *_, **__: None)
    with patch.multiple(chunked_logprob, **folds), patch.object(utils, "_use_triton", lambda device: True):
        yield


@contextlib.contextmanager
def tiles_in_cache(vocabulary: int, device: torch.device) -> Iterator[None]:
    """In the block, on a CPU, the head's tiles have at most 1,024 of the vocabulary's columns and are folded in place.

    TRL's have 32,768, for a GPU's matrix products. On a CPU such a tile and the temporary tensors of its folding do not
    fit into the caches, and rows lie 128 KiB apart, however small the vocabulary is.

    Args:
        vocabulary: number of tokens.
        device: of the model.
    """
    if device.type != "cpu" or utils._use_triton(device):
        yield
        return
    with (
        patch.object(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", min(vocabulary, TILE)),
        patch.object(utils, "_ChunkedLogProbFunction", FoldedInPlace),
    ):
        yield


class FoldedInPlace(_Function):
    """The same function, bit for bit, with fewer passes over a tile and without copies of it."""

    @staticmethod
    def forward(*args: object) -> tuple[Tensor | None, ...]:
        """TRL's, with a fold of ours."""
        with patch.object(chunked_logprob, "_forward_tile", FoldedInPlace.fold_forward):
            return _Function.forward(*args)

    @staticmethod
    def backward(*args: object) -> tuple[Tensor | None, ...]:
        """TRL's, with a fold of ours."""
        with patch.object(chunked_logprob, "_backward_tile", FoldedInPlace.fold_backward):
            return _Function.backward(*args)

    @staticmethod
    def fold_forward(
        tile: Tensor, stride: int, targets: Tensor, largest: Tensor, sum_exp: Tensor, x_sum_exp: Tensor,
        sq_sum_exp: Tensor, z_sum: Tensor, before: Tensor, target_logit: Tensor, start: int, columns: int,
        **kwargs: float,
    ) -> None:  # fmt: skip
        """As TRL's `_forward_tile`: (tokens, columns) logits, which are overwritten, into the tokens' sums."""
        more = ("HAS_SOFTCAP", "HAS_LOG_SUM_SQ_PROBS", "HAS_MEAN_LOGITS", "HAS_IS_TOP1")
        if any(kwargs[name] for name in more):
            sums = largest, sum_exp, x_sum_exp, sq_sum_exp, z_sum, before, target_logit
            _trl_forward(tile, stride, targets, *sums, start, columns, **kwargs)
            return
        logits = FoldedInPlace._times(tile.float(), kwargs["logit_scale"], kwargs["inv_t"])
        new_largest = torch.maximum(largest, logits.amax(-1))
        rescale = torch.exp(largest - new_largest)
        exp = (logits - new_largest.unsqueeze(-1)).exp_()
        sum_exp.mul_(rescale).add_(exp.sum(-1))
        if kwargs["HAS_ENTROPY"]:
            x_sum_exp.mul_(rescale).add_(exp.mul_(logits).sum(-1))
        largest.copy_(new_largest)
        places, is_inside = FoldedInPlace._places(targets, start, columns)
        target_logit.copy_(torch.where(is_inside, logits.gather(-1, places).squeeze(-1), target_logit))

    @staticmethod
    def fold_backward(
        tile: Tensor, stride: int, targets: Tensor, log_z: Tensor, entropy: Tensor, grad_logprobs: Tensor,
        grad_entropy: Tensor, start: int, columns: int, **kwargs: float,
    ) -> None:  # fmt: skip
        """As TRL's `_backward_tile`: (tokens, columns) logits -> their gradient, in their place."""
        if kwargs["HAS_SOFTCAP"] or kwargs["HAS_ENTROPY_GRAD"] or not kwargs["HAS_LOGPROB_GRAD"]:
            given = log_z, entropy, grad_logprobs, grad_entropy
            _trl_backward(tile, stride, targets, *given, start, columns, **kwargs)
            return
        scale, inv_t = kwargs["logit_scale"], kwargs["inv_t"]
        gradient = FoldedInPlace._times(tile.float(), scale, inv_t).sub_(log_z.unsqueeze(-1)).exp_()
        places, is_inside = FoldedInPlace._places(targets, start, columns)
        gradient.scatter_add_(-1, places, -is_inside.float().unsqueeze(-1))
        tile.copy_(FoldedInPlace._times(gradient.mul_(-grad_logprobs.unsqueeze(-1)), inv_t, scale))

    @staticmethod
    def _times(values: Tensor, *factors: float) -> Tensor:
        """The values, multiplied in place by one factor after the other as TRL does, but not by 1."""
        for factor in factors:
            if factor != 1:
                values.mul_(factor)
        return values

    @staticmethod
    def _places(targets: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
        """(tokens, 1) each target's column of a tile, and (tokens,) whether it is one."""
        places = targets - start
        return places.clamp(0, columns - 1).unsqueeze(-1), (places >= 0) & (places < columns)


@contextlib.contextmanager
def head_recorded(record: Callable[..., object]) -> Iterator[None]:
    """In the block, `record` is called with the arguments of the head's function whenever the head is applied."""
    function = utils._ChunkedLogProbFunction

    def apply(*args: Any) -> Any:
        record(*args)
        return function.apply(*args)

    with patch.object(utils, "_ChunkedLogProbFunction", SimpleNamespace(apply=apply)):
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
