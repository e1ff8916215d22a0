"""Attention keeps rows apart that stand in one."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_ext.compat.layers import attend_by
from trl_ext.step.attention import Lengths, by_row, keys_with


def test_rows_in_one_attend_to_their_own_earlier_tokens() -> None:
    random, layer = torch.Generator().manual_seed(0), torch.nn.Module()
    query, key, value = (torch.randn(1, 2, n, 8, generator=random, dtype=torch.float64) for n in (6, 9, 9))
    lengths = Lengths([2, 1, 3], [4, 1, 4], torch.device("cpu"))
    attend_by(by_row)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found = attend(layer, query, keys_with(lengths, key.clone()), value, None)[0]
    assert lengths.seen == 1
    for place, keys in enumerate([[0, 1, 2], [0, 1, 2, 3], [4], [5, 6], [5, 6, 7], [5, 6, 7, 8]]):
        scores = (query[0, :, place, None] * key[0, :, keys]).sum(dim=-1) / 8**0.5  # (heads, keys)
        expected = (scores.softmax(dim=-1)[..., None] * value[0, :, keys]).sum(dim=1)
        assert torch.allclose(found[0, place], expected, atol=1e-12)
    others = query, key[:, :, :6], value[:, :, :6], None
    assert torch.equal(attend(layer, *others)[0], sdpa_attention_forward(layer, *others)[0])


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_rows_in_one_have_the_gradient_of_rows_apart(key_heads: int, scaling: float | None) -> None:
    """The same of queries, keys and values, in one operation (float64) as row by row through autograd."""
    random, layer = torch.Generator().manual_seed(0), torch.nn.Module()
    layer.num_key_value_groups = 4 // key_heads
    sizes = (4, 6), (key_heads, 9), (key_heads, 9)
    given = [torch.randn(1, h, n, 8, generator=random, dtype=torch.float64, requires_grad=True) for h, n in sizes]
    weights = torch.randn(1, 6, 4, 8, generator=random, dtype=torch.float64)
    lengths = Lengths([2, 1, 3], [4, 1, 4], torch.device("cpu"))
    gradients = []
    for dropout in (0.0, 1e-300):  # with dropout, even one that drops nothing, rows go through sdpa one by one
        query, key, value = (part * 1 for part in given)
        found = by_row(layer, query, keys_with(lengths, key), value, None, scaling=scaling, dropout=dropout)[0]
        gradients.append([found.detach(), *torch.autograd.grad((found * weights).sum(), given)])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_rows_in_one_keep_few_tensors_for_the_backward_pass() -> None:
    """What gradient checkpointing packs, compares and unpacks one by one: as many for 3 rows as for 30."""
    kept: list[int] = []
    for rows in (3, 30):
        query = torch.randn(1, 2, 2 * rows, 8, requires_grad=True)
        lengths = Lengths([2] * rows, [2] * rows, torch.device("cpu"))
        count: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: count.append(t) or t, lambda t: t):
            by_row(torch.nn.Module(), query, keys_with(lengths, query * 1), query * 1, None)
        kept.append(len(count))
    assert kept == [5, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_rows_in_one_on_a_gpu_are_those_on_a_cpu(key_heads: int, dtype: torch.dtype) -> None:
    """Output and gradients of FlashAttention against float64; no mask is made, and five tensors are kept."""
    random, layer = torch.Generator().manual_seed(0), torch.nn.Module()
    lengths, sizes = ([2, 1, 130], [4, 1, 200]), ((4, 133), (key_heads, 205), (key_heads, 205))
    exact = [torch.randn(1, h, n, 64, generator=random).to(dtype).double() for h, n in sizes]
    weights = torch.randn(1, 133, 4, 64, generator=random).to(dtype).double()
    kept: list[torch.Tensor] = []
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        query, key, value = (part.to(device, kind).requires_grad_() for part in exact)
        rows = Lengths(*lengths, torch.device(device))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            output = by_row(layer, query, keys_with(rows, key), value, None)[0]
        gradients = torch.autograd.grad(output, (query, key, value), weights.to(device, kind))
        found.append([part.detach().cpu().double() for part in (output, *gradients)])
    assert "masks" not in rows.__dict__
    assert [part.device.type for part in kept] == ["cpu"] * 5 + ["cuda"] * 5
    for one, other in zip(*found, strict=True):
        # A few roundings of probabilities and sums to the dtype.
        assert (one - other).abs().max() < 4 * torch.finfo(dtype).eps * one.abs().max()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_in_one_have_the_dtype_of_autocast(device: str) -> None:
    """Queries and keys are in float32, as rotary positions leave them, and values in bfloat16, as a product does."""
    dtypes = torch.float32, torch.float32, torch.bfloat16
    query, key, value = (torch.randn(1, 2, 6, 16, device=device, dtype=dtype, requires_grad=True) for dtype in dtypes)
    lengths, kept = Lengths([2, 4], [2, 4], query.device), list[torch.Tensor]()
    with (
        torch.autocast(device, torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        found = by_row(torch.nn.Module(), query, keys_with(lengths, key), value, None)[0]
    found.square().sum().backward()
    assert found.dtype == torch.bfloat16
    assert len(kept) == 5
    assert all(part.grad.dtype == part.dtype for part in (query, key, value))
