"""Whether checkpointed layers get a cache is up to who passes it."""

from __future__ import annotations

import warnings

import torch
from transformers import DynamicCache

from tests.support.tiny import tiny_model
from trl_ext.compat.layers import CACHE, caches_kept, can_keep_caches


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
