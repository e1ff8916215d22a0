"""What fits: the largest micro-batch, completion and engine, and the setting to change where a run does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trl_ext.tools.estimate.costs.micro_batches import shares_prompts
from trl_ext.tools.estimate.memory.parts import Memory
from trl_ext.tools.estimate.planned import PlannedRun

_LIVE_MOMENTS = ("forward", "backward")  # that grow with a micro-batch
_AWAKE = ("rollout", "sync")  # when an engine that may sleep does not
Estimate = Callable[[PlannedRun], Memory]


@dataclass(frozen=True)
class Limits:
    """Each with everything else as it is; 0 where nothing fits."""

    micro_batch: int  # in the unit of its setting
    setting: str  # that a micro-batch has its size by
    completion: int  # tokens, within the context
    fraction: float  # of the GPU's memory that the engine can take
    least_fraction: float  # that the engine needs for its batch


def largest(run: PlannedRun, memory: Memory, estimate: Estimate) -> Limits:
    """What fits, by straight lines through two measurements each: a micro-batch's memory grows with its tokens."""
    size = completion = 0
    if _others_fit(memory):
        size, completion = _largest_step(run, memory, estimate)
    return Limits(size, _size(run)[0], completion, largest_fraction(run, memory), least_fraction(memory))


def _largest_step(run: PlannedRun, memory: Memory, estimate: Estimate) -> tuple[int, int]:
    """A micro-batch's size, and tokens of a completion."""
    size, tokens, room = _size(run)[1], run.lengths.max_completion, _room(run)
    other = max(1, tokens // 2)
    if run.token_limit:
        # As long as they hold the row, a longer one takes little more, and on shared prompts nothing.
        other = max(tokens, min(room, run.token_limit - run.lengths.longest_prompt))
    is_flat = other == tokens or (run.token_limit and shares_prompts(run))
    at_twice = estimate(_resized(run, 2 * size))
    at_other = memory if is_flat else estimate(replace(run, lengths=replace(run.lengths, max_completion=other)))
    longest = math.floor(_crossing(memory, tokens, at_other, other))
    return math.floor(_crossing(memory, size, at_twice, 2 * size)), min(longest, room)


def _size(run: PlannedRun) -> tuple[str, int]:
    """The setting that a micro-batch has its size by, and the size: in rows, or in tokens where they are limited."""
    if run.token_limit:
        return "micro_batch_tokens", run.token_limit
    return "micro_train_batch_size", run.config.per_device_train_batch_size


def _resized(run: PlannedRun, size: int) -> PlannedRun:
    """With micro-batches of another size, and a step that has at least two."""
    if run.token_limit:
        return run.with_settings(micro_batch_tokens=size)
    return run.with_rows(size)


def _room(run: PlannedRun) -> int:
    """Tokens that the context leaves for a completion after the longest prompt."""
    return max(1, run.context - run.lengths.longest_prompt)


def _crossing(memory: Memory, x: float, other: Memory, other_x: float) -> float:
    """Where the first of the moments that grow meets the GPU's memory."""
    if other_x == x:  # a completion of a single token has no half
        return x if memory.free >= 0 else 0.0
    slopes = {moment: (other.total(moment) - memory.total(moment)) / (other_x - x) for moment in _LIVE_MOMENTS}
    reached = [x + (memory.capacity - memory.total(moment)) / slope for moment, slope in slopes.items() if slope > 0]
    if not reached:  # it does not grow
        return max(x, other_x) if memory.free >= 0 else 0.0
    return max(0.0, min(reached))


def _others_fit(memory: Memory) -> bool:
    """Whether the moments fit that no smaller micro-batch makes smaller."""
    return all(memory.total(moment) <= memory.capacity for moment in memory.moments if moment not in _LIVE_MOMENTS)


def largest_fraction(run: PlannedRun, memory: Memory) -> float:
    """The largest `vllm_gpu_memory_utilization` that fits, in hundredths."""
    if memory.engine is None:
        return 0.0
    with_engine = _AWAKE if run.config.vllm_enable_sleep_mode else memory.moments
    rest = max(memory.total(moment) for moment in with_engine) - memory.engine.total
    return max(0, math.floor(100 * (memory.capacity - rest) / memory.capacity)) / 100


def least_fraction(memory: Memory) -> float:
    """The smallest that holds the rollout's batch at its mean length and one sequence of the longest, in hundredths."""
    if memory.engine is None:
        return 0.0
    blocks = max(memory.engine.to_decode, memory.engine.to_start)
    return math.ceil(100 * memory.engine.total_for(blocks) / memory.capacity) / 100


def refusal(run: PlannedRun, memory: Memory, estimate: Estimate) -> str | None:
    """Why this run would not start or run out of memory, with the setting to change; None if it would not."""
    return _not_starting(run, memory) or _too_much(run, memory, estimate)


def preempting(run: PlannedRun, memory: Memory) -> str | None:
    """Why the engine would compute some sequences twice, with the setting to change; None if it would not.

    It is no reason to refuse a run: the mean length of completions is a guess until the run is under way.
    """
    engine = memory.engine
    if engine is None or engine.blocks < engine.to_start or engine.blocks >= engine.to_decode:
        return None
    have = f"{engine.sequences} sequences of a rollout have about {engine.batch:,}"
    return _small_engine(run, memory, f"and {have}: it would preempt some")


def _not_starting(run: PlannedRun, memory: Memory) -> str | None:
    engine = memory.engine
    if engine is None or engine.blocks >= engine.to_start:
        return None
    may_have = f"one sequence may have {engine.sequence:,} (vllm_max_model_length)"
    return _small_engine(run, memory, f"and {may_have}: it would not start")


def _small_engine(run: PlannedRun, memory: Memory, why: str) -> str:
    """What is said of a KV cache that is too small, and the setting to change."""
    engine = memory.engine
    if engine is None:
        raise ValueError("a run without an engine has no KV cache that is too small")
    least, most = least_fraction(memory), largest_fraction(run, memory)
    said = (
        f"vllm_gpu_memory_utilization {run.config.vllm_gpu_memory_utilization:g} of {memory.capacity / 2**30:.0f} GiB "
        f"leaves vLLM a KV cache of {engine.tokens:,} tokens, {why}"
    )
    if least <= most:
        return f"{said}; set it to {least:g} (up to {most:g} fits)"
    fitting = max(0, engine.blocks - 1) * engine.sequences // (engine.to_decode - 1)
    lower = f"lower vllm_max_num_seqs to {fitting}" if fitting else "lower vllm_max_model_length"
    return f"{said}; {least:g} would do, but only {most:g} fits next to the training: {lower}"


def _too_much(run: PlannedRun, memory: Memory, estimate: Estimate) -> str | None:
    if memory.free >= 0:
        return None
    moment = memory.peak
    said = (
        f"{memory.total(moment) / 2**30:.1f} GiB would be needed at the peak ({moment}), and the GPU has "
        f"{memory.capacity / 2**30:.1f}"
    )
    least, most = least_fraction(memory), largest_fraction(run, memory)
    if least <= most and _engine_is_why(memory):
        now = run.config.vllm_gpu_memory_utilization
        return f"{said}: lower vllm_gpu_memory_utilization from {now:g} to {most:g}"
    if _others_fit(memory):  # else no smaller micro-batch is enough
        setting, size = _size(run)
        if smaller := _smaller(run, estimate):
            return f"{said}: lower {setting} from {size} to {smaller}"
        if not run.config.gradient_checkpointing and estimate(run.with_settings(gradient_checkpointing=True)).free >= 0:
            return f"{said}: set gradient_checkpointing: true"
    if not run.config.vllm_enable_sleep_mode and _fits_asleep(memory):
        return f"{said}: set vllm_enable_sleep_mode: true"
    return f"{said}: it needs {_more(run)}"


def _engine_is_why(memory: Memory) -> bool:
    """Whether only moments with the engine awake are above the GPU's memory, so that a smaller one is enough."""
    asleep = [moment for moment, parts in memory.moments.items() if "engine weights" not in parts]
    return memory.engine is not None and all(memory.total(moment) <= memory.capacity for moment in asleep)


def _fits_asleep(memory: Memory) -> bool:
    """Whether it would fit with an engine that sleeps while the policy trains."""
    if memory.engine is None:
        return False
    given_back = {moment: 0 if moment in _AWAKE else memory.engine.total for moment in memory.moments}
    return all(memory.total(moment) - size <= memory.capacity for moment, size in given_back.items())


def _smaller(run: PlannedRun, estimate: Estimate) -> int:
    """The largest micro-batch that fits of a half, a quarter and so on, down to a row; 0 if none does."""
    size = _size(run)[1]
    least = run.lengths.longest_prompt + run.lengths.max_completion if run.token_limit else 1
    while size > least:
        size = max(least, size // 2)
        if estimate(_resized(run, size)).free >= 0:
            return size
    return 0


def _more(run: PlannedRun) -> str:
    """What is left when no single setting helps."""
    ways = ["more GPUs", "a GPU with more memory"]
    if run.launch.zero_stage < 3:
        ways.insert(0, "ZeRO-3 on several GPUs (accelerate_configs/two_gpus_zero3.yaml)")
    if run.peft is None:
        ways.append("an adapter (use_peft: true)")
    return ", or ".join(ways)
