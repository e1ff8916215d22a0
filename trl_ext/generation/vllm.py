"""vLLM engines, colocated or servers: how they are made, and how the policy's weights reach them.

TRL passes vLLM one parameter per call, into weights that vLLM has repacked or quantized since it loaded them. Here all
of them go through one layerwise reload (vLLM's `reload_weights`), which restores a layer's loading format, loads it and
processes it again, with the memory of one layer at a time.
"""

from __future__ import annotations

from trl_ext.compat.lazy_vllm import load_vllm

# isort: split
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from trl_ext.compat.trl_engine import backend_made_by, engine_started_with, requests_with
from trl_ext.compat.vllm_steps import steps_counted
from trl_ext.errors import ServerError
from trl_ext.generation.adapter_sync import (
    AdapterFolder,
    Rollout,
    check_lora_sync,
    files_of,
    is_cheaper,
    name_of,
    reason_to_merge,
    room,
)
from trl_ext.generation.determinism import Row, check_model, engine_arguments
from trl_ext.generation.in_flight import InFlight, in_background, result_of
from trl_ext.generation.interruption import sampling
from trl_ext.generation.progress import advance
from trl_ext.generation.request_seeds import Place, RequestSeeds
from trl_ext.generation.sampling import OF_SERVERS
from trl_ext.generation.server import Servers, start_command, urls_of
from trl_ext.generation.vllm_start import device_settings, starting_vllm
from trl_ext.generation.weight_transfer import BACKEND, process_output_heads
from trl_ext.ranks import server_errors_on_all_ranks

BUCKET_BYTES = 512 * 2**20  # of parameters that ZeRO-3 gathers at a time


def round_to_fp8(weight: Tensor) -> Tensor:
    """The nearest 8-bit floats (e4m3), with one scale for the whole matrix."""
    scale = _scale(weight, torch.finfo(torch.float8_e4m3fn).max)
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def round_to_integers(weight: Tensor, largest: int) -> Tensor:
    """The nearest of the levels from -largest to largest, with one scale for the whole matrix."""
    scale = _scale(weight, largest)
    return (weight / scale).round() * scale


def _scale(weight: Tensor, largest: float) -> Tensor:
    return (weight.abs().max() / largest).clamp(min=torch.finfo(weight.dtype).tiny)  # a matrix of zeros stays one


# Values of `vllm_quantization` with which rollouts are of rounded matrices of the layers, in vLLM's own dtype: what a
# quantized engine does to a training, on hardware that has none. Validations are of the policy as it is.
SIMULATED: dict[str, Callable[[Tensor], Tensor]] = {
    "simulated_fp8": round_to_fp8,
    "simulated_int4": functools.partial(round_to_integers, largest=7),
    "simulated_int3": functools.partial(round_to_integers, largest=3),
}


class EngineConfig(Protocol):
    """The part of a config that concerns the engine."""

    use_vllm: bool
    vllm_mode: str
    vllm_lora_sync: str

    def engine_settings(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`."""


def engine_settings(config: EngineConfig) -> contextlib.AbstractContextManager[object]:
    """While `GRPOTrainer` is made: its vLLM backend is ours, with the config's engine settings."""
    if config.use_vllm:
        load_vllm()
    engine = ServerEngine if config.use_vllm and config.vllm_mode == "server" else ColocatedEngine
    rows = getattr(config, "generation_batch_size", None)
    ours: dict[str, Any] = {"engine_settings": config.engine_settings(), "lora_sync": config.vllm_lora_sync}
    return backend_made_by(functools.partial(engine, rollout_rows=rows, **ours))


class ColocatedEngine(VLLMGeneration):
    """TRL's vLLM backend, with seeds of its own and another way for the weights."""

    def __init__(
        self,
        *args: Any,
        engine_settings: dict[str, Any] | None = None,
        lora_sync: str = "auto",
        rollout_rows: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.engine_settings = dict(engine_settings or {})
        self.lora_sync, self.rollout_rows = lora_sync, rollout_rows
        self.sends_adapter = self.has_base = False
        self.adapter = AdapterFolder()
        self.covered: Row | None = self.engine_settings.pop("covered", None)
        self.rounding = SIMULATED.get(self.engine_settings.get("quantization", ""))
        if self.rounding:
            del self.engine_settings["quantization"]
        self.seconds_syncing = 0.0  # in all
        super().__init__(*args, **kwargs)

    def _sends_adapter(self) -> bool:
        """Whether the policy's adapter is sent by itself."""
        adapter = self.model.peft_config["default"] if is_peft_model(self.model) else None
        hindrances = {"sleeps": bool(self.enable_sleep_mode), "rounds": self.rounding is not None}
        hindrances["sharded"] = self._dist.is_fsdp
        check_lora_sync(self.lora_sync, adapter, **hindrances)
        if adapter is None or self.lora_sync == "merge" or reason_to_merge(adapter, **hindrances):
            return False
        return self._adapter_is_cheaper(adapter.r) or self.lora_sync == "adapter"

    def _adapter_is_cheaper(self, rank: int) -> bool:
        return False

    def seed_requests(self, seed: int, place: Callable[[], Place]) -> None:
        """Give every request a seed of its own, see `RequestSeeds`; to be called before any is made."""
        self.seeds = RequestSeeds(seed, self.accelerator.process_index // self.tensor_parallel_size, place)

    @contextlib.contextmanager
    def measuring(self, seed: int) -> Iterator[None]:
        """In the block samples follow from `seed`, and none are of rounded weights; later ones are as without it."""
        rounding, self.rounding = self.rounding, None
        try:
            if rounding:
                self.sync_weights()
            with self.seeds.fixed(seed):
                yield
        finally:
            self.rounding = rounding
            if rounding:
                self.sync_weights()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, which makes one `SamplingParams` for all prompts."""
        named = {"lora_request": self.adapter.request} if self.sends_adapter else {}
        with requests_with(self.llm, self.seeds.applied, **named), steps_counted(self.llm, advance), sampling():
            return super().generate(*args, **kwargs)

    def parameters(self) -> dict[str, Any]:
        """What it is told about sampling, in the words of vLLM's `SamplingParams`."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        settings |= {"min_p": self.min_p or 0.0, "max_tokens": self.max_completion_length}
        return {**settings, **self.generation_kwargs}

    def _init_vllm(self) -> None:
        own = self.engine_settings
        context = own.get("max_model_len") or self.max_model_length
        of_device = device_settings(context, own.get("max_num_seqs") or self.max_num_seqs)
        if self.covered is not None:
            of_text = self.model.config.get_text_config()
            check_model(self.covered, of_text.model_type, of_text._attn_implementation)
            own = {**own, **engine_arguments(self.covered, of_text._attn_implementation)}
        self.sends_adapter = self._sends_adapter()
        if self.sends_adapter:
            own = {
                **own,
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": room(self.model.peft_config["default"].r),
            }
        with engine_started_with(**{**of_device, **own}), starting_vllm():
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Push the policy's weights; a collective operation, since ZeRO and FSDP gather them."""
        began = time.perf_counter()
        self._push_weights()
        self.seconds_syncing += time.perf_counter() - began

    def _push_weights(self) -> None:
        if self.enable_sleep_mode:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if not self.has_base:
            runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
            runner.reload_weights(weights_iterator=self._engine_weights())
            process_output_heads(runner.model)
        self.has_base = self.sends_adapter
        if self.sends_adapter:
            self.adapter.write(files_of(self.model, self._dist))
            self.llm.llm_engine.add_lora(self.adapter.request)
        self.llm.reset_prefix_cache()

    def _engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._iter_named_params():
            of_a_layer = ".layers." in name and weight.ndim == 2
            yield name, self.rounding(weight) if self.rounding and of_a_layer else weight

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        if self._dist.is_fsdp:
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

        Without the updates where the adapter is sent by itself. TRL merges and unmerges in place, which in bfloat16
        changes the base weights a little with every sync.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        from trl_ext.compat.quantized import dequantized
        from trl_ext.generation.adapters import merged

        model = self.model
        layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
        for name, param in model.named_parameters():
            if model.prefix in name or "original_module" in name or ".modules_to_save.ref." in name:
                continue
            layer = layers.get(name.rpartition(".base_layer.")[0])
            path, _, kind = name.rpartition(".")
            gathered = self._dist.gather_params([param, *(layer.parameters() if layer else ())])
            base = name.removeprefix("base_model.model.").replace(".base_layer", "")
            with gathered:
                below = contextlib.nullcontext(dequantized(model.get_submodule(path)))
                with merged(layer) if layer and not self.sends_adapter else below as whole:
                    given = getattr(whole, kind).data
                    yield self._fix_param_name_to_vllm(base, extra_prefixes=["modules_to_save.default."]), given


class ServerEngine(ColocatedEngine):
    """vLLM servers: every rank sends them its own prompts, and the first rank the weights; by NCCL, as TRL does."""

    ahead: InFlight | None = None  # the next rollout, while steps on this one are made

    def _init_vllm(self) -> None:
        given: dict[str, Any] = self.generation_kwargs  # type: ignore[has-type]
        self.generation_kwargs = {**OF_SERVERS, **given}  # TRL leaves these to the server
        urls = urls_of(self.server_base_url, self.server_host, self.server_port)
        self.servers = Servers(urls, self.server_timeout, self.accelerator.device.type, self.group_port)
        if self.covered is not None:
            self.servers.refuse_dependence_on_batch()
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.servers.refuse_another_model(self.model.config, tokenizer, self.model.name_or_path)
        self.vllm_client = self.servers.each[0].client  # which TRL's methods use
        self.sends_adapter = self._sends_adapter()
        if self.servers.backend != BACKEND and self.accelerator.is_main_process:
            self.vllm_client.init_communicator(device=self.accelerator.device)
        self.accelerator.wait_for_everyone()

    def _push_weights(self) -> None:
        self.wait_for_ahead()
        if self.servers.backend != BACKEND:
            VLLMGeneration.sync_weights(self)
            return
        weights = iter(()) if self.has_base else self._iter_named_params()
        with server_errors_on_all_ranks():
            try:
                if self.accelerator.is_main_process and not self.has_base:
                    self.servers.push(weights)
            finally:
                for _ in weights:  # every rank takes part in gathering all of them, whatever has failed
                    pass
        if self.sends_adapter:
            self._push_adapter()

    def _push_adapter(self) -> None:
        files = files_of(self.model, self._dist)
        name = name_of(files)
        with server_errors_on_all_ranks():
            if self.accelerator.is_main_process:
                self.servers.push_adapter(name, files)
        self.servers.ask_for(name)
        self.has_base = True

    def _adapter_is_cheaper(self, rank: int) -> bool:
        device = self.servers.room_for_adapters(rank)
        if device is None and self.lora_sync == "adapter":
            started = start_command(self.model.name_or_path, room(rank))
            raise self.servers.each[0].refusal(f"has no room for an adapter of rank {rank}", f": {started}")
        if device is None or self.rollout_rows is None:
            return False
        parameters = sum(getattr(param, "ds_numel", param.numel()) for param in self.model.parameters())
        rollout = Rollout(self.rollout_rows, self.max_completion_length)
        return is_cheaper(parameters, self.model.dtype.itemsize, rollout, device)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[list[object] | None] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager[object] | None = None,
    ) -> tuple[Any, ...]:
        """As TRL's, but each rank asks for its own rows, and each row has a seed."""
        if hasattr(self.processing_class, "image_processor"):  # images go through TRL's client, on the first rank
            return tuple(VLLMGeneration.generate(self, prompts, images, num_generations, profiler))
        seeds = self.seeds.take(len(prompts), self.generation_kwargs.get("seed"))
        with server_errors_on_all_ranks(), profiler or contextlib.nullcontext():
            generated = self.servers.generate(prompts, seeds, self._settings())
        return prompts, *generated

    def ask_ahead(self, prompts: list[list[int]], version: int, place: Place) -> None:
        """Have a rollout's completions sampled from now on, with the weights that the servers have.

        They are those that `generate` would give with these weights.

        Args:
            version: optimizer steps that these weights have had.
            place: in the run, of the rollout.
        """
        seeds = self.seeds.at(place, len(prompts), self.generation_kwargs.get("seed"))
        arrived: list[int] = []
        ask = functools.partial(self.servers.generate, prompts, seeds, self._settings(), arrived.append)
        self.ahead = InFlight(prompts, version, in_background([ask])[0], arrived)

    def answers_ahead(self, prompts: list[list[int]]) -> tuple[Any, ...]:
        """What `generate` returns, of the rollout that was asked for ahead, and its weights' version; collective."""
        ahead = self.ahead
        assert ahead is not None
        try:
            with server_errors_on_all_ranks(), sampling():
                answers = ahead.of(prompts)
        except ServerError:
            self.ahead = None
            raise
        self.ahead = None  # but not where it was interrupted: a checkpoint has it
        self.seeds.take(len(prompts))  # which a further try at this place counts
        return prompts, *answers, ahead.version

    def wait_for_ahead(self) -> None:
        """Until all ranks' rollouts asked for ahead are there, since a push would get into them; collective."""
        if self.ahead is not None:
            with server_errors_on_all_ranks():
                result_of(self.ahead.answers)

    def _settings(self) -> dict[str, Any]:
        same = "repetition_penalty temperature top_p top_k logprobs structured_outputs_regex generation_kwargs"
        settings = {name: getattr(self, name) for name in same.split()}  # arguments of `VLLMClient.generate`
        return settings | {"min_p": self.min_p or 0.0, "max_tokens": self.max_completion_length}


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
