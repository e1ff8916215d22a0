"""The colocated vLLM engine: how it is made, and how the policy's weights reach it.

TRL passes vLLM one parameter per call, into weights that vLLM has repacked or quantized since it loaded them. Here all
of them go through one layerwise reload (vLLM's `reload_weights`), which restores a layer's loading format, loads it and
processes it again, with the memory of one layer at a time.
"""

from __future__ import annotations

from trl_ext.compat.lazy_vllm import load_vllm
from trl_ext.generation.vllm_errors import readable_failure

# isort: split
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from trl_ext.compat.trl_engine import backend_made_by, engine_started_with, requests_with
from trl_ext.generation.request_seeds import Place, RequestSeeds

BUCKET_BYTES = 512 * 2**20  # of parameters that ZeRO-3 gathers at a time


class EngineConfig(Protocol):
    """The part of a config that concerns the engine."""

    use_vllm: bool

    def engine_settings(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""


@contextlib.contextmanager
def engine_settings(config: EngineConfig) -> Iterator[None]:
    """While `GRPOTrainer` is made: its vLLM backend is `ColocatedEngine`, with the config's engine settings."""
    if config.use_vllm:
        load_vllm()
    with backend_made_by(functools.partial(ColocatedEngine, engine_settings=config.engine_settings())):
        yield


class ColocatedEngine(VLLMGeneration):
    """TRL's vLLM backend; in server mode it is TRL's own in every respect."""

    def __init__(self, *args: Any, engine_settings: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.engine_settings = engine_settings or {}
        self.seconds_syncing = 0.0  # in all
        self.seeds: RequestSeeds | None = None  # None: vLLM's own
        super().__init__(*args, **kwargs)

    def seed_requests(self, seed: int, place: Callable[[], Place]) -> None:
        """From now on every request of a colocated engine has a seed of its own; see `RequestSeeds`."""
        if self.mode == "colocate":
            self.seeds = RequestSeeds(seed, self.accelerator.process_index // self.tensor_parallel_size, place)

    def fixed_seed(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """In the block what is sampled follows from `seed`, and later samples are what they would be without it."""
        return contextlib.nullcontext() if self.seeds is None else self.seeds.fixed(seed)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, which makes one `SamplingParams` for all prompts."""
        if self.seeds is None:
            return super().generate(*args, **kwargs)
        with requests_with(self.llm, self.seeds.applied):
            return super().generate(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            super()._init_vllm()
            return
        prepare_cpu()
        with engine_started_with(**self.engine_settings), readable_failure():
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Push the policy's weights; a collective operation, since ZeRO and FSDP gather them."""
        began = time.perf_counter()
        self._push_weights()
        self.seconds_syncing += time.perf_counter() - began

    def _push_weights(self) -> None:
        if self.mode != "colocate":
            super().sync_weights()
            return
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        process_output_heads(runner.model)
        self.llm.reset_prefix_cache()

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        if self.mode != "colocate" or self._dist.is_fsdp:
            yield from super()._iter_named_params()
        elif is_peft_model(self.model):
            yield from self._iter_merged()
        else:
            for bucket in _buckets(self.model.named_parameters()):
                with self._dist.gather_params([param for _, param in bucket]):
                    for name, param in bucket:
                        yield self._fix_param_name_to_vllm(name), param.data

    def _iter_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Base weights with the adapter's updates in them, one layer at a time, the policy being left as it is.

        TRL merges and unmerges in place, which in bfloat16 changes the base weights a little with every sync.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        from trl_ext.generation.adapters import merged

        model = self.model
        layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
        for name, param in model.named_parameters():
            if model.prefix in name or "original_module" in name:
                continue
            layer = layers.get(name.rpartition(".base_layer.")[0])
            gathered = self._dist.gather_params([param, *(layer.parameters() if layer else ())])
            with gathered, merged(layer) if layer else contextlib.nullcontext():
                fixed = self._fix_param_name_to_vllm(_base_name(name), extra_prefixes=["modules_to_save.default."])
                yield fixed, param.data


def prepare_cpu() -> None:
    """Without a GPU: 1 GiB for the cache, where vLLM would take half of the machine's memory."""
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def process_output_heads(model: torch.nn.Module) -> None:
    """Repack output heads again: one that is tied to the embedding gets no weights of its own, so no reload does it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def _buckets(parameters: Iterator[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Named parameters in runs of at most `BUCKET_BYTES` (or one larger parameter)."""
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, param in parameters:
        count = getattr(param, "ds_numel", param.numel())  # ZeRO-3 keeps an empty tensor of a partitioned parameter
        if bucket and size + count * param.element_size() > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, param))
        size += count * param.element_size()
    if bucket:
        yield bucket
