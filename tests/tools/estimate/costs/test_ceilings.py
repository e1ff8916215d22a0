"""Seconds and what binds them, by hand, on a device with round figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from trl_ext.tools.estimate.costs.ceilings import Machine
from trl_ext.tools.estimate.costs.operations import Work
from trl_ext.tools.estimate.efficiency import Efficiency
from trl_ext.tools.estimate.hardware import Gpu

GPU = Gpu("round", memory=1000, bf16=400.0, tf32=200.0, fp32=100.0, bandwidth=50.0, interconnect=20.0)
HALF = Efficiency(compute=0.5, memory=0.5, interconnect=0.5, op_seconds=0.01)
PYTHON_FIRST = Machine(replace(GPU, asynchronous=False), HALF)
MACHINE = Machine(GPU, HALF)


def test_products_take_flops_or_bytes_and_the_rest_its_bytes() -> None:
    # 100 FLOPs at 50 a second: 2 s, more than 25 bytes at 25 a second; 50 bytes more: 2 s
    found = MACHINE.spend(Work(flops=100, product_bytes=25, other_bytes=50), torch.float32)
    assert found.seconds == pytest.approx(4.0)
    assert found.by_ceiling["compute"] == found.by_ceiling["memory bandwidth"] == pytest.approx(2.0)
    # 100 bytes: 4 s, and no compute
    found = MACHINE.spend(Work(flops=100, product_bytes=100), torch.float32)
    assert (found.seconds, found.bound) == (pytest.approx(4.0), "memory bandwidth")


def test_lower_precision_has_another_peak() -> None:
    work = Work(flops=100)
    assert MACHINE.spend(work, torch.bfloat16).seconds == pytest.approx(0.5)
    assert MACHINE.spend(work, torch.float32).seconds == pytest.approx(2.0)


def test_python_hides_behind_a_gpu_and_adds_to_a_cpu() -> None:
    work = Work(flops=100, operations=100)  # 2 s, and 1 s of Python
    assert MACHINE.spend(work, torch.float32).seconds == pytest.approx(2.0)
    assert PYTHON_FIRST.spend(work, torch.float32).seconds == pytest.approx(3.0)
    slow = MACHINE.spend(work * 1, torch.float32, host=5.0)
    assert (slow.seconds, slow.bound) == (pytest.approx(5.0), "host")
    # 2 s of compute and then 2 s of memory, more than 3 s of Python
    assert MACHINE.spend(Work(flops=100, other_bytes=50), torch.float32, host=3.0).seconds == pytest.approx(4.0)


def test_each_pass_has_its_own_ceiling() -> None:
    # the first: 2 s of compute; the second: 0.2 s, but 1 s of Python
    work = Work(flops=np.array([100.0, 10.0]), operations=np.array([100.0, 100.0]))
    found = MACHINE.spend(work, torch.float32)
    assert (found.by_ceiling["compute"], found.by_ceiling["host"]) == pytest.approx((2.0, 1.0))
    assert found.bound == "compute"


def test_the_wire_is_not_overlapped_and_hosts_slow_it_down() -> None:
    work = Work(flops=100, wire_bytes=50)  # 2 s, and 50 bytes at 10 a second
    assert MACHINE.spend(work, torch.float32).seconds == pytest.approx(7.0)
    far = Machine(GPU, replace(HALF, network=5.0), hosts=2)
    assert (far.spend(work, torch.float32).seconds, far.spend(work, torch.float32).bound) == (12.0, "interconnect")
    assert Machine(GPU, replace(HALF, network=50.0), hosts=2).spend(work, torch.float32).seconds == 7.0


def test_nothing_to_do_is_bound_by_nothing() -> None:
    assert MACHINE.spend(Work(), torch.float32).bound == "-"
