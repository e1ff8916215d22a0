"""The group of a training's processes: its time limit on CPUs, and who is in it."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import weakref
from collections.abc import MutableMapping

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from trl_ext.compat.startup import on_cpu_ranks
from trl_ext.compat.torch_on_cpu import set_default_group_timeout

_hosts: dict[str, str] = {}  # address -> name


def join_on_cpu(seconds: float) -> None:
    """Make the process group of several CPU ranks, whose collectives give up after `seconds`; else do nothing.

    transformers passes its `ddp_timeout` on for GPUs only (`TrainingArguments._setup_devices`), and DeepSpeed makes
    groups of its own with torch's default.
    """
    if on_cpu_ranks() and not torch.distributed.is_initialized():
        set_default_group_timeout(datetime.timedelta(seconds=seconds))
        torch.distributed.init_process_group("gloo")
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
