"""Memory of a GPU over an optimizer step and the rollout, by component: what was measured, sharded, and the engine.

Measured on the real forward and backward pass are parameters, gradients, optimizer state, activations and the LM head
(`step`). How they are sharded follows DeepSpeed 0.19: `runtime/zero/stage_1_and_2.py` (a float32 copy of this rank's
partition, gradients reduced in buckets) and `partition_parameters.py`, with the bucket sizes of `zero/config.py`.
What one H100 has shown of a step is in docs/results/gpu.md; what was assumed, since it had neither vLLM nor a second
GPU, says so below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trl_ext.step import Head
from trl_ext.tools.estimate.kv_cache import IN_FLIGHT, Blocks, layer_tokens, token_bytes
from trl_ext.tools.estimate.memory.optimizers import flat_state

if TYPE_CHECKING:
    from trl_ext.tools.estimate.planned import PlannedRun

GIB = 2**30
CONTEXT = 3 * GIB // 4  # of CUDA and its libraries in a process, measured
NCCL = GIB // 2  # communicators' buffers, with several GPUs; assumed
ENGINE_REST = 3 * GIB // 2  # vLLM's activations, logits and CUDA graphs; assumed
DIVERGENCE_COPIES = 9  # of the float32 logits that a divergence's pass through the LM head has at a time; 8.3 measured
MARGIN = 0.06  # of what the trainer allocates, for fragmentation; 0.055 was measured
BUCKET = 500_000_000  # elements that DeepSpeed reduces at a time (`reduce_bucket_size`)
LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps gathered at most (`stage3_max_live_parameters`)
GATHERED = 512 * 2**20  # bytes that are gathered at a time for the engine (`generation.vllm.BUCKET_BYTES`)
_QUANTIZED = {"fp8": 1.0, "awq": 0.5, "gptq": 0.5, "int4": 0.5, "int8": 1.0, "bitsandbytes": 0.5}  # bytes, a parameter

Parts = Mapping[str, int]  # component -> bytes


@dataclass(frozen=True)
class Measured:
    """Bytes of one process that shards nothing."""

    peaks: Mapping[str, Mapping[str, int]]  # moment -> kind -> bytes, at the moment's highest total
    resident: Mapping[str, int]  # kind -> bytes between optimizer steps
    parameters: int  # in number
    trainable: int  # in number
    largest_parameter: int  # in number
    largest_layer: int  # parameters of the largest module that has some of its own, in number
    paged: int = 0  # of the optimizer's state, what may be in the host's memory
    rows: int = 1  # whose "batches" are counted: the rollout, and micro-batches that are copied from it

    def total(self, moment: str) -> int:
        """Bytes at a moment's peak."""
        return sum(self.peaks.get(moment, {}).values())


@dataclass(frozen=True)
class Engine:
    """Colocated vLLM on a GPU."""

    total: int  # bytes that it takes, by its fraction of the GPU
    weights: int  # bytes
    layout: Blocks
    sequence: int  # tokens of the longest sequence
    sequences: int  # that decode at a time
    length: float  # tokens of each, on average

    @property
    def cache(self) -> int:
        """Bytes that are left for the KV cache; negative where the weights do not fit."""
        return self.total - self.weights - ENGINE_REST

    @property
    def blocks(self) -> int:
        """Of the KV cache."""
        return max(0, self.cache) // self.layout.size

    @property
    def to_start(self) -> int:
        """Blocks without which vLLM does not start: of the longest sequence, and one that it keeps empty."""
        return self._longest + 1

    @property
    def to_decode(self) -> int:
        """Blocks without which it preempts: of the sequences that decode at a time."""
        return self.sequences * self.layout.needed(self.length) + 1

    @property
    def tokens(self) -> int:
        """That the KV cache holds, as vLLM says it: of sequences as long as they may be."""
        return self.blocks * self.sequence // self._longest

    @property
    def batch(self) -> int:
        """Tokens that the sequences that decode at a time have, in the same measure."""
        return (self.to_decode - 1) * self.sequence // self._longest

    @property
    def _longest(self) -> int:
        return self.layout.needed(self.sequence, IN_FLIGHT)

    def total_for(self, blocks: int) -> int:
        """Bytes that it would have to take to hold so many blocks."""
        return self.weights + ENGINE_REST + blocks * self.layout.size


@dataclass(frozen=True)
class Memory:
    """The estimate for one GPU."""

    capacity: int  # bytes of the GPU
    moments: Mapping[str, Parts]
    engine: Engine | None
    paged: int = 0  # bytes of the optimizer's state in no moment: CUDA moves them to the host's memory if need be

    def total(self, moment: str) -> int:
        """Bytes at a moment's peak."""
        return sum(self.moments[moment].values())

    @property
    def peak(self) -> str:
        """The moment of the highest total."""
        return max(self.moments, key=self.total)

    @property
    def free(self) -> int:
        """Bytes that are left at the peak; negative where it does not fit."""
        return self.capacity - self.total(self.peak)


def memory_of(run: PlannedRun, capacity: int, measured: Measured) -> Memory:
    """What each moment of a run keeps in one GPU's memory.

    Args:
        capacity: bytes of the GPU.
        measured: of `step.measure(run)`.
    """
    engine = _engine(run, capacity, measured) if run.engine == "vllm" else None
    held = _engine_parts(engine)
    in_training = {} if run.config.vllm_enable_sleep_mode else held
    weights = -(-measured.trainable // run.launch.gpus) if run.launch.zero_stage else 0  # that a GPU has in float32
    state, paged = flat_state(run.config, weights) if weights else (0, measured.paged)
    sharded = partial(_sharded, measured=measured, run=run, flat=4 * weights + state, paged=paged)
    resident = sharded(measured.resident)
    moments = {"rollout": {**resident, **held, **_generating(run, engine)}}
    for moment, parts in measured.peaks.items():
        moments[moment] = {**sharded(parts), **_exchanged(moment, measured, run), **in_training}
    if run.learns_divergence:
        moments["backward"]["divergence"] = 4 * Head.LOGITS_AT_A_TIME * DIVERGENCE_COPIES
    moments["sync"] = {**resident, **held, "sync buffers": _sync_bytes(run, measured)}
    moments["save"] = {**resident, **in_training, "sync buffers": _gathered_bytes(run, measured)}
    ours = set(held) | {"margin"}
    for moment, parts in moments.items():
        allocated = sum(size for name, size in parts.items() if name not in ours)
        outside = CONTEXT + (NCCL if run.launch.gpus > 1 else 0)
        moments[moment] = {**parts, "context": outside, "margin": round(MARGIN * allocated)}
    return Memory(capacity, moments, engine, paged)


def _sharded(parts: Parts, measured: Measured, run: PlannedRun, flat: int, paged: int) -> dict[str, int]:
    """One process's bytes by component, as DeepSpeed partitions them over the GPUs.

    Args:
        flat: bytes of a GPU's float32 weights and of their optimizer's state, under ZeRO.
        paged: bytes of the optimizer's state that are left out.
    """
    stage, gpus = run.launch.zero_stage, run.launch.gpus
    rows = run.rollout if run.recipe == "grpo" else run.step
    sizes = {**parts, "batches": -(-parts["batches"] * rows // (gpus * measured.rows)), "teachers": run.teacher_bytes}
    sizes["optimizer"] -= paged
    if not stage:
        if gpus > 1:  # DDP's buckets are copies of all gradients
            sizes["gradient buckets"] = measured.trainable * run.weights_dtype.itemsize
        return sizes
    if stage >= 2:
        sizes["gradients"] = -(-parts["gradients"] // gpus)
    if stage == 3:
        sizes |= {name: -(-sizes.get(name, 0) // gpus) for name in ("parameters", "reference", "teachers")}
    sizes["optimizer"] = flat - paged
    return sizes


def _exchanged(moment: str, measured: Measured, run: PlannedRun) -> dict[str, int]:
    """What DeepSpeed has in addition while it trains."""
    stage, gpus = run.launch.zero_stage, run.launch.gpus
    if not stage:
        return {}
    itemsize = run.compute_dtype.itemsize
    if moment == "optimizer step":
        return {"gradient buckets": -(-4 * measured.trainable // gpus)}  # float32 gradients of this rank's partition
    sizes = {"gradient buckets": BUCKET * itemsize} if moment == "backward" or stage == 3 else {}
    if stage == 3:
        sizes["gathered weights"] = min(measured.parameters, LIVE) * itemsize
    return sizes


def _engine(run: PlannedRun, capacity: int, measured: Measured) -> Engine:
    parameters = measured.parameters - (measured.trainable if run.peft else 0)
    itemsize = _engine_dtype(run).itemsize
    width = _QUANTIZED.get(run.config.vllm_quantization or "", itemsize)
    parallel = run.engine_parallel
    lengths = run.lengths
    return Engine(
        total=int(run.config.vllm_gpu_memory_utilization * capacity),
        weights=round(parameters * width / parallel),
        layout=Blocks.of(run.network, token_bytes(run.network, itemsize, parallel)),
        sequence=run.context,
        sequences=run.engine_sequences,
        length=lengths.prompt / run.group + lengths.completion,
    )


def _engine_dtype(run: PlannedRun) -> torch.dtype:
    if run.engine_dtype != "auto":
        return {"half": torch.float16, "float": torch.float32}.get(run.engine_dtype) or getattr(torch, run.engine_dtype)
    own = run.network.dtype  # as published: what vLLM's auto reads; float32 becomes float16 or bfloat16
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def _engine_parts(engine: Engine | None) -> dict[str, int]:
    if engine is None:
        return {}
    return {
        "engine weights": engine.weights,
        "KV cache": max(0, engine.cache),
        "engine rest": engine.total - engine.weights - max(0, engine.cache),
    }


def _generating(run: PlannedRun, engine: Engine | None) -> dict[str, int]:
    """HF generate's cache of keys and values, of all this GPU's sequences at their longest."""
    if engine is not None or run.engine == "server":
        return {}
    network: Any = run.network.get_text_config()
    tokens = run.lengths.longest_prompt + run.lengths.max_completion
    sequences = max(1, run.rollout // run.launch.gpus)
    itemsize = run.compute_dtype.itemsize  # of the cache
    cached = round(sequences * layer_tokens(run.network, tokens) * token_bytes(run.network, itemsize))
    return {"KV cache": cached, "lm head": 2 * sequences * network.vocab_size * 4}


def _sync_bytes(run: PlannedRun, measured: Measured) -> int:
    """The engine's largest layer in its loading format, and what is gathered for it."""
    layer = measured.largest_layer * _engine_dtype(run).itemsize if run.engine == "vllm" else 0
    return layer + _gathered_bytes(run, measured)


def _gathered_bytes(run: PlannedRun, measured: Measured) -> int:
    largest = measured.largest_parameter * run.compute_dtype.itemsize
    return max(GATHERED, largest) if run.launch.zero_stage == 3 else 0
