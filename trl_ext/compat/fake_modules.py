"""Modules of fake tensors: torch converts parameters by swapping them, which fails for those that are referenced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import masking_utils
from trl.trainer import grpo_trainer


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(function)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None and (new := function(parameter)) is not parameter:
                module._parameters[name] = nn.Parameter(new, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module


def parameters_replaced() -> AbstractContextManager[Any]:
    """In the block `Module.to` puts converted parameters in the place of the others; parameters without gradients."""
    return patch.object(nn.Module, "_apply", _convert)


def rows_not_packed() -> AbstractContextManager[Any]:
    """In the block transformers takes no row for several in one, which it tells by values that fake tensors lack.

    Taken for several, a row has a mask, and keys and values that are repeated for all heads.
    """
    return patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)


def reference_made_by(make: Callable[[], nn.Module]) -> AbstractContextManager[Any]:
    """In the block `GRPOTrainer` has `make` make its reference model, which it would load by the policy's name."""
    return patch.object(grpo_trainer, "create_model_from_path", lambda *_, **__: make())
