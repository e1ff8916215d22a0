"""A device apart from the host, as Apple's GPU (MPS) is one: what it refuses is refused here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any
from unittest.mock import patch

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_ext.tools.estimate.memory.ledger import Answered

aten = torch.ops.aten


class WithoutFloat64(TorchDispatchMode):
    """As on MPS, a tensor of float64 is a TypeError.

    Args:
        device: whose tensors are meant; None for all of them, where host and device are the same CPU.
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for part in tree_leaves(found):
            if isinstance(part, Tensor) and part.dtype == torch.float64 and self.device in (None, part.device.type):
                raise TypeError(
                    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
                )
        return found


class Kernels(TorchDispatchMode):
    """Operations without a kernel for MPS are refused; those without one for "meta" have some result of their shape."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.name().removeprefix("aten::")  # type: ignore[attr-defined]
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        if not any(tensor.device.type == "meta" for tensor in tensors):
            return func(*args, **(kwargs or {}))
        if name in without_kernel():
            raise NotImplementedError(f"The operator 'aten::{name}' is not currently implemented for the MPS device.")
        if func is aten._to_copy.default and torch.device((kwargs or {}).get("device") or "meta").type == "cpu":
            return torch.ones(args[0].shape, dtype=(kwargs or {}).get("dtype") or args[0].dtype)
        if func is aten.nonzero.default:
            return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.long)
        if func is aten.unique_dim.default:
            rows = torch.arange(len(args[0]), device=args[0].device)
            return args[0].clone(), rows, torch.ones_like(rows)
        return func(*args, **(kwargs or {}))


@functools.cache
def without_kernel() -> frozenset[str]:
    """Operations that this torch has no kernel for on MPS, by its own table."""
    text = (files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
    table = {entry["func"].split("(")[0]: entry for entry in yaml.load(text, yaml.CSafeLoader)}

    def has_kernel(entry: dict[str, Any]) -> bool:
        if "structured_delegate" in entry:
            return has_kernel(table[entry["structured_delegate"]])
        places = {place.strip() for some in entry.get("dispatch", {"Composite": ""}) for place in some.split(",")}
        return any(place == "MPS" or place.startswith("Composite") for place in places)

    return frozenset(name for name, entry in table.items() if not has_kernel(entry))


@contextlib.contextmanager
def on_a_device() -> Iterator[str]:
    """In the block "meta" stands for MPS: without float64, with its kernels, and apart from the host.

    Its tensors have shapes, dtypes and gradients, and no values: what Python asks of them is answered with 1, or false.
    """
    with contextlib.ExitStack() as stack:
        asked = torch.is_autocast_enabled  # which does not know "meta"
        stack.enter_context(
            patch.object(torch, "is_autocast_enabled", lambda *kind: kind != ("meta",) and asked(*kind))
        )
        for mode in (Kernels(), Answered(lambda mask: mask.numel()), WithoutFloat64("meta")):
            stack.enter_context(mode)
        yield "meta"
