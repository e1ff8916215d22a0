"""A core of this machine as a device of the roofline: a product, a copy, small operations, a draw; a few seconds.

With one thread, whose own time on the core is what counts (`time.process_time`): a machine that does other work at the
same time slows that down a little only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext.generation.hf import hf_generate
from trl_ext.tools.estimate.costs.counting import ModelCosts, count_model
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu

from .random_model import save_random_model

_SIDE = 1024  # of the matrices, whose product is compute bound
_COPIED = 2**21  # float32 numbers, 8 MiB: as much as activations and logits of a micro-batch
_DRAWN = (64, 4096)  # rows, vocabulary
_TOKENS = 64
_SECONDS = 0.5  # that each is repeated for, at least


def seconds_of(call: Callable[[], object], least: float = _SECONDS, fewest: int = 5) -> float:
    """Median seconds of a call, repeated."""
    readings: list[float] = []
    while sum(readings) < least or len(readings) < fewest:
        began = time.process_time()
        call()
        readings.append(time.process_time() - began)
    return median(readings)


def measure_cpu(folder: Path) -> tuple[Gpu, Efficiency]:
    """Ceilings and host seconds of the CPU with one thread; `folder` keeps a tiny model."""
    left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    flops = 2 * _SIDE**3 / seconds_of(lambda: left @ right)
    source, target = torch.randn(_COPIED), torch.empty(_COPIED)
    bandwidth = 2 * 4 * _COPIED / seconds_of(lambda: target.copy_(source))
    gpu = Gpu("cpu", psutil.virtual_memory().total, flops, flops, flops, bandwidth, bandwidth, asynchronous=False)
    path = save_random_model(folder / "tiny", "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    costs = count_model(model.config)
    per_operation = _operation_seconds(model, costs)
    probabilities = torch.randn(_DRAWN).softmax(dim=-1)
    drawing = seconds_of(lambda: torch.multinomial(probabilities, 1)) / probabilities.numel()
    forward = costs.decoder(1, 1, _TOKENS).operations + costs.head(1, 1, 0).operations
    token = max(0.0, _token_seconds(model, tokenizer) - forward * per_operation)
    return gpu, Efficiency(
        compute=1.0, memory=1.0, op_seconds=per_operation, token_seconds=token, logit_seconds=drawing,
        reward_seconds=0.0, step_seconds=0.0, start_seconds=0.0,
    )  # fmt: skip


def _operation_seconds(model: Any, costs: ModelCosts) -> float:
    """Per operation of a training pass so small that nothing else counts."""
    ids = torch.zeros(1, 2, dtype=torch.long)

    def train() -> None:
        model.model(input_ids=ids, use_cache=True).last_hidden_state.sum().backward()

    return seconds_of(train) / float(costs.decoder_trained(1, 2, 2).operations)


def _token_seconds(model: Any, tokenizer: Any) -> float:
    """Per token of HF generate with one row."""
    config = model.generation_config
    config.update(do_sample=True, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, eos_token_id=1, pad_token_id=0)
    return seconds_of(lambda: hf_generate(model, tokenizer, [[3, 4]], config)) / _TOKENS
