"""The process group of a training: its time limit on CPUs, who is in it, and its errors as one line each."""

from __future__ import annotations

import datetime
import os
import re
import socket
import sys
import weakref
from collections.abc import MutableMapping

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from trl_ext.compat.startup import on_cpu_ranks
from trl_ext.compat.torch_on_cpu import (
    set_default_group_timeout,
    skip_deepspeeds_operator_of_inference,
    tell_deepspeed_of_the_group,
)

_hosts: dict[str, str] = {}  # address -> name

# In the words of gloo, NCCL and torch's store.
_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|remote process exited|"
    r"NCCL error|Socket Timeout|wait timeout after|Connection was likely closed|failed to recv",
)
_UNREACHABLE = re.compile(r"connectFullMesh failed|Gloo connectFullMesh|SO_ERROR: Connection refused")
_NO_INTERFACE = re.compile(r"Unable to find address for: (\S+)|[Nn]o socket interface found")
_PEER = re.compile(r"peer \[([^\]]{1,200})\]")
_REMOTE = re.compile(r"remote=\[([^\]]{1,200})\]")


def join_on_cpu(seconds: float) -> None:
    """Make the process group of several CPU ranks, whose collectives give up after `seconds`; else do nothing.

    transformers passes its `ddp_timeout` on for GPUs only (`TrainingArguments._setup_devices`), and DeepSpeed makes
    groups of its own with torch's default.
    """
    by_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.accelerator.is_available()
    if by_deepspeed:
        skip_deepspeeds_operator_of_inference()
    if on_cpu_ranks() and not torch.distributed.is_initialized():
        set_default_group_timeout(datetime.timedelta(seconds=seconds))
        torch.distributed.init_process_group("gloo")
        if by_deepspeed:
            tell_deepspeed_of_the_group()
        leave_at_exit()


def leave() -> None:
    """Destroy this process's groups, if it is in any: gloo's threads can outlive the interpreter, and abort it.

    Then a rank that has ended well dies by SIGABRT, and the launchers of the other hosts wait for it in vain.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave_at_exit() -> None:
    """`leave` however the process ends, while Python has all of its threads yet, and after engines made from now on.

    A colocated vLLM engine destroys its own groups when the process exits, and fails if they are gone. It does so in
    a finalizer; these run in reverse order.
    """
    weakref.finalize(leave, leave)


def join(seconds: float) -> PartialState:
    """The state of this training's processes, joined to their group."""
    join_on_cpu(seconds)
    return PartialState(cpu=True) if on_cpu_ranks() else PartialState()


def learn_hosts() -> None:
    """Note the ranks' hosts by the addresses from which they reach the first one. A collective operation."""
    if PartialState().num_processes > 1:
        address = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        _hosts.update(gather_object([(address or "unknown address", socket.gethostname())]))


def host_at(address: str) -> str:
    """`name (address)` of a rank's host, or the address alone where no rank has it, or where all have the same."""
    name = _hosts.get(address)
    return f"{name} ({address})" if name and len(_hosts) > 1 else address


def other_hosts() -> list[str]:
    """Names of the hosts of the group without this one."""
    return sorted({name for name in _hosts.values() if name != socket.gethostname()})


def address_towards(host: str, port: int = 29500) -> str | None:
    """This machine's IPv4 address on the way to another host; None if there is no way. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def use_reachable_interface(first_host: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo use the interface on the way to the first host if this host's own name leads nowhere else.

    gloo gives the address of the host's own name to the other hosts. Debian's is 127.0.1.1, which they would try to
    reach until the group's time limit.

    Args:
        first_host: name or address at which the launchers meet.
        environment: of this process; a user's GLOO_SOCKET_IFNAME stays.
    """
    way = address_towards(first_host)
    if "GLOO_SOCKET_IFNAME" in environment or way is None or way.startswith("127."):
        return
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        own = "no address"
    cards = [card for card, known in psutil.net_if_addrs().items() if way in {entry.address for entry in known}]
    if cards and (own == "no address" or own.startswith("127.")):
        print(f"host {name} uses the interface {cards[0]}, since its own name leads to {own}", file=sys.stderr)
        environment["GLOO_SOCKET_IFNAME"] = cards[0]


def explain_network_error(error: BaseException) -> str | None:
    """A line for an error of a collective operation that another host caused; None for any other error.

    Only errors of torch's own are read: a user's function may fail in the same words.
    """
    if not isinstance(error, RuntimeError):  # DistBackendError, DistStoreError and gloo's are
        return None
    text = str(error)
    is_torchs = isinstance(error, torch.distributed.DistError) or "gloo" in text.lower() or "NCCL" in text
    if not is_torchs:
        return None
    if "EADDRINUSE" in text:
        return (
            "the port at which the processes meet is in use on this host; give accelerate launch a --main_process_port"
        )
    if missing := _NO_INTERFACE.search(text):
        which = f"interface {missing[1]!r}" if missing[1] else "such interface"
        return (
            f"host {socket.gethostname()} has no {which}: correct GLOO_SOCKET_IFNAME (CPUs) or "
            "NCCL_SOCKET_IFNAME (GPUs) there (`ip -brief address` lists the interfaces)"
        )
    if _UNREACHABLE.search(text):
        remote = _REMOTE.search(text)
        at = f" at {remote[1]}" if remote else ""
        return (
            f"the hosts do not reach each other{at}: set GLOO_SOCKET_IFNAME (CPUs) and NCCL_SOCKET_IFNAME (GPUs) on "
            "every host to the interface of the network between them (`ip -brief address` lists them), or correct the "
            "host's own name in /etc/hosts, which must not be a 127.* address"
        )
    if not _LOST.search(text):
        return None
    peer = _PEER.search(text)
    where = host_at(peer[1]) if peer else " or ".join(other_hosts()) or "another rank"
    how = "did not answer within ddp_timeout" if re.search("[Tt]imed? ?out", text) else "closed the connection"
    return f"lost {where}: it {how}; its own output says why"
