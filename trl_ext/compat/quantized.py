"""bitsandbytes' layers: kept in the layout that has a gradient, and read as what their forward pass multiplies by."""

from __future__ import annotations

from peft.utils.integrations import dequantize_bnb_weight, get_bnb_param_type
from torch import nn

_PACKS = "support_avx512bf16_for_cpu"  # of `Linear4bit` in bitsandbytes 0.50, on processors with AVX-512's bfloat16


def keep_gradients(model: nn.Module) -> None:
    """Have a model's 4-bit layers not repack their weights for inference, and with scales rounded to bfloat16.

    A layer that is called in evaluation mode, as a rollout does, would do so for good, and what it computes has no
    gradient then, in training mode either: adapters below it learned nothing, without a word.
    """
    for layer in model.modules():
        if getattr(layer, _PACKS, False):
            setattr(layer, _PACKS, False)


def dequantize(model: nn.Module) -> None:
    """Put plain layers in the place of a model's quantized ones, as `dequantized` has them."""
    for path, layer in list(model.named_modules()):
        if (plain := dequantized(layer)) is not layer:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)


def dequantized(layer: nn.Module) -> nn.Module:
    """A linear layer with the weights, (out, in), that a layer of bitsandbytes multiplies by; any other layer itself.

    They are of the dtype that the layer computes in. An 8-bit layer rounds its inputs too, which no weights can say.
    """
    if not (isinstance(layer, nn.Linear) and get_bnb_param_type(layer.weight)):
        return layer
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    matrix = dequantize_bnb_weight(layer.weight, state=getattr(layer, "state", None))
    plain.weight = nn.Parameter(matrix, requires_grad=False)
    plain.bias = layer.bias
    return plain
