"""Tensors as one stream of bytes in parts of a bounded size, and back; a tensor may span several parts.

The bytes are numbers and are never unpickled.
"""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PART_BYTES = 32 * 2**20


def parts(weights: Iterator[tuple[str, Tensor]], limit: int = PART_BYTES) -> Iterator[dict[str, Any]]:
    """The weights' bytes, one tensor after the other, in parts of `limit` bytes; each announces what begins in it."""
    begun: list[tuple[str, str, list[int]]] = []
    data = bytearray()
    for name, tensor in weights:
        begun.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        while raw:
            taken = raw[: limit - len(data)]
            data += taken
            raw = raw[len(taken) :]
            if len(data) == limit:
                yield _part(begun, data)
                begun, data = [], bytearray()
    if begun or data:
        yield _part(begun, data)


def body_of(part: Mapping[str, Any]) -> bytes:
    """A part as the body of a request: `{"update_info": part}` in JSON, where base64 needs no search for escapes."""
    described = json.dumps({name: value for name, value in part.items() if name != "data"})
    return "".join(['{"update_info": ', described[:-1], ', "data": "', part["data"], '"}}']).encode("ascii")


def _part(begun: Sequence[tuple[str, str, list[int]]], data: bytearray) -> dict[str, Any]:
    names, dtype_names, shapes = ([row[i] for row in begun] for i in range(3))
    encoded = base64.b64encode(data).decode()
    return {"names": names, "dtype_names": dtype_names, "shapes": shapes, "data": encoded}


class TensorStream:
    """Tensors out of a stream of bytes."""

    def __init__(self) -> None:
        self._announced: deque[tuple[str, torch.dtype, list[int]]] = deque()
        self._bytes = bytearray()

    def announce(self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[list[int]]) -> None:
        """Append tensors to those whose bytes are to come; types are named as by torch, such as "bfloat16"."""
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} has an unknown type, {dtype_name!r}")
            self._announced.append((name, dtype, shape))

    def feed(self, data: bytes) -> list[tuple[str, Tensor]]:
        """The tensors that are complete with these bytes, on the CPU; a `ValueError` if bytes are left over."""
        self._bytes += data
        complete: list[tuple[str, Tensor]] = []
        while self._announced:
            name, dtype, shape = self._announced[0]
            size = math.prod(shape) * dtype.itemsize
            if len(self._bytes) < size:
                return complete
            self._announced.popleft()
            raw, self._bytes = self._bytes[:size], self._bytes[size:]
            tensor = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            complete.append((name, tensor.view(shape)))
        if self._bytes:
            raise ValueError(f"{len(self._bytes)} bytes belong to no tensor")
        return complete

    def check_complete(self) -> None:
        """Refuse, by a `ValueError` with its name, an end in the middle of a tensor."""
        if self._announced:
            raise ValueError(f"the weights end before {self._announced[0][0]} is complete")
