"""What a model's forward and backward pass do, counted from the real code under `FakeTensorMode`, without weights.

Everything in a decoder is linear in the queries, in the pairs of query and key, and in the keys, next to what every
pass costs (reading the weights), so four small sizes fix the costs of any size; layers of one kind are counted once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trl_ext.compat.fake_modules import parameters_replaced
from trl_ext.tools.estimate.costs.operations import Counter, Measure, Polynomial, fit

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelCosts:
    """Of a causal language model."""

    decoder: Polynomial  # forward, without gradient
    decoder_trained: Polynomial  # forward and backward
    head: Polynomial  # logits of each query and what is sampled from: forward, without gradient
    head_trained: Polynomial  # TRL's fused head, which computes logits twice
    parameters: int
    read_parameters: int  # by a forward pass; of the embedding it reads a row per token
    trained_parameters: int
    tensors: int  # that the parameters are in
    kv_elements: int  # of the cache, per token
    vocabulary: int


def count_model(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    adapt: Callable[[PreTrainedModel], nn.Module] = lambda model: model,
) -> ModelCosts:
    """The costs of a model's passes; a few seconds for any number of layers of one kind.

    Args:
        config: of the model, as transformers has it.
        dtype: of the weights.
        autocast: the type of matrix products in training, if another.
        adapt: puts an adapter on the model, whose parameters alone are then trained.
    """
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or ["full"]
    depths = (1, 2) if layers > 2 and len(set(kinds)) == 1 else (layers,)
    with FakeTensorMode(), parameters_replaced(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        whole, *models = (_make(_with_layers(config, depth), dtype, adapt) for depth in (layers, *depths))
        sizes = _sizes(whole)
        without = _make(_with_layers(config, 0), dtype, lambda model: model)
        if sizes["trained_parameters"] < sizes["parameters"]:  # an adapter, of whose layers none is left
            without.requires_grad_(False)
            without.enable_input_require_grads()
        head = fit(_sampling(without)) - fit(_forward(without))
        head_trained = fit(_training(without, head=True)) - fit(_training(without))
        decoder, decoder_trained = (
            _extrapolated([fit(kind(model)) for model in models], layers) for kind in (_forward, _training)
        )
        per_layer = sum(t.numel() for pair in _caches(models[0], 1) for t in pair) // depths[0]
    return ModelCosts(decoder, decoder_trained, head, head_trained, kv_elements=layers * per_layer, **sizes)


def _extrapolated(counted: list[Polynomial], layers: int) -> Polynomial:
    """By one layer and two, or as it is where the layers differ and all were counted."""
    shallow, deeper = counted[0].coefficients, counted[-1].coefficients
    return Polynomial(shallow + (layers - 1) * (deeper - shallow))


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    resized = copy.deepcopy(config)
    text = resized.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return resized


def _make(config: PretrainedConfig, dtype: torch.dtype, adapt: Callable[[PreTrainedModel], nn.Module]) -> Any:
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return adapt(model)


def _decoder(model: PreTrainedModel) -> Any:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model


def _caches(model: PreTrainedModel, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer for a row of so many tokens."""
    from transformers import DynamicCache

    from trl_ext.compat.layers import CACHE

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        _decoder(model)(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True, **{CACHE: cache})
    return [(layer.keys, layer.values) for layer in cache.layers if layer.keys is not None]


def _inputs(model: PreTrainedModel, queries: int, past: int, trained: bool) -> dict[str, Any]:
    """A row's tokens after a cache of others, which in training has a gradient, as shared prompts have."""
    from transformers import DynamicCache

    from trl_ext.compat.layers import CACHE

    cache = DynamicCache(config=model.config)
    for layer, pair in enumerate(_caches(model, past)):
        cache.update(*(part.detach().requires_grad_(trained) for part in pair), layer)
    return {
        "input_ids": torch.zeros(1, queries, dtype=torch.long),
        "attention_mask": torch.ones(1, past + queries, dtype=torch.long),
        CACHE: cache,
    }


def _forward(model: PreTrainedModel) -> Measure:
    def measure(queries: int, past: int) -> np.ndarray:
        inputs = _inputs(model, queries, past, trained=False)
        with torch.no_grad(), Counter() as counter:
            _decoder(model)(**inputs, use_cache=True)
        return counter.totals

    return measure


def _training(model: PreTrainedModel, head: bool = False) -> Measure:
    """Forward and backward, with TRL's fused head or from the last hidden state."""

    def measure(queries: int, past: int) -> np.ndarray:
        for parameter in model.parameters():  # a step adds up the gradients of its micro-batches
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        inputs = _inputs(model, queries, past, trained=True)
        with Counter() as counter:
            if head:
                out = model(**inputs, shift_labels=inputs["input_ids"], fused_lm_head=True).log_probs
            else:
                out = _decoder(model)(**inputs, use_cache=True).last_hidden_state
            if out.requires_grad:
                out.backward(torch.ones_like(out))
        return counter.totals

    return measure


def _sampling(model: PreTrainedModel) -> Measure:
    """Forward, logits, and what drawing a token takes."""

    def measure(queries: int, past: int) -> np.ndarray:
        inputs = _inputs(model, queries, past, trained=False)
        with torch.no_grad(), Counter() as counter:
            hidden = _decoder(model)(**inputs, use_cache=True).last_hidden_state
            scores = model.get_output_embeddings()(hidden)[0].float()
            scores.logsumexp(dim=-1)
            torch.multinomial(scores.softmax(dim=-1), 1)
        return counter.totals

    return measure


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parameters = sum(p.numel() for p in model.parameters())
    looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    return {
        "parameters": parameters,
        "read_parameters": parameters - looked_up,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tensors": sum(1 for _ in model.parameters()),
        "vocabulary": head.weight.shape[0],
    }
