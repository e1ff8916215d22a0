"""The LM head's tiles on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from trl_ext.compat import trl_head
from trl_ext.compat.trl_head import TILE, head_as_on_gpu, tiles_in_cache

CPU = torch.device("cpu")
ENTROPY = ("log_probs", "entropy")


def seen_by(monkeypatch: pytest.MonkeyPatch, function: str) -> list[torch.Tensor]:
    """The tiles that a fold of ours is called with."""
    found: list[torch.Tensor] = []
    fold = getattr(trl_head.FoldedInPlace, function)

    def seen(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(tile)
        fold(tile, *args, **kwargs)

    monkeypatch.setattr(trl_head.FoldedInPlace, function, seen)
    return found


def head_of(vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies and the gradient of the head's weights, of a small model in float32."""
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=vocabulary, num_key_value_heads=1, tie_word_embeddings=False, **size)
    model: Any = AutoModelForCausalLM.from_config(config)
    add_fused_lm_head(model, outputs=ENTROPY)
    ids = torch.arange(5)[None]
    with tiles_in_cache(vocabulary, device):
        outputs = model(ids, labels=ids, fused_lm_head=True)
    (outputs.log_probs * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
    return outputs.log_probs, outputs.entropy, model.lm_head.weight.grad


def test_a_cpus_tiles_are_narrow_and_the_head_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 2 * TILE + 300
    forward, backward = seen_by(monkeypatch, "fold_forward"), seen_by(monkeypatch, "fold_backward")
    ours = head_of(vocabulary, CPU)
    assert [tile.shape[1] for tile in forward] == [tile.shape[1] for tile in backward] == [TILE, TILE, 300]
    plain = head_of(vocabulary, torch.device("cuda"))
    assert len(forward) == len(backward) == 3
    for found, expected in zip(ours, plain, strict=True):  # sums of as many float32 numbers in another order
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_a_small_vocabulary_has_one_tile_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = seen_by(monkeypatch, "fold_forward")
    head_of(40, CPU)
    assert [tile.stride(0) for tile in tiles] == [40]


def test_an_estimate_for_a_gpu_keeps_trls_tiles() -> None:
    with head_as_on_gpu(), tiles_in_cache(TILE + 1, CPU):
        assert utils._CHUNKED_LOGPROB_CHUNK_SIZE > TILE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("outputs", "trained"),
    [(("log_probs",), (0,)), (ENTROPY, (0,)), (ENTROPY, (1,)), (ENTROPY, (0, 1)), (OPTIONAL_OUTPUTS, (0, 1))],
)
def test_folded_in_place_is_trls_function_bit_for_bit(
    dtype: torch.dtype,
    temperature: float,
    scale: float,
    softcap: float | None,
    outputs: tuple[str, ...],
    trained: tuple[int, ...],
) -> None:
    def found(function: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        hidden, weight = (3 * torch.randn(n, 16, dtype=dtype) for n in (37, 300))
        hidden.requires_grad_(), weight.requires_grad_()
        targets, factors = torch.randint(300, (37,)), torch.randn(2, 37)
        got = function.apply(hidden, weight, None, targets, temperature, 128, softcap, scale, outputs)
        loss: Any = sum((factors[place] * got[place]).sum() for place in trained)
        loss.backward()
        return [part for part in (*got, hidden.grad, weight.grad) if part is not None]

    for ours, trls in zip(found(trl_head.FoldedInPlace), found(ChunkedLogProbFunction), strict=True):
        assert torch.equal(ours, trls)


def test_the_step_of_grpo_needs_none_of_trls_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_trl_forward", "_trl_backward"):
        monkeypatch.setattr(trl_head, name, None)
    assert head_of(300, CPU)[2].any()
