"""Whether checkpointed layers get a cache is up to who passes it; attention keeps rows apart that stand in one."""

from __future__ import annotations

import warnings

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.tiny import tiny_model
from trl_ext.compat.layers import CACHE, Lengths, attend_by_row, caches_kept, can_keep_caches, keys_with


def tokens_cached() -> int:
    """How many of three tokens a checkpointed model puts into a cache."""
    model, cache = tiny_model().train(), DynamicCache()
    model.gradient_checkpointing_enable()
    model.base_model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False, **{CACHE: cache})
    return cache.get_seq_length()


def test_checkpointed_layers_get_the_cache_only_where_asked_to() -> None:
    assert tokens_cached() == 0
    with caches_kept():
        assert tokens_cached() == 3
    assert tokens_cached() == 0


def test_the_caches_name_is_not_a_deprecated_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_model().base_model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True, **{CACHE: DynamicCache()})


def test_models_without_such_layers_cannot_keep_caches() -> None:
    assert can_keep_caches(tiny_model())
    assert not can_keep_caches(torch.nn.Linear(2, 2))


def test_rows_in_one_attend_to_their_own_earlier_tokens() -> None:
    random, layer = torch.Generator().manual_seed(0), torch.nn.Module()
    query, key, value = (torch.randn(1, 2, n, 8, generator=random, dtype=torch.float64) for n in (6, 9, 9))
    lengths = Lengths([2, 1, 3], [4, 1, 4], torch.device("cpu"))
    attend_by_row()
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found = attend(layer, query, keys_with(lengths, key.clone()), value, None)[0]
    assert lengths.seen == 1
    for place, keys in enumerate([[0, 1, 2], [0, 1, 2, 3], [4], [5, 6], [5, 6, 7], [5, 6, 7, 8]]):
        scores = (query[0, :, place, None] * key[0, :, keys]).sum(dim=-1) / 8**0.5  # (heads, keys)
        expected = (scores.softmax(dim=-1)[..., None] * value[0, :, keys]).sum(dim=1)
        assert torch.allclose(found[0, place], expected, atol=1e-12)
    others = query, key[:, :, :6], value[:, :, :6], None
    assert torch.equal(attend(layer, *others)[0], sdpa_attention_forward(layer, *others)[0])
