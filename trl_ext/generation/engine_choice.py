"""Which engine generates where `use_vllm` is auto: by the device, by what is installed, and on a CPU by the model."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from trl_ext.generation.model_source import locate


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
