"""What a test needs that not every environment has."""

from __future__ import annotations

import importlib.util

import pytest

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
