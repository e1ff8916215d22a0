"""Stand-ins for bitsandbytes' layers, which has no fake tensors: packed weights, dequantized for each product.

They follow bitsandbytes 0.50 (`nn/modules.py`, `autograd/_functions.py`) and the layers that transformers replaces by
them: all linear ones but the LM head. Biases, embeddings and norms stay in the dtype that the model is loaded in.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

BLOCK = 64  # weights of a 4-bit layer that share a scale
OUTER_BLOCK = 256  # scales that share one of their own, with `use_bnb_nested_quant`


def quantize(model: PreTrainedModel, bits: int, nested: bool = False) -> PreTrainedModel:
    """The model with stand-ins in place of its linear layers.

    Args:
        bits: 4 or 8, of a weight.
        nested: whether scales of 4-bit weights are quantized too.
    """
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and module is not head:
            size = packed_bytes(module.out_features, module.in_features, bits, nested)
            module.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
            module.__class__ = QuantizedLinear
            cast(QuantizedLinear, module).keeps_input = bits == 8
    setattr(model, f"is_loaded_in_{bits}bit", True)  # which TRL asks for, to have the adapter in bfloat16
    return model


def packed_bytes(rows: int, columns: int, bits: int, nested: bool) -> int:
    """Bytes of a matrix of `rows` and `columns` and of its scales."""
    if bits == 8:
        return rows * columns + 4 * rows
    blocks = -(-rows * columns // BLOCK)
    scales = blocks + 4 * -(-blocks // OUTER_BLOCK) if nested else 4 * blocks
    return -(-rows * columns // 2) + scales


def elements(module: nn.Module) -> dict[nn.Parameter, int]:
    """The numbers that each of a module's own parameters holds, packed or not."""
    own = {parameter: parameter.numel() for parameter in module.parameters(recurse=False)}
    if isinstance(module, QuantizedLinear):
        own[module.weight] = module.out_features * module.in_features
    return own


class QuantizedLinear(nn.Linear):
    """A frozen linear layer of packed weights."""

    weight: nn.Parameter  # packed
    keeps_input: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, as in torch
        """`(..., in)` to `(..., out)`, computed in the dtype of the input, which autocast does not change."""
        with torch.autocast(input.device.type, enabled=False):
            found: Tensor = _Product.apply(input, self.weight, self.out_features, self.keeps_input)
            return found if self.bias is None else found + self.bias.to(found.dtype)


class _Product(torch.autograd.Function):
    """Packed weights are dequantized for each pass; 8-bit layers keep their input too, which they do not need."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, packed: Tensor, outputs: int, keeps_input: bool) -> Tensor:
        ctx.save_for_backward(packed, rows if keeps_input else None)
        ctx.shape = outputs, rows.shape[-1]
        return rows @ rows.new_empty(ctx.shape).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient @ gradient.new_empty(ctx.shape), None, None, None
