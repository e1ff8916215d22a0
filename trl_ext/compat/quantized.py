"""bitsandbytes' 4-bit layers on a CPU: kept in the layout that has a gradient."""

from __future__ import annotations

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
