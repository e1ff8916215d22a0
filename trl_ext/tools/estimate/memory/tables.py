"""The estimate of a GPU's memory, as lines for a person and as figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trl_ext.tools.estimate.memory.limits import Limits
from trl_ext.tools.estimate.memory.optimizers import source_line
from trl_ext.tools.estimate.memory.parts import Memory

COMPONENTS = (
    "parameters", "reference", "teachers", "gathered weights", "weight casts", "batches", "gradients",
    "gradient buckets", "optimizer", "activations", "lm head", "divergence", "backward", "engine weights", "KV cache",
    "engine rest", "sync buffers", "context", "margin",
)  # fmt: skip


def table(memory: Memory) -> list[str]:
    """GiB by component and moment; the moment of the peak is marked."""
    names = list(memory.moments)
    rows = [f"{'GiB':<18}" + "".join(f"{name:>16}" for name in names)]
    for component in COMPONENTS:
        sizes = [memory.moments[name].get(component, 0) for name in names]
        if any(sizes):
            rows.append(f"{component:<18}" + "".join(f"{_gib(size) if size else '-':>16}" for size in sizes))
    totals = [_gib(memory.total(name)) + (" <" if name == memory.peak else "") for name in names]
    rows.append(f"{'total':<18}" + "".join(f"{total:>16}" for total in totals))
    used = memory.total(memory.peak) / memory.capacity
    rows.append(f"peak: {memory.peak}, {used:.0%} of {_gib(memory.capacity)} GiB; {_gib(memory.free)} GiB are left")
    return rows


def engine_line(memory: Memory) -> list[str]:
    """What the engine's cache holds, and what a rollout needs."""
    engine = memory.engine
    if engine is None:
        return []
    return [
        f"vLLM: a KV cache of {engine.tokens:,} tokens ({engine.blocks:,} blocks); the sequences of a rollout have "
        f"about {engine.batch:,}, the longest one {engine.sequence:,}"
    ]


def optimizer_lines(memory: Memory, config: Any) -> list[str]:
    """What is said of an optimizer's state that the table does not have, or that was not measured."""
    paged = (
        f"paged: {_gib(memory.paged)} GiB of the optimizer's state, not in the table: CUDA moves them to the host's "
        "memory as far as the GPU's is full, and the optimizer's step then waits for them"
    )
    return [line for line in (paged if memory.paged else None, source_line(config)) if line]


def limit_lines(limits: Limits) -> list[str]:
    """The largest that fits of each."""
    lines = [
        f"fits at most, each alone: {limits.setting} {limits.micro_batch:,}, "
        f"sampling_max_tokens {limits.completion:,} (within the context)"
    ]
    if limits.fraction:
        lines.append(
            f"vllm_gpu_memory_utilization: {limits.least_fraction:g} holds the rollout, {limits.fraction:g} still fits"
        )
    return lines


def figures(memory: Memory, limits: Limits | None) -> dict[str, Any]:
    """For a JSON file."""
    engine = memory.engine
    return {
        "capacity": memory.capacity,
        "moments": {name: dict(parts) for name, parts in memory.moments.items()},
        "totals": {name: memory.total(name) for name in memory.moments},
        "paged": memory.paged,
        "peak": memory.peak,
        "free": memory.free,
        "engine": {**asdict(engine), "tokens": engine.tokens, "batch": engine.batch} if engine else None,
        "limits": asdict(limits) if limits else None,
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
