"""`Head`: a forward pass's last hidden states and its LM head, for what TRL's fused head does not tell of a token.

Letters: N tokens, H their hidden size, V tokens of the vocabulary, E events.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trl_ext.compat.trl_head import head_recorded


class Head:
    """A model whose forward passes tell, next to what TRL's fused head does, the `hidden` states that it is applied to.

    Args:
        model: with TRL's fused head, wrapped by the distributed backend.
        decoder: the part of it that maps tokens to hidden states.
    """

    LOGITS_AT_A_TIME = 2**25

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self.model, self.decoder = model, decoder
        self.hidden: Tensor | None = None  # of the latest pass, of every position
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._transform: tuple[float, float | None, float] = (1.0, None, 1.0)  # logit scale, soft cap, temperature

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        """Log-probabilities and entropies of each position, and its hidden state, all with a graph."""
        states: list[Tensor] = []
        hook = self.decoder.register_forward_hook(lambda _, args, output: states.append(output.last_hidden_state))
        try:
            with head_recorded(self._record):
                outputs = self.model(**inputs)
        finally:
            hook.remove()
        self.hidden = states[0]
        found = {name: getattr(outputs, name, None) for name in ("log_probs", "entropy", "aux_loss")}
        return SimpleNamespace(**found, hidden=states[0])

    def before(self, completion_ids: Tensor) -> Tensor:
        """(B, T, H) states that completions' tokens were predicted from, of a pass over rows that end with these."""
        assert self.hidden is not None, "there was no forward pass"
        return self.hidden[:, -completion_ids.shape[1] - 1 : -1]

    def _record(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int,
        softcap: float | None, scale: float, *outputs: object,
    ) -> None:  # fmt: skip
        self._weight, self._bias = _kept(weight), None if bias is None else _kept(bias)
        self._transform = scale, softcap, temperature

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N, V) in at least float32, as sampled from: capped and divided by the temperature."""
        assert self._weight is not None, "there was no forward pass"
        logits = nn.functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias)
        scale, softcap, temperature = self._transform
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature

    def of_logits(self, function: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        """`function(logits, ...)` of (N, H) hidden states and other (N, ...) tensors, a few tokens at a time.

        The logits are made again in the backward pass.
        """

        def of_some(some: Tensor, *of_others: Tensor) -> Tensor:
            return function(self.logits(some), *of_others)

        assert self._weight is not None, "there was no forward pass"
        size = max(1, self.LOGITS_AT_A_TIME // len(self._weight))
        parts = zip(*(values.split(size) for values in (hidden, *others)), strict=True)
        return torch.cat([self._again(of_some, *part) for part in parts])

    @staticmethod
    def _again(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return function(*values)
        value: Tensor = checkpoint(function, *values, use_reentrant=False)
        return value


def _kept(parameter: Tensor) -> Tensor:
    """What is left of it behind a forward pass: a copy where ZeRO-3, which has it whole here, takes it apart then."""
    return parameter.clone() if hasattr(parameter, "ds_tensor") else parameter
