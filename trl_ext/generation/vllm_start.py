"""Starting vLLM: what it needs, what it says when it cannot, and the setting that helps."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.elastic.utils.distributed import get_free_port

from trl_ext.compat.vllm_draws import draw_by_cumulative_sums
from trl_ext.generation.engine_choice import dtype_to_sample_in

_BATCH_ON_CPU = 1024  # tokens of a batch at least: vLLM wants one for each sequence, 256 by default
_BLOCK_ON_CPU = 32  # tokens; vLLM's own 128 are more than most prompts have, and only whole blocks are shared
_REMEDIES = (
    (
        ("No available memory for the cache blocks", "Free memory on device", "out of memory", "CPU KV cache"),
        "raise vllm_gpu_memory_utilization (on a CPU: VLLM_CPU_KVCACHE_SPACE, in GiB), or lower "
        "micro_train_batch_size, or set vllm_enable_sleep_mode: true",
    ),
    (
        ("To serve at least one request", "estimated maximum model length"),
        "lower vllm_max_model_length (prompt and completion together), or raise vllm_gpu_memory_utilization "
        "(on a CPU: VLLM_CPU_KVCACHE_SPACE, in GiB)",
    ),
    (("is greater than the derived max_model_len",), "lower vllm_max_model_length to what the model was made for"),
    (("quantization",), "set vllm_quantization to a method that this hardware has, or leave it out"),
)


def device_settings(context: int | None = None, sequences: int | None = None) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` that the device needs, unless others are given.

    On a CPU a prompt must not be split: vLLM 0.31 then draws a token too many for a request with a seed and sets the
    generator back, which a CPU's cannot ("CPU Generator does not use offset"). A batch then has to hold the longest
    prompt. It holds little more, since an engine begins with a pass over as many tokens as a batch may have, for which
    a model of 0.5 billion parameters takes minutes at vLLM's own size; TRL's is 4,096 tokens whatever the context is.

    Nothing is compiled, since vLLM 0.31 cannot load what it has compiled before with torch 2.13: for 0.5 billion
    parameters each start took 100 s instead of 14 on two cores, and then 1.2 times the tokens/s.

    Args:
        context: the most tokens of prompt and response together; None leaves the size of a batch to vLLM.
        sequences: the most that are decoded at a time.
    """
    if torch.cuda.is_available():
        return {}
    batch = None if context is None else max(context, sequences or 0, _BATCH_ON_CPU)
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": batch,
        "block_size": _BLOCK_ON_CPU,
        "enforce_eager": True,
        "dtype": dtype_to_sample_in(None),
    }


@contextlib.contextmanager
def place_in_environment(state: PartialState) -> Iterator[None]:
    """In the block the environment says which process this is, as vLLM's external launcher and TRL have it."""
    place = {"RANK": state.process_index, "LOCAL_RANK": state.local_process_index, "WORLD_SIZE": state.num_processes}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update({name: str(number) for name, number in place.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def starting_vllm() -> Iterator[None]:
    """Turn what goes wrong when vLLM starts into a `RuntimeError` that names the setting to change.

    An engine that nothing refers to any more gives its memory back first, as in a notebook whose cell is run again:
    with each start vLLM freezes all objects that there are, and what is frozen is never collected.
    """
    gc.unfreeze()
    gc.collect()
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, where it would take half of the machine's memory
        draw_by_cumulative_sums()
    # TRL takes 29500 while it is free, and so would a run that starts at the same time
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(get_free_port()))
    try:
        yield
    except Exception as error:
        said = str(error)
        remedy = next((advice for signs, advice in _REMEDIES if any(sign in said for sign in signs)), None)
        advice = f" What helps: {remedy}." if remedy else " use_vllm: false generates without it."
        raise RuntimeError(f"vLLM did not start: {said.strip()}{advice}") from error
