"""`docs/reference/optimizers.md`: bytes of memory per parameter, by optimizer, and by what is trained in which dtype.

The real optimizers make their state on fake tensors of a published model, or their sources say what they keep. It is
made of one layer and of two.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from trl_ext.compat.fake_modules import parameters_replaced
from trl_ext.io import markdown_table
from trl_ext.tools.estimate.memory.ledger import Answered
from trl_ext.tools.estimate.memory.optimizer_sources import SOURCES
from trl_ext.tools.estimate.memory.optimizers import (
    bytes_of,
    flat_state,
    optimizer_of,
    state_tensors,
)
from trl_ext.tools.estimate.networks import network_of

MODEL = "Qwen/Qwen3-0.6B"
SHOWN = ("adamw_torch", "paged_adamw_8bit", "adafactor", "lion_8bit", "sgd")  # next to each precision
GPUS = 2  # of the rows with ZeRO
ELEMENTS = 2**30  # of a model that ZeRO shards, where shapes do not matter
RANK = 16

INTRODUCTION = f"""\
# Optimizers and their memory

Bytes per parameter of {MODEL}, with every parameter trained. `--optim` takes each of these names, which are those of
transformers, where its package is installed. The estimate of memory ([estimate](../packages/estimate.md)) counts the
state in the same way, by weights and their shapes. A test goes through all names and counts the real optimizer's state
where its package is installed, as those of torch, transformers and bitsandbytes 0.50 were; the others are by their
sources, not compared. Muon and Apex are not among transformers' names.

Letters: n elements of a weight; a matrix has sides m and l, of which m is the shorter; r is the rank of GaLore and
APOLLO, here 128, with `optim_target_modules: all-linear`. Embeddings are kept in 32 bits by transformers where
bitsandbytes has 8; their share in this model is a quarter. Below 4,096 elements it keeps 32 bits as well.

Written by `python -m scripts.docs_pages`, which has the optimizers make their state on fake tensors.
"""
PAGED = """\
**Paged** state is in memory that CUDA moves between the GPU and the host: as long as the GPU has room it is there, and
what does not fit is the host's, so that the optimizer's step waits for it instead of running out of memory. The
estimate leaves it out of what a GPU has to hold, and says how much it is. On a CPU there are no pages.

**Projected** weights (GaLore, APOLLO) keep a projection next to their state. GaLore's is the first r singular vectors;
in float32 it is a view of all of them, which keeps m m elements, in bfloat16 a copy with r m. That APOLLO keeps its
random projection is from a copy of its code; its paper counts only the seed.

**Within the backward pass**: LOMO and the `_layerwise` ones update each weight as soon as it has its gradient, and free
that. The estimate refuses them by name, as it does what is for a TPU or an NPU. By their sources are those whose
packages were not installed, or need a GPU to be asked; what their steps allocate for a moment is not in the estimate,
which says so.
"""
PRECISIONS = f"""\
## What is trained, in which precision

Bytes per parameter of the base model, without activations. *Weights* are the model's, *gradient* what one backward pass
leaves, *master* the float32 weights that DeepSpeed keeps next to a model in bfloat16 on each of {GPUS} GPUs. Where
`bf16: true` computes with float32 weights, those are the master weights, and each forward pass adds copies in bfloat16
of the matrices (up to 2 bytes). LoRA has rank {RANK} on all linear layers, in float32 by PEFT.
"""


def optimizers_page() -> str:
    """The page."""
    parts = [INTRODUCTION, *_states(), "", PAGED, PRECISIONS, *_precisions()]
    return "\n".join(parts) + "\n"


def _states() -> list[str]:
    rows = []
    for name in (member.value for member in OptimizerNames):
        source = SOURCES.get(name)
        said = "yes, paged" if "paged" in name else "yes"
        if source and source.unmodeled:
            said = f"refused: {source.unmodeled}"
        package = f"[{source.package}]({source.source})" if source else "torch or transformers"
        states = [_bytes(_state(name, dtype)) for dtype in (torch.float32, torch.bfloat16)]
        rows.append([f"`{name}`", *states, source.said if source else "", package, said])
    header = ["`--optim`", "float32", "bfloat16", "bytes of a weight's state, float32", "package", "in the estimate"]
    return markdown_table(header, rows)


def _precisions() -> list[str]:
    rows = []
    for dtype, base in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for lora in (False, True):
            weights, gradient = _per_parameter(dtype, lora, _weights), _per_parameter(dtype, lora, _gradients)
            for optim in SHOWN:
                name = f"LoRA, base in {base}" if lora else f"whole model, {base}"
                rows.append(_row(name, optim, weights, gradient, 0.0, _state(optim, dtype, lora)))
    for stage in (2, 3):
        for optim in SHOWN:
            state, _ = flat_state(_settings(optim), ELEMENTS // GPUS)
            name = f"ZeRO-{stage} on {GPUS} GPUs, bfloat16"
            rows.append(_row(name, optim, 2 / GPUS if stage == 3 else 2, 2 / GPUS, 4 / GPUS, state / ELEMENTS))
    return markdown_table(["trained", "`--optim`", "weights", "gradient", "master", "state", "together"], rows)


def _row(name: str, optim: str, *parts: float) -> list[str]:
    return [name, f"`{optim}`", *(_bytes(part) for part in (*parts, sum(parts)))]


def _bytes(number: float) -> str:
    return f"{number:.2f}"


def _per_parameter(dtype: torch.dtype, lora: bool, count: Callable[[nn.Module], int]) -> float:
    """Bytes of a model of all layers per parameter of its base: each layer after the first adds the same."""
    one, two = (count(_model(layers, dtype, lora)) for layers in (1, 2))
    parameters = [sum(one.numel() for one in _model(layers, dtype, False).parameters()) for layers in (1, 2)]
    more = network_of(MODEL).num_hidden_layers - 1
    return (one + more * (two - one)) / (parameters[0] + more * (parameters[1] - parameters[0]))


@cache
def _model(layers: int, dtype: torch.dtype, lora: bool) -> Any:
    network = copy.deepcopy(network_of(MODEL))
    network.num_hidden_layers, network.layer_types = layers, network.layer_types[:layers]
    with FakeTensorMode(allow_non_fake_inputs=True), parameters_replaced():
        model = AutoModelForCausalLM.from_config(network, dtype=dtype)
        if lora:
            model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return model


def _weights(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def _gradients(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters() if one.requires_grad)


def _settings(name: str) -> TrainingArguments:
    with tempfile.TemporaryDirectory() as folder:
        return TrainingArguments(
            folder, optim=name, use_cpu=True, bf16=False, report_to="none", optim_target_modules="all-linear"
        )


def _state(name: str, dtype: torch.dtype, lora: bool = False) -> float:
    """Bytes of state per parameter of the base."""
    settings = _settings(name)

    def count(model: Any) -> int:
        with FakeTensorMode(allow_non_fake_inputs=True), Answered(lambda mask: mask[0]), parameters_replaced():
            optimizer = optimizer_of(Trainer(model=model, args=settings))
            optimizer.step()
            return bytes_of(state_tensors(optimizer))

    return _per_parameter(dtype, lora, count)
