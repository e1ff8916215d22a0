"""A core of this machine as a device of the roofline: a product, a copy, small operations, a draw; a few seconds.

With one thread, whose own time on the core is what counts (`time.process_time`): a machine that does other work at the
same time slows that down a little only.
"""

from __future__ import annotations

import time
from collections import Counter
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
_READ = 2**25  # float32 numbers, 128 MiB: more than caches hold
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


def decoding_ceilings(shapes: Counter[tuple[int, int]], rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Tokens/s of decoding at most, with one thread: as fast as weights are read, and as fast as they are multiplied.

    Args:
        shapes: of the matrices that a token is multiplied by, (outputs, inputs), to their number.
        rows: how many completions take a token with each reading.
    """
    read = torch.randn(_READ)
    bandwidth = 4 * _READ / seconds_of(lambda: read.sum())
    products = sum(count * _product_seconds(shape, rows, dtype) for shape, count in shapes.items())
    return {"bandwidth": bandwidth, **tokens_at_most(shapes, rows, dtype.itemsize, bandwidth, products)}


def tokens_at_most(
    shapes: Counter[tuple[int, int]], rows: int, itemsize: int, bandwidth: float, products: float
) -> dict[str, float]:
    """The tokens/s by bytes/s of reading, and by seconds of a pass's products, whose FLOP/s are next to them."""
    numbers = sum(count * outputs * inputs for (outputs, inputs), count in shapes.items())
    return {
        "tokens_per_s_by_bandwidth": rows * bandwidth / (numbers * itemsize),
        "tokens_per_s_by_products": rows / products,
        "flops_per_s": 2 * numbers * rows / products,
    }


def _product_seconds(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> float:
    """Of one product, with the matrix as it is or, where that is faster, in oneDNN's order, as engines keep it."""
    matrix, vectors = torch.randn(shape, dtype=dtype), torch.randn(rows, shape[1], dtype=dtype)
    plain = seconds_of(lambda: torch.nn.functional.linear(vectors, matrix))
    ordered = torch.ops.mkldnn._reorder_linear_weight(matrix, rows)
    multiply = torch.ops.mkldnn._linear_pointwise
    return min(plain, seconds_of(lambda: multiply(vectors, ordered, None, "none", [], "")))


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
