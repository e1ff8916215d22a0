"""What TRL's vLLM backend takes for granted: the class that it is, vLLM's arguments, one set of parameters per call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from trl.generation import vllm_generation
from trl.trainer import grpo_trainer


@contextlib.contextmanager
def backend_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """While `GRPOTrainer` is made, `make` stands for its `VLLMGeneration`: TRL names the class in the constructor."""
    with patch.object(grpo_trainer, "VLLMGeneration", make):
        yield


@contextlib.contextmanager
def engine_started_with(**settings: Any) -> Iterator[None]:
    """While `VLLMGeneration` starts its engine, vLLM's `LLM` gets `settings` as well, and they win over TRL's."""
    llm = vllm_generation.LLM
    with patch.object(vllm_generation, "LLM", lambda **given: llm(**{**given, **settings})):
        yield


@contextlib.contextmanager
def requests_with(llm: Any, params_of: Callable[[Any, int], Any]) -> Iterator[None]:
    """While `VLLMGeneration` generates, `params_of(TRL's parameters, prompts)` are those of the requests."""
    ask = llm.generate

    def generate(prompts: Any, sampling_params: Any, **more: Any) -> Any:
        return ask(prompts, sampling_params=params_of(sampling_params, len(prompts)), **more)

    with patch.object(llm, "generate", generate):
        yield
