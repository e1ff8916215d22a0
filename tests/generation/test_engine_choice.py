"""What an engine is told of the CPU that it runs on."""

from __future__ import annotations

import pytest
import torch

from trl_ext.generation import engine_choice
from trl_ext.generation.engine_choice import dtype_to_sample_in
from trl_ext.generation.vllm_start import device_settings

ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")


@ON_A_CPU
@pytest.mark.parametrize(
    ("flags", "dtype"), [({}, "float32"), ({"amx_bf16": True}, "auto"), ({"avx512_bf16": True}, "auto")]
)
def test_bfloat16_is_kept_where_the_cpu_multiplies_it(
    flags: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert dtype_to_sample_in("auto") == dtype_to_sample_in(None) == device_settings()["dtype"] == dtype
    assert dtype_to_sample_in("auto", of_run="bfloat16") == "bfloat16", "as the run's validations were"
    assert dtype_to_sample_in("bfloat16") == "bfloat16"


@ON_A_CPU
def test_a_batch_holds_the_longest_prompt_and_every_sequence() -> None:
    sizes = [device_settings(*asked)["max_num_batched_tokens"] for asked in ((), (256,), (4096,), (256, 2048))]
    assert sizes == [None, 1024, 4096, 2048]


def test_a_gpu_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_choice, "fast_bf16", lambda: None)
    assert device_settings(256) == {}
    assert dtype_to_sample_in("auto") == "auto"
