"""Work -> seconds on a device, and which ceiling binds: the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_ext.tools.estimate.costs.operations import Work
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu

COMPUTE, MEMORY, WIRE, HOST = "compute", "memory bandwidth", "interconnect", "host"


@dataclass(frozen=True)
class Spent:
    """Seconds by what they are spent at; they add up to the whole."""

    by_ceiling: dict[str, float]

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(self.by_ceiling.values())

    @property
    def bound(self) -> str:
        """The ceiling that most of the time is spent at, or a dash where there is nothing to do."""
        return max(self.by_ceiling, key=self.by_ceiling.__getitem__) if self.seconds else "-"

    def __add__(self, other: Spent) -> Spent:
        return Spent({name: self.by_ceiling[name] + other.by_ceiling[name] for name in self.by_ceiling})

    def __mul__(self, times: float) -> Spent:
        return Spent({name: times * seconds for name, seconds in self.by_ceiling.items()})


NOTHING = Spent(dict.fromkeys((COMPUTE, MEMORY, WIRE, HOST), 0.0))


@dataclass(frozen=True)
class Machine:
    """Some equal devices, and what they reach."""

    gpu: Gpu
    efficiency: Efficiency
    hosts: int = 1

    def spend(self, work: Work, dtype: torch.dtype, host: Any = None) -> Spent:
        """What one device takes for some passes, one after the other.

        A pass's products take their FLOPs or their bytes, whichever is slower; the other operations take their bytes;
        Python runs ahead of an asynchronous device, so that there the slower of the two counts. Exchanges over the
        wire are not overlapped.

        Args:
            work: numbers, or arrays over the passes.
            dtype: of the matrix products.
            host: seconds of Python per pass; None for those of its operations.
        """
        gpu, reached = self.gpu, self.efficiency
        compute = np.asarray(work.flops / (self._peak(dtype) * reached.compute))
        bandwidth = gpu.bandwidth * reached.memory
        product, other = np.asarray(work.product_bytes / bandwidth), np.asarray(work.other_bytes / bandwidth)
        python = np.asarray(work.operations * reached.op_seconds if host is None else host)
        at_compute = np.where(compute >= product, compute, 0.0)
        at_memory = np.where(compute < product, product, 0.0) + other
        if gpu.asynchronous:
            waits = python > at_compute + at_memory
            at_compute, at_memory = np.where(waits, 0.0, at_compute), np.where(waits, 0.0, at_memory)
            python = np.where(waits, python, 0.0)
        wire = np.asarray(work.wire_bytes / self._wire())
        seconds = np.broadcast_arrays(at_compute, at_memory, wire, python)
        return Spent(dict(zip(NOTHING.by_ceiling, (float(part.sum()) for part in seconds), strict=True)))

    def _peak(self, dtype: torch.dtype) -> float:
        half = dtype in (torch.bfloat16, torch.float16)
        return self.gpu.bf16 if half else self.gpu.fp32

    def _wire(self) -> float:
        """Bytes/s of a ring over all devices, which its slowest link has."""
        within = self.gpu.interconnect * self.efficiency.interconnect
        return min(within, self.efficiency.network) if self.hosts > 1 else within
