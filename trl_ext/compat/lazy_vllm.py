"""vLLM when it is used and not wherever it is installed: TRL imports it at once, five seconds of every start.

Imported before TRL's trainers; where somebody has imported those before, vLLM is loaded already and nothing changes.
"""

from __future__ import annotations

import importlib
from unittest.mock import patch

import_utils = importlib.import_module("trl.import_utils")  # which the lazy module `trl` has no attribute for

with patch.object(import_utils, "is_vllm_available", lambda min_version=None: False):
    from trl.generation import vllm_client, vllm_generation


def _available(min_version: str | None = None) -> bool:
    """What TRL asks before it uses vLLM, here or in a trainer of its own."""
    found: bool = import_utils.is_vllm_available(min_version)
    if found:
        load_vllm()
    return found


if not hasattr(vllm_generation, "LLM"):
    vllm_generation.is_vllm_available = vllm_client.is_vllm_available = _available


def load_vllm() -> None:
    """Put into TRL's modules what they have where vLLM is imported with them; `test_seam.py` holds the names."""
    if hasattr(vllm_generation, "LLM"):
        return
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    importlib.reload(vllm_client)
    found = {
        "LLM": LLM,
        "RequestOutput": RequestOutput,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
        "VLLMClient": vllm_client.VLLMClient,
        "is_vllm_available": import_utils.is_vllm_available,
    }
    for name, value in found.items():
        setattr(vllm_generation, name, value)
