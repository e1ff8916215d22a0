"""Patches of TRL's vLLM backend: its class, the engine's arguments, and the parameters of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


def backend_made_by(make: Callable[..., object]) -> AbstractContextManager[object]:
    """While a `GRPOTrainer` is constructed, `make` replaces the class `VLLMGeneration`, which TRL hard-codes."""
    return patch.object(grpo_trainer, "VLLMGeneration", make)


@contextmanager
def engine_started_with(**settings: object) -> Iterator[None]:
    """While `VLLMGeneration` starts its engine, `settings` override those that TRL passes to vLLM's `LLM`.

    TRL also has the engine quantize its weights where the policy's are; ours is given what those multiply by.
    """
    llm = vllm_generation.LLM
    with (
        patch.object(vllm_generation, "LLM", lambda **given: llm(**{**given, **settings})),
        patch.object(vllm_generation, "is_bitsandbytes_available", lambda: False),
    ):
        yield


def requests_with(
    llm: LLM, params_of: Callable[[SamplingParams, int], Sequence[SamplingParams]], **own: Any
) -> AbstractContextManager[object]:
    """While `VLLMGeneration` generates, the requests' parameters are `params_of(TRL's parameters, prompt count)`.

    Args:
        own: further arguments of vLLM's `generate`.
    """
    ask = llm.generate

    def generate(prompts: Sized, sampling_params: SamplingParams, **more: Any) -> list[RequestOutput]:
        return ask(prompts, sampling_params=params_of(sampling_params, len(prompts)), **more, **own)

    return patch.object(llm, "generate", generate)
