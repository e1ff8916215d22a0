"""What a rank says when another host is lost or cannot be reached: one line instead of the network's traceback."""

from __future__ import annotations

import re
import socket

import torch

from trl_ext.hosts.group import host_at, other_hosts

# In the words of gloo, NCCL and torch's store.
_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting|remote process exited|"
    r"NCCL error|Socket Timeout|wait timeout after|Connection was likely closed|failed to recv",
)
_UNREACHABLE = re.compile(r"connectFullMesh failed|Gloo connectFullMesh|SO_ERROR: Connection refused")
_NO_INTERFACE = re.compile(r"Unable to find address for: (\S+)|[Nn]o socket interface found")
_PEER = re.compile(r"peer \[([^\]]{1,200})\]")
_REMOTE = re.compile(r"remote=\[([^\]]{1,200})\]")


def explain(error: BaseException) -> str | None:
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
