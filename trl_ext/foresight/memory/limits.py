"""What fits: the largest micro-batch, completion and engine, and the setting to change where a run does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trl_ext.foresight.memory.parts import Memory
from trl_ext.foresight.shape import RunShape, context_of

_LIVE_MOMENTS = ("forward", "backward")
Foresee = Callable[[RunShape], Memory]


@dataclass(frozen=True)
class Limits:
    """Each with everything else as it is; 0 where nothing fits."""

    micro_rows: int
    completion: int  # tokens, within the context
    fraction: float  # of the GPU's memory that the engine can take
    least_fraction: float  # that the engine needs for its batch


def largest(shape: RunShape, memory: Memory, foresee: Foresee) -> Limits:
    """What fits, by straight lines through two measurements each: a micro-batch's memory grows with its tokens."""
    rows = shape.micro_rows
    half = max(1, shape.lengths.max_completion // 2)
    at_rows = foresee(replace(shape, micro_rows=2 * rows, step=max(shape.step, 4 * rows * shape.launch.gpus)))
    at_half = foresee(replace(shape, lengths=replace(shape.lengths, max_completion=half)))
    return Limits(
        micro_rows=math.floor(_crossing(memory, rows, at_rows, 2 * rows)),
        completion=min(math.floor(_crossing(memory, shape.lengths.max_completion, at_half, half)), _room(shape)),
        fraction=largest_fraction(shape, memory),
        least_fraction=least_fraction(memory),
    )


def _room(shape: RunShape) -> int:
    """Tokens that the context leaves for a completion after the longest prompt."""
    context = shape.engine_max_length or context_of(shape.config)
    return max(1, context - shape.lengths.longest_prompt)


def _crossing(memory: Memory, x: float, other: Memory, other_x: float) -> float:
    """Where the first of the moments that train meets the GPU's memory; 0 if other moments are above it already."""
    if any(memory.total(moment) > memory.capacity for moment in memory.moments if moment not in _LIVE_MOMENTS):
        return 0.0
    if other_x == x:  # a completion of a single token has no half
        return x if memory.free >= 0 else 0.0
    slopes = {moment: (other.total(moment) - memory.total(moment)) / (other_x - x) for moment in _LIVE_MOMENTS}
    reached = [x + (memory.capacity - memory.total(moment)) / slope for moment, slope in slopes.items() if slope > 0]
    return max(0.0, min(reached, default=x))


def largest_fraction(shape: RunShape, memory: Memory) -> float:
    """The largest `vllm_gpu_memory_utilization` that fits, in hundredths."""
    if memory.engine is None:
        return 0.0
    with_engine = ("rollout", "sync") if shape.engine_sleeps else memory.moments
    rest = max(memory.total(moment) for moment in with_engine) - memory.engine.total
    return max(0, math.floor(100 * (memory.capacity - rest) / memory.capacity)) / 100


def least_fraction(memory: Memory) -> float:
    """The smallest that holds the rollout's batch at its mean length and one sequence of the longest, in hundredths."""
    if memory.engine is None:
        return 0.0
    blocks = max(memory.engine.to_decode, memory.engine.to_start)
    return math.ceil(100 * memory.engine.total_for(blocks) / memory.capacity) / 100


def refusal(shape: RunShape, memory: Memory, foresee: Foresee) -> str | None:
    """Why this run would not start or run out of memory, with the setting to change; None if it would not."""
    return _not_starting(shape, memory) or _too_much(shape, memory, foresee)


def preempting(shape: RunShape, memory: Memory) -> str | None:
    """Why the engine would compute some sequences twice, with the setting to change; None if it would not.

    It is no reason to refuse a run: the mean length of completions is a guess until the run is under way.
    """
    engine = memory.engine
    if engine is None or engine.blocks < engine.to_start or engine.blocks >= engine.to_decode:
        return None
    have = f"{engine.sequences} sequences of a rollout have about {engine.batch:,}"
    return _small_engine(shape, memory, f"and {have}: it would preempt some")


def _not_starting(shape: RunShape, memory: Memory) -> str | None:
    engine = memory.engine
    if engine is None or engine.blocks >= engine.to_start:
        return None
    may_have = f"one sequence may have {engine.sequence:,} (vllm_max_model_length)"
    return _small_engine(shape, memory, f"and {may_have}: it would not start")


def _small_engine(shape: RunShape, memory: Memory, why: str) -> str:
    """What is said of a KV cache that is too small, and the setting to change."""
    engine = memory.engine
    if engine is None:
        raise ValueError("a run without an engine has no KV cache that is too small")
    least, most = least_fraction(memory), largest_fraction(shape, memory)
    said = (
        f"vllm_gpu_memory_utilization {shape.engine_fraction:g} of {memory.capacity / 2**30:.0f} GiB leaves vLLM a KV "
        f"cache of {engine.tokens:,} tokens, {why}"
    )
    if least <= most:
        return f"{said}; set it to {least:g} (up to {most:g} fits)"
    fitting = max(0, engine.blocks - 1) * engine.sequences // (engine.to_decode - 1)
    lower = f"lower vllm_max_num_seqs to {fitting}" if fitting else "lower vllm_max_model_length"
    return f"{said}; {least:g} would do, but only {most:g} fits next to the training: {lower}"


def _too_much(shape: RunShape, memory: Memory, foresee: Foresee) -> str | None:
    if memory.free >= 0:
        return None
    moment = memory.peak
    said = (
        f"{memory.total(moment) / 2**30:.1f} GiB would be needed at the peak ({moment}), and the GPU has "
        f"{memory.capacity / 2**30:.1f}"
    )
    least, most = least_fraction(memory), largest_fraction(shape, memory)
    if least <= most and _engine_is_why(memory):
        return f"{said}: lower vllm_gpu_memory_utilization from {shape.engine_fraction:g} to {most:g}"
    rows = _fewer_rows(shape, memory, foresee)
    if rows:
        return f"{said}: lower micro_train_batch_size from {shape.micro_rows} to {rows}"
    if not shape.checkpointing and foresee(replace(shape, checkpointing=True)).free >= 0:
        return f"{said}: set gradient_checkpointing: true"
    if memory.engine is not None and not shape.engine_sleeps:
        asleep = foresee(replace(shape, engine_sleeps=True))
        if asleep.free >= 0:
            return f"{said}: set vllm_enable_sleep_mode: true"
    return f"{said}: it needs {_more(shape)}"


def _engine_is_why(memory: Memory) -> bool:
    """Whether only moments with the engine awake are above the GPU's memory, so that a smaller one is enough."""
    asleep = [moment for moment, parts in memory.moments.items() if "engine weights" not in parts]
    return memory.engine is not None and all(memory.total(moment) <= memory.capacity for moment in asleep)


def _fewer_rows(shape: RunShape, memory: Memory, foresee: Foresee) -> int:
    rows = shape.micro_rows
    while rows > 1:
        rows //= 2
        if foresee(replace(shape, micro_rows=rows)).free >= 0:
            return rows
    return 0


def _more(shape: RunShape) -> str:
    """What is left when no single setting helps."""
    ways = ["more GPUs", "a GPU with more memory"]
    if shape.launch.zero_stage < 3:
        ways.insert(0, "ZeRO-3 on several GPUs (accelerate_configs/two_gpus_zero3.yaml)")
    if shape.peft is None:
        ways.append("an adapter (use_peft: true)")
    return ", or ".join(ways)
