"""What `python -m trl_ext.hosts` checks, on every rank at the same time: versions, folder, model, interfaces, links."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoConfig

from trl_ext.hosts.shared_folder import refuse_unshared

PACKAGES = ("trl_ext", "torch", "transformers", "trl", "accelerate", "deepspeed", "vllm", "peft")
_REPEATS = 3


@dataclass(frozen=True)
class Host:
    """One rank's answers.

    Attributes:
        name: of its host.
        versions: of the packages, by name; "none" where one is not installed.
        model: the model's configuration as text, or why it cannot be read; None if no model was asked for.
        interfaces: `name=address` of each IPv4 address but the loopback's.
        gpus: their names.
    """

    name: str
    versions: dict[str, str]
    model: str | None
    interfaces: tuple[str, ...]
    gpus: tuple[str, ...]


def check_hosts(folder: Path, model: str | None, megabytes: int) -> tuple[list[str], list[str]]:
    """Lines to print, and what is wrong; both empty on all ranks but the first. A collective operation.

    Args:
        model: a folder or a Hub id.
        megabytes: of the message that measures the links.

    Raises:
        InputError: some host does not see the folder.
    """
    state = PartialState()
    hosts = [Host(**answer) for answer in gather_object([asdict(this_host(model))])]
    refuse_unshared(folder, "output_dir")
    seconds = seconds_to_all_reduce(megabytes) if len(hosts) > 1 else 0.0
    if not state.is_main_process:
        return [], []
    lines = [f"{len(hosts)} ranks on {len({host.name for host in hosts})} hosts, backend {state.backend or 'none'}"]
    for rank, host in enumerate(hosts):
        interfaces = ", ".join(host.interfaces) or "no interface but the loopback"
        lines.append(f"rank {rank}: {host.name}; {', '.join(host.gpus) or 'CPU'}; {interfaces}")
    lines.append(f"every rank sees {folder.absolute()}")
    if seconds:
        # A ring moves 2 (n - 1) / n of the message over every link.
        rate = 2 * (len(hosts) - 1) / len(hosts) * megabytes * 8e-3 / seconds
        lines.append(f"an all-reduce of {megabytes} MB takes {seconds * 1e3:.0f} ms: {rate:.2f} Gbit/s per link")
    return lines, differences(hosts)


def differences(hosts: Sequence[Host]) -> list[str]:
    """What is not the same on every rank, with the host, next to the first rank."""
    first = hosts[0]
    lines = []
    for rank, host in enumerate(hosts):
        for package, there in host.versions.items():
            if there != first.versions[package]:
                lines.append(
                    f"{package} is {there} on {host.name} (rank {rank}) and {first.versions[package]} on {first.name}"
                )
        if host.model != first.model:
            lines.append(f"the model on {host.name} (rank {rank}) is not that on {first.name}: {host.model}")
    if first.model is not None and first.model.startswith("cannot be read"):
        lines.append(f"the model {first.model} on {first.name}")
    return lines


def this_host(model: str | None) -> Host:
    """This rank's answers."""
    return Host(
        socket.gethostname(),
        {package: _version(package) for package in PACKAGES},
        None if model is None else _model(model),
        tuple(_interfaces(psutil.net_if_addrs())),
        tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
    )


def seconds_to_all_reduce(megabytes: int) -> float:
    """Of a float32 message, the best of some tries."""
    message = torch.zeros(megabytes * 250_000, device=PartialState().device)
    took = []
    for _ in range(_REPEATS + 1):  # the first one connects
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(message)
        if message.is_cuda:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):  # vLLM's build for CPUs
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _model(model: str) -> str:
    try:
        return AutoConfig.from_pretrained(model).to_json_string(use_diff=True)
    except (OSError, ValueError) as error:
        return f"cannot be read ({str(error).splitlines()[0]})"


def _interfaces(addresses: Mapping[str, Sequence[Any]]) -> list[str]:
    return [
        f"{name}={entry.address}"
        for name, entries in addresses.items()
        for entry in entries
        if entry.family == socket.AF_INET and name != "lo"
    ]
