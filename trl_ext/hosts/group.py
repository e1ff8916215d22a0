"""The group of a training's processes: its time limit on CPUs, and who is in it."""

from __future__ import annotations

import datetime
import os
import socket
import weakref
from collections.abc import Mapping

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from trl_ext.compat.startup import on_cpu_ranks
from trl_ext.compat.torch_groups import set_default_group_timeout

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
        _hosts.update(gather_object([_address(os.environ)]))


def host_at(address: str) -> str:
    """`name (address)` of a rank's host, or the address alone where no rank has it, or where all have the same."""
    name = _hosts.get(address)
    return f"{name} ({address})" if name and len(_hosts) > 1 else address


def other_hosts() -> list[str]:
    """Names of the hosts of the group without this one."""
    return sorted({name for name in _hosts.values() if name != socket.gethostname()})


def _address(environment: Mapping[str, str]) -> tuple[str, str]:
    """This host's address on the way to the first rank, and its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((environment.get("MASTER_ADDR", "127.0.0.1"), int(environment.get("MASTER_PORT", 29500))))
            return probe.getsockname()[0], socket.gethostname()
        except OSError:
            return "unknown address", socket.gethostname()
