"""GPUs by name, with the figures of their data sheets."""

from __future__ import annotations

import pytest

from trl_ext.registry import UnknownName
from trl_ext.tools.estimate.hardware import GPUS, gpu_by_name


@pytest.mark.parametrize("name", ["h100", "H100", "a100_80gb", "A100 80GB", "RTX 4090"])
def test_a_gpu_is_found_however_its_name_is_written(name: str) -> None:
    assert gpu_by_name(name) in GPUS.values()


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match=r"unknown GPU 'h10o'\. Did you mean 'h100'"):
        gpu_by_name("h10o")


def test_figures_are_dense_and_of_one_direction() -> None:
    h100 = GPUS["h100"]  # the sheet: 1,979 TFLOPS with sparsity, NVLink 900 GB/s in both directions together
    assert h100.bf16 == pytest.approx(1979e12 / 2, rel=1e-3)
    assert h100.interconnect == 450e9
    assert h100.bandwidth == 3.35e12
    assert h100.memory == int(79.11 * 2**30)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_every_gpu_is_quicker_in_lower_precision(gpu: object) -> None:
    assert gpu.bf16 >= gpu.tf32 >= gpu.fp32  # type: ignore[attr-defined]
    assert gpu.interconnect < gpu.bandwidth  # type: ignore[attr-defined]
