"""Autocast's copies of the weights: what a graph keeps of them for its backward pass, or makes again there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor


class _Cast(NamedTuple):
    """Of a weight, which does not change until it is made again."""

    weight: Tensor
    dtype: torch.dtype
    transposed: bool


def casts_made_again() -> AbstractContextManager[object]:
    """In the block operations keep the weights themselves and not their copies in autocast's dtype."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Tensor | _Cast:
    node, transposed = tensor.grad_fn, False
    if node is not None and node.name() == "TBackward0":
        node, transposed = node.next_functions[0][0], True
    if node is not None and node.name() == "ToCopyBackward0":
        weight = getattr(node.next_functions[0][0], "variable", None)  # of a leaf
        if weight is not None and tensor.shape == (weight.T if transposed else weight).shape:
            return _Cast(weight, tensor.dtype, transposed)
    # A weight itself, whose values ZeRO-3 takes away and brings back; or a result, which must not keep its own graph.
    return tensor if tensor.is_leaf else tensor.detach()


def _unpack(kept: Tensor | _Cast) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    cast = kept.weight.detach().to(kept.dtype)
    return cast.T if kept.transposed else cast
