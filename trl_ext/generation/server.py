"""vLLM servers as a trainer sees them; `weight_transfer` is the server's side of how they get the policy's weights."""

from __future__ import annotations

from trl_ext.compat.lazy_vllm import load_vllm

# isort: split
import base64
import contextlib
import functools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor
from trl.generation import vllm_generation
from urllib3.util.retry import Retry

from trl_ext.errors import InputError, ServerError
from trl_ext.generation.determinism import lacks_of_server
from trl_ext.generation.in_flight import finish, in_background, result_of
from trl_ext.generation.tensor_stream import body_of, parts
from trl_ext.generation.weight_transfer import BACKEND

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase
    from trl.generation.vllm_client import VLLMClient

MOST_REQUESTS = 256  # of a rank at the same time
PATIENCE = (10.0, 3600.0)  # seconds to connect, and to answer one request

# Of a model's config: what its weights' shapes follow from.
_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip


def start_command(model: str, rank: int = 0) -> str:
    """The command that starts a server on a machine like this one, with room for an adapter of this rank."""
    on_cpu = "" if torch.cuda.is_available() else " --no-enable-chunked-prefill"  # as in `device_settings`
    adapters = f" --enable-lora --max-lora-rank {rank}" if rank else ""
    updating = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 " if rank else ""
    return (
        f"{updating}VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model {model} "
        "--worker-extension-cls trl_ext.generation.weight_transfer.Registered "
        f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}' """
        f"--generation-config vllm --logprobs-mode processed_logprobs --max-logprobs -1{on_cpu}{adapters}"
    )


def urls_of(base_url: str | None, host: str, port: int) -> list[str]:
    """The addresses that TRL's settings name; `vllm_server_base_url` may list several, separated by commas."""
    listed = [url.strip().rstrip("/") for url in (base_url or f"http://{host}:{port}").split(",")]
    return [url for url in listed if url]


def text_of_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text of tokens from the whole vocabulary, which another one cuts into other tokens."""
    pieces = range(0, len(tokenizer), max(len(tokenizer) // 64, 1))
    return str(tokenizer.decode(pieces, skip_special_tokens=True))


def make_patient(session: requests.Session) -> None:
    """Try again for a few seconds where a server cannot be reached, and wait for an answer, but not without end."""
    retry = Retry(total=3, backoff_factor=0.5, status_forcelist=[502, 503], allowed_methods=None)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=MOST_REQUESTS))
    session.request = functools.partial(session.request, timeout=PATIENCE)  # type: ignore[method-assign]


class Server:
    """One vLLM server, by TRL's client; an `InputError` if nothing answers there within `seconds`.

    Its methods raise a `ServerError` where it does not answer any more, or with an error.
    """

    def __init__(self, url: str, seconds: float = 0.0, group_port: int = 51216) -> None:
        load_vllm()
        self.address = urlsplit(url).netloc.rpartition("@")[2]  # without a password
        self.adapter: str | None = None  # that was loaded last
        try:
            self.client: VLLMClient = vllm_generation.VLLMClient(
                base_url=url, group_port=group_port, connection_timeout=seconds
            )
        except OSError as error:  # requests' ConnectionError is not Python's
            raise InputError(
                f"no vLLM server answers at {self.address} (waited {seconds:g} s, --vllm_server_timeout). "
                "Start one there, or set --vllm_server_host, --vllm_server_port or --vllm_server_base_url; "
                "--vllm_mode colocate needs none"
            ) from error
        make_patient(self.client.session)  # TRL's tries for a minute to reach a server that is gone

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        """Turn what goes wrong with a request into a `ServerError`."""
        try:
            yield
        except requests.RequestException as error:
            reason = type(error).__name__
            raise ServerError(f"the vLLM server at {self.address} does not answer any more ({reason})") from error
        except Exception as error:
            if not str(error).startswith("Request failed"):  # TRL's client, which has no exception of its own
                raise
            raise ServerError(f"the vLLM server at {self.address}: {str(error)[:300]}") from error

    def post(self, route: str, body: Mapping[str, Any] | bytes) -> Any:
        """Send JSON, or what it is made of, over a new connection; not again, since it changes what the server has."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        url, headers = f"{self.client.base_url}/{route}", {"Content-Type": "application/json"}
        with self._one_line():
            response = requests.post(url, data, headers=headers, timeout=PATIENCE)
        if response.status_code != 200:
            raise ServerError(
                f"the vLLM server at {self.address} answers {response.status_code} to /{route}, and its own output "
                f"says why: {response.text[:300]}"
            )
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.json() if is_json and response.content else None

    def backend(self, device: str) -> str:
        """How it takes weights: `http`, or one of vLLM's own, such as `nccl`.

        An `InputError` if it takes none, or none from this type of device, has the command that starts one that does.
        """
        command = f": {start_command(self.client.model)}"
        try:
            info = self.client.get_server_info()
        except RuntimeError as error:  # a 404
            reason = "was started without VLLM_SERVER_DEV_MODE=1, so it takes no weights"
            raise self.refusal(reason, command) from error
        transfer, model = info["weight_transfer_config"], info.get("model_config") or {}
        is_own = model.get("generation_config", "vllm") in ("auto", "vllm")
        if not is_own or model.get("override_generation_config"):
            reason = "has a --generation-config or --override-generation-config of its own, which can cut responses off"
            raise self.refusal(reason, command)
        if transfer is None:
            raise self.refusal("was started without --weight-transfer-config, so it takes no weights", command)
        backend: str = transfer["backend"]
        if backend != BACKEND and device != "cuda":
            reason = f"takes weights by {backend}, which needs GPUs on both sides, and this is a {device}"
            raise self.refusal(reason, command)
        return backend

    def refusal(self, reason: str, start: str) -> InputError:
        """An error with what is wrong with it, and how to start it instead."""
        return InputError(f"the vLLM server at {self.address} {reason}; start it with{start}")

    def refuse_dependence_on_batch(self) -> None:
        """Refuse one whose responses depend on what else it is asked for at the time, by an `InputError`."""
        with self._one_line():
            info = self.client._get(f"{self.client.base_url}/server_info?config_format=json")
        if lacks := lacks_of_server(info):
            raise self.refusal(*lacks)

    def context(self) -> int:
        """Tokens of a prompt and its completion together."""
        with self._one_line():
            models = self.client._get(f"{self.client.base_url}/v1/models")["data"]
        return int(models[0]["max_model_len"])

    def complete(self, prompt: list[int], seed: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
        """One completion of one prompt; `settings` and the result are those of `VLLMClient.generate`."""
        extra = dict(settings.get("generation_kwargs") or {})
        if seed is not None:
            extra["seed"] = seed
        with self._one_line():
            completion: dict[str, Any] = self.client.generate([prompt], **{**settings, "generation_kwargs": extra})
        return completion

    def room_for_adapters(self) -> tuple[int, str]:
        """The largest rank that it was started for, 0 without adapters, and the type of its device."""
        rank, device = self.post("collective_rpc", {"method": "report_room"})["results"][0]
        return int(rank), str(device)

    def take_adapter(self, name: str, files: Mapping[str, str]) -> None:
        """Load an adapter, files in base64, in the place of the one before it."""
        path = self.post("collective_rpc", {"method": "take_adapter", "args": [files]})["results"][0]
        self.post("v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": True})
        if self.adapter not in (None, name):
            self.post("v1/unload_lora_adapter", {"lora_name": self.adapter})
        self.adapter = name

    def begin_update(self) -> None:
        """Tell it that weights will come."""
        self.post("collective_rpc", {"method": "end_abandoned_update"})
        self.post("start_weight_update", {})

    def end_update(self, push: str) -> None:
        """Tell it that all have come, in which push; what it has cached was computed with the earlier ones."""
        self.post("finish_weight_update", {})
        self.post("reset_prefix_cache", {})
        self.post("collective_rpc", {"method": "take_push", "args": [push]})

    def check_push(self, push: str) -> None:
        """Refuse answers of other weights than those of this push."""
        if set(self.post("collective_rpc", {"method": "report_push"})["results"]) != {push}:
            raise ServerError(
                f"the vLLM server at {self.address} has other weights than it was given: it was started again, or "
                "another run gives it weights, too"
            )


class Servers:
    """The servers of a run: each gets all weights and a share of every rank's prompts.

    Args:
        seconds: to wait for each; an `InputError` if one does not answer, or takes no weights from here.
        device: type of the trainer's device.
        group_port: of TRL's NCCL group.
    """

    def __init__(self, urls: Sequence[str], seconds: float, device: str, group_port: int = 51216) -> None:
        self.each = [Server(url, seconds, group_port) for url in urls]
        backends = {server.backend(device) for server in self.each}
        if len(backends) > 1 or (len(urls) > 1 and backends != {BACKEND}):
            raise InputError(
                f"several vLLM servers have to be started with the backend {BACKEND}, and these have "
                f"{', '.join(sorted(backends))}; start each with: {start_command(self.each[0].client.model)}"
            )
        self.backend = backends.pop()
        self._push: str | None = None  # the last one, by this process

    def refuse_another_model(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """Refuse another vocabulary than the trainer's, and for the backend `http` another shape of the model."""
        ours = config.get_text_config().to_dict()
        text = text_of_vocabulary(tokenizer)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for server in self.each:
            asked = {"method": "report_model_config"}
            for theirs in server.post("collective_rpc", asked)["results"] if self.backend == BACKEND else ():
                for field in _SHAPE:
                    if field in theirs and field in ours and theirs[field] != ours[field]:
                        differs = f"{field} is {theirs[field]} there and {ours[field]} here"
                        reason = f"serves another model, {server.client.model!r}: {differs}"
                        raise server.refusal(reason, f" --model {name}")
            text_of = {"model": server.client.model, "prompt": text, "add_special_tokens": False}
            if server.post("tokenize", text_of)["tokens"] != tokens:
                reason = "has another vocabulary: it cuts the same text into other tokens"
                raise server.refusal(reason, f" --model {name} and this model's tokenizer")

    def refuse_dependence_on_batch(self) -> None:
        """Refuse a server whose responses depend on what else it is asked for at the time."""
        for server in self.each:
            server.refuse_dependence_on_batch()

    def room_for_adapters(self, rank: int) -> str | None:
        """The type of their devices, if all of them can be sent an adapter of this rank by itself, else None."""
        rooms = [server.room_for_adapters() for server in self.each] if self.backend == BACKEND else [(0, "")]
        return rooms[0][1] if all(there >= rank for there, _ in rooms) else None

    def push_adapter(self, name: str, files: Mapping[str, bytes]) -> None:
        """Give every server the policy's adapter."""
        data = {file: base64.b64encode(content).decode() for file, content in files.items()}
        with ThreadPoolExecutor(len(self.each)) as pool:
            list(pool.map(lambda server: server.take_adapter(name, data), self.each))

    def ask_for(self, name: str) -> None:
        """Have this process's requests be answered with an adapter that the servers have."""
        for server in self.each:
            server.client.model = name

    def generate(
        self,
        prompts: list[list[int]],
        seeds: Sequence[int | None],
        settings: Mapping[str, Any],
        count: Callable[[int], object] = finish,
    ) -> list[Any]:
        """A completion per prompt, each with a seed of its own, which is why each is a request of its own.

        Args:
            settings: arguments of `VLLMClient.generate`.
            count: called with each completion's number of tokens.

        Returns:
            By prompt: token ids; logprobs (token, 1 or more) of the sampled token and of further ones if asked for, or
            None for all; the ids of the tokens that those are of, or None.
        """
        if not prompts:
            return [[], None, None]
        rows, each = len(prompts), self.each
        servers = [each[i * len(each) // rows] for i in range(rows)]  # a group stays together
        requested = zip(servers, prompts, seeds, strict=True)
        calls = [functools.partial(server.complete, prompt, seed, settings) for server, prompt, seed in requested]
        asked = in_background(calls, MOST_REQUESTS)
        answers = []
        try:
            for future in asked:
                answers.append(result_of(future))
                count(len(answers[-1]["completion_ids"][0]))
        finally:
            for future in asked:  # after an error or a request to stop, those that have not been sent
                future.cancel()
        if self._push is not None:
            for server in self.each:
                server.check_push(self._push)
        keys = ("completion_ids", "logprobs", "logprob_token_ids")
        return [None if answers[0][key] is None else [row[key][0] for row in answers] for key in keys]

    def push(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Give every server the weights, by their names in a checkpoint and the backend `http`."""
        push, self._push = uuid.uuid4().hex, None
        with ThreadPoolExecutor(len(self.each)) as pool:

            def on_all(call: Callable[[Server], object]) -> Iterator[object]:
                return pool.map(call, self.each)

            underway = on_all(Server.begin_update)
            for part in parts(weights):
                body = body_of(part)  # while the part before it is on its way
                list(underway)
                underway = on_all(functools.partial(Server.post, route="update_weights", body=body))
            list(underway)
            list(on_all(functools.partial(Server.end_update, push=push)))
        self._push = push
