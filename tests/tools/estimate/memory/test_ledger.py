"""Live bytes are counted as torch's own allocator counts them, and by what they are for."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from scripts.benchmarks import estimate_memory
from trl_ext.tools.estimate.memory.ledger import Answered, Ledger

KIB = 1024


def test_a_freed_tensor_is_no_longer_counted() -> None:
    with Ledger() as ledger:
        first = torch.empty(KIB, dtype=torch.uint8)
        second = torch.empty(2 * KIB, dtype=torch.uint8)
        assert ledger.total == 3 * KIB
        del first
        assert ledger.total == 2 * KIB
        third = torch.empty(KIB // 2, dtype=torch.uint8)
    assert sum(ledger.peaks["start"].values()) == 3 * KIB
    assert ledger.total == second.nbytes + third.nbytes


def test_a_view_and_an_inplace_result_take_no_memory() -> None:
    with Ledger() as ledger:
        tensor = torch.zeros(KIB, dtype=torch.uint8)
        view = tensor.view(32, 32)[1:]
        view.add_(1)
    assert ledger.total == KIB


def test_sizes_are_rounded_up_as_a_gpus_allocator_does() -> None:
    with Ledger(rounded_to=512) as ledger:
        kept = [torch.empty(n, dtype=torch.uint8) for n in (1, 512, 513)]
    assert len(kept) == 3
    assert ledger.total == 512 + 512 + 1024


def test_each_moment_has_its_own_peak() -> None:
    with Ledger() as ledger:
        with ledger.during("early"):
            kept = torch.empty(KIB, dtype=torch.uint8)
        with ledger.during("late", "optimizer"):
            torch.empty(3 * KIB, dtype=torch.uint8)
    assert kept.nbytes == sum(ledger.peaks["early"].values())
    assert sum(ledger.peaks["late"].values()) == 4 * KIB
    assert ledger.peaks["late"]["optimizer"] == 3 * KIB


def test_gradients_and_backward_passes_have_kinds_of_their_own() -> None:
    layer, data = nn.Linear(64, 32, bias=False), torch.ones(16, 64, requires_grad=True)
    with Ledger() as ledger:
        ledger.file_model(layer)
        with ledger.during("forward"):
            layer(data).square().sum().backward()
    assert ledger.live["parameters"] == ledger.live["gradients"] == 64 * 32 * 4
    assert ledger.peaks["forward"]["activations"] > 0
    assert ledger.peaks["forward"]["backward"] == 0
    assert ledger.peaks["backward"]["backward"] > 0


def test_a_recomputed_layer_makes_activations() -> None:
    layer, data = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8)), torch.ones(64, 8, requires_grad=True)
    with Ledger() as ledger:
        ledger.file_model(layer)
        with ledger.during("forward"):
            checkpoint(layer, data, use_reentrant=False).sum().backward()
    assert ledger.peaks["backward"]["activations"] >= 64 * 256 * 4


def test_autocast_copies_of_weights_are_told_from_activations() -> None:
    layer, data = nn.Linear(64, 32, bias=False), torch.ones(16, 64)
    with Ledger() as ledger, torch.autocast("cpu", torch.bfloat16):
        ledger.file_model(layer)
        result = layer(data)
        assert ledger.live["weight casts"] == 64 * 32 * 2
    assert result.dtype == torch.bfloat16


def test_a_step_peaks_where_the_allocators_events_say() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def step(rows: int) -> None:
        model(torch.ones(rows, 128)).square().sum().backward()

    step(1)  # the gradients are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(300)
    highest = max(accumulate(size for _, size in estimate_memory.allocations(profiler)))
    with Ledger() as ledger:
        ledger.file_model(model)
        for parameter in model.parameters():
            assert parameter.grad is not None
            ledger.file(parameter.grad, "gradients")
        before = ledger.total
        step(300)
    assert sum(ledger.peaks["start"].values()) - before == pytest.approx(highest, rel=0.01)


def test_two_gradients_of_a_fake_weight_are_added_in_place() -> None:
    def backward() -> None:
        weight, data = torch.ones(256, 256, requires_grad=True), torch.ones(4, 256)
        (data @ weight @ weight).sum().backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward()
    with FakeTensorMode(), Ledger() as ledger, ledger.during("forward"):
        backward()
    highest = max(accumulate(size for _, size in estimate_memory.allocations(profiler)))
    assert sum(ledger.peaks["backward"].values()) == pytest.approx(highest, rel=0.01)


def test_a_mask_selects_as_many_as_are_said() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Answered(lambda shape: shape[0] * 3):
        values, mask = torch.ones(2, 5, 7, requires_grad=True), torch.ones(2, 5, dtype=torch.bool)
        chosen = values[mask]
        assert chosen.shape == (6, 7)
        assert torch.masked_select(values[..., 0], mask).shape == (6,)
        chosen.sum().backward()
        assert values.grad is not None
        assert values.grad.shape == values.shape


def test_a_value_that_is_asked_for_is_a_plain_number() -> None:
    with FakeTensorMode(), Answered(lambda shape: 1):
        assert torch.ones(3).sum().item() == 1.0
        assert not torch.ones(3, dtype=torch.bool).all()
