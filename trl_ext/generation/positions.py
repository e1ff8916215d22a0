"""What tokens know of their places: rows may be moved, cut and shared where it is their distances alone.

Rotary embeddings turn queries and keys by angles that grow with a token's place, so that a score depends on a distance.
Some change these angles with the length of the pass: `dynamic` scaling, and `longrope` of Phi-3 and Phi-4-mini past
4,096 tokens. A row's log-probabilities then depend on the rows, and on the padding, that it is computed with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Types of layers that the tests hold to rows alone; a compressed attention, for one, begins its blocks at the padding.
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"}
_SHORT = 8  # tokens whose angles are compared


def unsupported_positions(model: PreTrainedModel) -> str | None:
    """Why rows of this unwrapped model cannot be moved against their padding, or None."""
    if not has_rotary_positions(model):
        return "its positions are not rotary"
    config = model.config.get_text_config()
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS):
        return f"its layers have {', '.join(others)}, which may depend on places"
    if getattr(config, "alibi", False):
        return "its attention has a bias that is made from the padding"
    if getattr(config, "attn_temperature_tuning", False) or "llama_4_scaling_beta" in config.rope_parameters:
        return "its queries are scaled by their places"
    return "its rotary embedding changes with the length of a pass" if rope_follows_length(model) else None


def has_rotary_positions(model: PreTrainedModel) -> bool:
    """Whether only distances between tokens count; learned positions move with the padding before a prompt."""
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))


def rope_follows_length(model: PreTrainedModel) -> bool:
    """Whether the angles of a rotary embedding's first places differ between a short pass and one beyond its context.

    Both what transformers computes for the model's configuration and what the model's own modules do are tried, so that
    neither a name of a scaling nor a class decides.
    """
    config = model.config.get_text_config()
    with unset_fake_temporarily():
        if any(_frequencies_differ(config, *parameters) for parameters in _parameters(config)):
            return True
        modules = model.modules() if isinstance(model, nn.Module) else ()
        return any(_angles_differ(module, beyond_context(config)) for module in modules)


def beyond_context(config: Any) -> int:
    """A length in tokens past which every known scaling of this text model's configuration has begun."""
    lengths = [getattr(config, "max_position_embeddings", 0), getattr(config, "original_max_position_embeddings", 0)]
    lengths += [part.get("original_max_position_embeddings") or 0 for _, part in _parameters(config)]
    return 2 * max(length or 0 for length in lengths) + 2 * _SHORT


def _parameters(config: Any) -> Iterable[tuple[str | None, Mapping[str, Any]]]:
    """The rotary embeddings' parameters, by the type of layer where each type has its own."""
    parameters: Mapping[str, Any] = config.rope_parameters
    if parameters and all(isinstance(part, Mapping) for part in parameters.values()):
        return parameters.items()
    return [(None, parameters)]


def _frequencies_differ(config: Any, layer_type: str | None, parameters: Mapping[str, Any]) -> bool:
    compute = ROPE_INIT_FUNCTIONS.get(str(parameters.get("rope_type")))
    if compute is None:  # the model's own, without a scaling
        return False
    given = {} if layer_type is None else {"layer_type": layer_type}
    of_lengths = [compute(config, torch.device("cpu"), seq_len=n, **given) for n in (_SHORT, beyond_context(config))]
    (short, scale), (long, other_scale) = of_lengths
    return scale != other_scale or not torch.equal(short, long)


def _angles_differ(module: nn.Module, length: int) -> bool:
    """Whether a module is a rotary embedding that turns its first places otherwise in a long pass."""
    buffers = {name: part for name, part in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    if not buffers or any(part.is_meta or isinstance(part, FakeTensor) for part in buffers.values()):
        return False
    layer_types = [None, *(name.removesuffix("_inv_freq") for name in buffers if name != "inv_freq")]
    takes_type = "layer_type" in inspect.signature(module.forward).parameters
    return any(
        _turned_otherwise(module, length, next(iter(buffers.values())), {"layer_type": name} if name else {})
        for name in (layer_types[1:] if takes_type and len(layer_types) > 1 else [None])
        if name is None or not name.endswith("original")
    )


def _turned_otherwise(module: nn.Module, length: int, buffer: Tensor, given: dict[str, str]) -> bool:
    """Compare on copies, since some keep the frequencies of the longest pass so far."""
    places = torch.arange(_SHORT, device=buffer.device)[None]
    longer = torch.cat([places, torch.full_like(places[:, :1], length)], dim=1)
    outputs = []
    for positions in (places, longer):
        states = torch.zeros(1, positions.shape[1], 1, device=buffer.device)
        try:
            with torch.no_grad():
                turned = tree_leaves(copy.deepcopy(module)(states, positions, **given))
        except (TypeError, RuntimeError, ValueError, IndexError, KeyError):  # it takes other inputs
            return False
        outputs.append([part[:, :_SHORT] for part in turned if isinstance(part, Tensor) and part.ndim >= 2])
    return any(not torch.equal(short, long) for short, long in zip(*outputs, strict=True))
