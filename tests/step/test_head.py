"""What `Head` makes of hidden states is what TRL's fused head makes of them, whatever the model does to its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from tests.support.tiny import WORDS, tiny_model
from trl_ext.step import Head

SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 1}  # fmt: skip
MODELS: dict[str, Any] = {
    "plain": tiny_model,
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=0.5)),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "scaling": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
}
IDS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 3, 11, 12, 1]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_its_logits_are_those_of_the_fused_head(name: str, temperature: float) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    head = Head(model, model.base_model)
    labels = torch.roll(IDS, -1, dims=1)
    labels[:, -1] = -100
    outputs = head(input_ids=IDS, shift_labels=labels, fused_lm_head=True)

    def of_labels(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    found = head.of_logits(of_labels, outputs.hidden[:, :-1].flatten(0, 1), labels[:, :-1].flatten())
    wanted = outputs.log_probs[:, :-1].flatten()
    assert_close(found, wanted, rtol=0, atol=2e-6)  # float32, summed in another order
    plain = model(input_ids=IDS).logits[:, :-1].float() / temperature
    assert_close(wanted, of_labels(plain.flatten(0, 1), labels[:, :-1].flatten()), rtol=0, atol=2e-6)
    gradients = [
        torch.autograd.grad(x.sum(), list(model.parameters()), retain_graph=True, allow_unused=True)
        for x in (found, wanted)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_a_few_tokens_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    head = Head(model, model.base_model)
    hidden = head(input_ids=IDS, shift_labels=IDS, fused_lm_head=True).hidden.flatten(0, 1)
    whole = head.of_logits(lambda logits: logits.exp(), hidden)
    monkeypatch.setattr(Head, "LOGITS_AT_A_TIME", 5 * len(WORDS))
    parts = head.of_logits(lambda logits: logits.exp(), hidden)
    assert len(parts) == 12
    assert_close(parts, whole, rtol=1e-6, atol=0)
