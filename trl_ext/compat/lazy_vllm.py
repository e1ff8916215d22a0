"""Lazy loading of vLLM, which TRL imports whenever it is installed, at a cost of five seconds.

To be imported before TRL's trainers; if they have been imported already, so has vLLM, and nothing changes.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import_utils = importlib.import_module("trl.import_utils")  # not an attribute of the lazy module `trl`

with patch.object(import_utils, "is_vllm_available", lambda min_version=None: False):
    from trl.generation import vllm_client, vllm_generation

package: Any = importlib.import_module("trl.generation")
package.is_vllm_available = import_utils.is_vllm_available  # the block's own answer is for the block alone


def _available(min_version: str | None = None) -> bool:
    """TRL's check before it uses vLLM, in our trainers or its own."""
    is_available: bool = import_utils.is_vllm_available(min_version)
    if is_available:
        load_vllm()
    return is_available


if not hasattr(vllm_generation, "LLM"):
    vllm_generation.is_vllm_available = vllm_client.is_vllm_available = _available


def load_vllm() -> None:
    """Set the names in TRL's modules that importing them with vLLM would have set; `test_seam.py` pins the names."""
    if hasattr(vllm_generation, "LLM"):
        return
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    importlib.reload(vllm_client)
    vars(vllm_generation).update({
        "LLM": LLM,
        "RequestOutput": RequestOutput,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
        "VLLMClient": vllm_client.VLLMClient,
        "is_vllm_available": import_utils.is_vllm_available,
    })  # fmt: skip
