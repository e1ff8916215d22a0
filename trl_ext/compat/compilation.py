"""torch.compile for a model's layers, in place: whoever calls them in a step calls them compiled, and `generate` not.

accelerate compiles a wrapper around the whole model. What goes around it, such as shared prompts, is not compiled then,
and what goes through it is compiled anew for every number of tokens. Here each layer is compiled with symbolic sizes,
and all layers share what was compiled. What has Python objects is left to Python: the cache, which may have prompts of
other micro-batches in it, and attention within rows of different lengths. In between lie norms, projections, rotary
positions and the MLP. Names of parameters stay as they are, in checkpoints too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_ext.registry import unknown

if TYPE_CHECKING:
    from transformers import TrainingArguments

Function = Callable[..., Any]
VARIANTS = 64  # of a function: with and without gradient, of one row and of several, with each kind of cache
_MODES = ("default", "max-autotune-no-cudagraphs")
_OF_CUDA_GRAPHS = ("reduce-overhead", "max-autotune", "cudagraphs")
_NOT_TRACED = ("sdpa", "flash_attention_2", "flash_attention_3")


def check_compilation(config: TrainingArguments) -> None:
    """Refuse what could only fail in the first step.

    Raises:
        ValueError: an unknown or unsuitable backend or mode, no compiler, or weights in parts.
    """
    if not config.torch_compile:
        return
    backend, mode = str(config.torch_compile_backend).lower(), config.torch_compile_mode
    for name, value in (("torch_compile_backend", backend), ("torch_compile_mode", mode)):
        if value in _OF_CUDA_GRAPHS:
            raise ValueError(
                f"{name} {value} records CUDA graphs, one for each shape, and every micro-batch has a shape of its "
                "own: take torch_compile_backend inductor with torch_compile_mode default or max-autotune-no-cudagraphs"
            )
    if backend not in (known := _backends()):
        raise unknown("torch_compile_backend", backend, known)
    if mode not in (None, *_MODES):
        raise unknown("torch_compile_mode", str(mode), _MODES)
    plugin = getattr(config, "deepspeed_plugin", None)
    has_fsdp = config.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"  # a launcher's
    sharded = "ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else "FSDP" if has_fsdp else None
    if sharded is not None:
        raise ValueError(
            f"torch_compile compiles layers with their weights, which {sharded} has in parts: leave torch_compile out, "
            "or take DDP or ZeRO-2 (accelerate_configs/two_gpus_zero2.yaml)"
        )
    if backend == "inductor" and (missing := _missing_compiler()):
        raise ValueError(f"torch_compile with inductor {missing}; or leave torch_compile out")


def _backends() -> list[str]:
    """Those of accelerate that this torch has, and that can train."""
    import torch._dynamo  # takes seconds

    registered = torch._dynamo.list_backends(exclude_tags=())
    names = [backend.value.lower() for backend in DynamoBackend]
    return [name for name in names if name in registered and name not in ("cudagraphs", "tvm")]


def _missing_compiler() -> str | None:
    if torch.cuda.is_available():
        from torch.utils._triton import has_triton

        return None if has_triton() else "needs Triton (pip install triton)"
    found = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
    return None if found else "needs a C++ compiler on a CPU (apt install g++)"


def compile_layers(model: nn.Module, plugin: TorchDynamoPlugin) -> int:
    """Compile a model's layers in place, and return how many there are.

    Args:
        model: with its adapters, without a backend's wrapper.
        plugin: accelerate's settings of torch.compile.

    Raises:
        ValueError: the model has no layers of transformers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"torch_compile compiles the layers of a model of transformers, and {type(model).__name__} has none: "
            "leave torch_compile out"
        )
    _leave_to_python()
    given: dict[str, Any] = {"backend": plugin.backend.value.lower(), "dynamic": True}
    if plugin.options:
        given["options"] = plugin.options
    elif plugin.mode not in (None, "default"):
        given["mode"] = plugin.mode
    for layer in layers:
        layer.compile(**given)
    return len(layers)


@functools.cache
def _leave_to_python() -> None:
    """Once per process: what is not traced, and that a layer's number is not a reason to compile it anew."""
    import torch._dynamo
    from torch._dynamo import config

    Cache.update = torch.compiler.disable(Cache.update)
    for name in _NOT_TRACED:
        if name in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    config.allow_unspec_int_on_nn_module = True
    config.optimize_ddp = False  # it cuts what is compiled at DDP's buckets, which are larger than a layer
    config.recompile_limit = max(config.recompile_limit, VARIANTS)


def not_traced(function: Function) -> Function:
    """The function, which compiled layers call as it is; where nothing was compiled, itself."""
    return function if _leave_to_python.cache_info().currsize == 0 else _not_traced(function)


@functools.cache
def _not_traced(function: Function) -> Function:
    return torch.compiler.disable(function)


def uncompiled() -> AbstractContextManager[object]:
    """In the block compiled layers are called as if they were not: tokens are few, and their caches grow."""
    if "torch._dynamo" not in sys.modules:  # which takes seconds to import, and then nothing is compiled
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
