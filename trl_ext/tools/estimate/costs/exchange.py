"""What is moved around a step: gradients between GPUs, the optimizer's states, the weights to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl_ext.tools.estimate.costs.counting import ModelCosts
from trl_ext.tools.estimate.costs.operations import Work

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun

_ADAM = 28  # bytes per parameter in float32: weight, gradient and both moments read; weight and moments written
_CLIPPING = 12  # gradient read for the norm; read and written to scale it
_HANDOVER = 2  # times that a copy of the weights is read and written on its way into the engine


def _ring(bytes_: float, gpus: int) -> float:
    """Bytes that a GPU sends so that all gather, or that each has its part of the sum (reduce-scatter)."""
    return bytes_ * (gpus - 1) / gpus


def _width(run: PlannedRun) -> int:
    """Bytes of a number on the wire: under DeepSpeed weights are kept, and gradients exchanged, in the half precision.

    DDP sums gradients of the weights' own dtype, which autocast leaves as it is.
    """
    half = run.autocast_dtype if run.launch.zero_stage else None
    return (half or run.weights_dtype).itemsize


def gradient_exchange(run: PlannedRun, costs: ModelCosts, micro_batches: int) -> Work:
    """Of one optimizer step, and under ZeRO-3 the weights too.

    DDP and ZeRO-1 exchange once per step, ZeRO-2 and ZeRO-3 after every micro-batch, because the gradients are kept in
    parts. All but ZeRO-3 sum up everywhere, which is twice a ring, ZeRO-1 and ZeRO-2 because one bucket holds the parts
    of several ranks (`use_multi_rank_bucket_allreduce`). ZeRO-3 gathers the weights for the forward pass, for the
    backward pass, and for the recomputed forward pass; at most so often, for a small model keeps them in between.
    """
    gpus, stage = run.launch.gpus, run.launch.zero_stage
    once = _ring(costs.trained_parameters * _width(run), gpus)
    times = micro_batches if stage >= 2 else 1
    if stage < 3:
        return Work(wire_bytes=times * 2 * once)
    gathered = (2 + run.config.gradient_checkpointing) * _ring(costs.parameters * _width(run), gpus)
    return Work(wire_bytes=times * (once + gathered))


def optimizer_work(run: PlannedRun, costs: ModelCosts) -> Work:
    """Clipping and Adam on a GPU's part of the parameters; under ZeRO-1 and ZeRO-2 the new weights are gathered."""
    gpus, stage = run.launch.gpus, run.launch.zero_stage
    own = costs.trained_parameters / (gpus if stage else 1)
    gathered = _ring(costs.trained_parameters * _width(run), gpus) if stage in (1, 2) else 0.0
    return Work(other_bytes=own * (_ADAM + _CLIPPING), wire_bytes=gathered)


def sync_work(run: PlannedRun, costs: ModelCosts, wire_dtype_bytes: int) -> Work:
    """The policy's weights to the engine: gathered under ZeRO-3, converted, and copied; over the wire to a server."""
    if run.engine == "hf":
        return Work()
    size, count = _width(run), costs.parameters
    moved = count * (size + wire_dtype_bytes + 2 * _HANDOVER * wire_dtype_bytes)
    wire: Any = _ring(count * size, run.launch.gpus) if run.launch.zero_stage == 3 else 0.0
    if run.engine == "server":
        wire += count * wire_dtype_bytes
    return Work(other_bytes=moved, wire_bytes=wire)
