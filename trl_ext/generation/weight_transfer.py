"""Weights to a vLLM server inside its HTTP requests: the server's side of the backend `http`.

vLLM's own ways of giving a running server new weights need GPUs on both sides (NCCL) or one machine (CUDA IPC). This
one needs what the requests for completions need, so it works on CPUs and through a firewall. The server's workers
register it with vLLM when they import this module, which `--worker-extension-cls` has them do; the whole command is
`trl_ext.generation.server.start_command`. What comes in an update is a part of a `TensorStream`.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from dataclasses import dataclass

import torch
from torch import nn

from trl_ext.generation.tensor_stream import TensorStream

BACKEND = "http"


def process_output_heads(model: nn.Module) -> None:
    """Repack output heads again: one that is tied to the embedding gets no weights of its own, so no reload does it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


def register() -> None:
    """Add the backend to vLLM's, once per process.

    Raises:
        RuntimeError: vLLM is older than 0.25, where a worker and its weight transfer shared the work otherwise.
    """
    from vllm.distributed.weight_transfer import base, factory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if not hasattr(base.WeightTransferEngine, "start_weight_update"):
        raise RuntimeError(
            f"the weight transfer backend {BACKEND} needs vLLM 0.25 or newer: pip install 'trl_ext[vllm]'"
        )

    @dataclass
    class InitInfo(base.WeightTransferInitInfo):
        """Nothing: the requests are all there is."""

    @dataclass
    class UpdateInfo(base.WeightTransferUpdateInfo):
        """Part of a push."""

        names: list[str]  # of the tensors whose first byte is in this part
        dtype_names: list[str]
        shapes: list[list[int]]
        data: str  # the bytes, in base64, since vLLM's route takes JSON

    class HttpWeightTransfer(base.WeightTransferEngine[InitInfo, UpdateInfo]):
        """What a worker does with the routes of vLLM's weight transfer."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        stream: TensorStream

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            """Nothing to connect."""

        def start_weight_update(self) -> None:
            """Have every layer take its weights as a checkpoint has them."""
            self.stream = TensorStream()
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, object]) -> None:
            """As the base class does, which also waits for an accelerator where there is none."""
            self.receive_weights(self.parse_update_info(update_info))
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            """Load the tensors that end in this part."""
            self.stream.announce(update_info.names, update_info.dtype_names, update_info.shapes)
            for name, tensor in self.stream.feed(base64.b64decode(update_info.data, validate=True)):
                self.model.load_weights([(name, tensor.to(self.device))])

        def finish_weight_update(self) -> None:
            """Process the layers' new weights, for kernels and quantization."""
            finalize_layerwise_reload(self.model, self.model_config)
            process_output_heads(self.model)
            self.stream.check_complete()

        def shutdown(self) -> None:
            """Nothing to close."""

        @staticmethod
        def trainer_send_weights(iterator: object, trainer_args: object) -> None:
            """Refuse, since `server.Servers.push` sends; abstract in vLLM up to 0.27."""
            raise NotImplementedError(f"the backend {BACKEND} is sent to by trl_ext.generation.server")

    if BACKEND not in factory.WeightTransferEngineFactory._registry:
        factory.WeightTransferEngineFactory.register_engine(BACKEND, HttpWeightTransfer)


class Registered:
    """A worker extension, for `--worker-extension-cls`: naming it has the worker import this module, which registers.

    A client calls its methods through the route `/collective_rpc`.
    """

    _weight_update_active: bool  # of vLLM's worker
    _push = ""  # the last one, by the name that its trainer gave it; none of the weights that the server started with

    def report_model_config(self) -> dict[str, object]:
        """What the served model's own config says, for a trainer to compare with its model's."""
        config: dict[str, object] = self.model_config.hf_text_config.to_dict()  # type: ignore[attr-defined]
        return {name: value for name, value in config.items() if isinstance(value, (bool, int, str))}

    def report_room(self) -> tuple[int, str]:
        """The largest rank of an adapter that can be loaded now, 0 for none, and the type of the device."""
        lora = self.vllm_config.lora_config  # type: ignore[attr-defined]
        updating = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
        return lora.max_lora_rank if lora is not None and updating else 0, self.device.type  # type: ignore[attr-defined]

    def take_push(self, push: str) -> None:
        """Keep the name of the push that is complete now."""
        self._push = push

    def report_push(self) -> str:
        """The name of the push that the weights are of."""
        return self._push

    def take_adapter(self, files: dict[str, str]) -> str:
        """Write an adapter's files, in base64, where vLLM can load them, and return the path of their folder."""
        from trl_ext.generation.adapter_sync import AdapterFolder

        if not hasattr(self, "_adapter_folder"):
            self._adapter_folder = AdapterFolder()
        return self._adapter_folder.write({name: base64.b64decode(data) for name, data in files.items()})

    def end_abandoned_update(self) -> None:
        """End a push whose trainer was lost in the middle of it, or no other could begin."""
        if self._weight_update_active:
            with contextlib.suppress(ValueError):  # a tensor is incomplete, which the next push repairs
                self.finish_weight_update()  # type: ignore[attr-defined]
            self._weight_update_active = False


if "vllm" in sys.modules:  # a server's worker has imported it before this module; a trainer may not need it
    register()
