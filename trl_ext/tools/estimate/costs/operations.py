"""Work, and how it grows: FLOPs, bytes moved, operations dispatched, counted while real code runs.

Letters: B rows, Q queries of a row (tokens that are computed), K keys of a row (tokens that are attended to).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = (  # attention on a CPU, which torch's table of FLOPs lacks
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
)
_PLACELESS = {_ATEN.addmm_: _ATEN.addmm, _ATEN.baddbmm_: _ATEN.baddbmm}  # in-place variants, which it lacks too
_LOOKUPS = (_ATEN.embedding,)  # read the rows asked for, not the table
Numbers = float | np.ndarray
Measure = Callable[[int, int], np.ndarray]  # queries and earlier keys of a row -> a column of `Polynomial`

_SIZES = ((16, 8), (32, 8), (16, 24), (32, 40))  # queries, and keys of earlier tokens: they fix the four terms


@dataclass(frozen=True)
class Work:
    """What has to be done; numbers, or arrays of as many passes."""

    flops: Any = 0.0  # of matrix products and attention
    product_bytes: Any = 0.0  # that these read and write
    other_bytes: Any = 0.0  # of all other operations
    operations: Any = 0.0  # that Python dispatches
    wire_bytes: Any = 0.0  # to or from other GPUs

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: Numbers) -> Work:
        return Work(*(a * times for a in vars(self).values()))


@dataclass(frozen=True)
class Polynomial:
    """Costs of a pass: (4, 4) coefficients of 1, B Q, B Q K and B K for the first four fields of `Work`."""

    coefficients: np.ndarray

    def __call__(self, rows: Numbers, queries: Numbers, keys: Numbers) -> Work:
        """The work of a pass; arrays for several."""
        terms = (1.0, rows * queries, rows * queries * keys, rows * keys)
        return Work(*(sum(c * term for c, term in zip(row, terms, strict=True)) for row in self.coefficients))

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial(self.coefficients + other.coefficients)

    def __sub__(self, other: Polynomial) -> Polynomial:
        return Polynomial(self.coefficients - other.coefficients)


class Counter(TorchDispatchMode):
    """Adds up the operations of a block.

    Attributes:
        totals: (4,) FLOPs, bytes of products, bytes of the others, operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.totals = np.zeros(4)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        flops = _flops(func, args, kwargs or {}, out)
        moved = 0 if func.is_view or func is _ATEN._unsafe_view.default else _moved(args, kwargs, out)
        if func.overloadpacket in _LOOKUPS:
            moved = 2 * _moved(out)
        self.totals += (flops, moved if flops else 0, 0 if flops else moved, 1)
        return out


def _flops(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> float:
    packet = func.overloadpacket
    if packet is _FORWARD:
        return float(sdpa_flop_count(*(args[i].shape for i in range(3))))
    if packet is _BACKWARD:
        return float(sdpa_backward_flop_count(*(args[i].shape for i in range(4))))
    count = flop_registry.get(_PLACELESS.get(packet, packet))
    return float(count(*args, **kwargs, out_val=out)) if count else 0.0


def _moved(*values: object) -> int:
    """Bytes of all tensors in arguments and results."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += _moved(*value)
        elif isinstance(value, dict):
            total += _moved(*value.values())
    return total


def fit(measure: Measure) -> Polynomial:
    """The polynomial through `measure(queries, earlier keys)` of one row at `_SIZES`."""
    terms = np.array([(1.0, q, q * (q + past), q + past) for q, past in _SIZES])
    columns = np.stack([measure(q, past) for q, past in _SIZES])
    return Polynomial(np.linalg.solve(terms, columns).T)
