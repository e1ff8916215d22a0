"""What is refused or explained on several hosts, without any: launches, addresses, errors of the network."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils.file_baton import FileBaton

from tests.grpo.test_distributed import environment_of_ranks, free_port
from tests.recipes.test_grpo import ROOT
from trl_ext.errors import InputError
from trl_ext.hosts import launch, process_group
from trl_ext.hosts.launch import (
    asked_for,
    refuse_part_of_a_slurm_step,
    refuse_restarts_on_a_shared_store,
    warning_of_locks,
)
from trl_ext.hosts.preflight import Host, differences
from trl_ext.hosts.process_group import explain_network_error

ZERO = sorted((ROOT / "accelerate_configs").glob("*zero*.yaml"))


@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.stem)
def test_deepspeed_starts_on_every_host_by_torchrun(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("--num_machines 3 --num_processes 24 train.py --num_machines 9", (3, 24, None)),
        ("--config_file two.yaml train.py", (1, 2, None)),
        ("--config_file two.yaml --num_machines 2 --num_processes=4 train.py", (2, 4, None)),
        ("--config_file nodes.yaml --num_processes 4 train.py", (2, 4, "FIRST_HOST")),
        ("--config_file nodes.yaml --main_process_ip n07 train.py", (2, 16, "n07")),
    ],
)
def test_asked_for_are_flags_before_the_configuration(
    command: str, asked: tuple[int, int, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in (("two", "two_cpu_ranks_ddp"), ("nodes", "nodes_ddp")):
        (tmp_path / f"{name}.yaml").write_text((ROOT / "accelerate_configs" / f"{config}.yaml").read_text())
    assert asked_for(command.split()) == asked


@pytest.mark.parametrize(
    ("environment", "is_refused"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_NODES": "1"}, False),
        ({"SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, True),
        ({"SLURM_STEP_NUM_NODES": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "16"}, False),
        ({"SLURM_STEP_NUM_NODES": "2", "OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_part_of_a_slurm_step_is_refused(environment: dict[str, str], is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(InputError, match="srun started this step on 2 nodes, and this launch has 1"):
            refuse_part_of_a_slurm_step(environment)
    else:
        refuse_part_of_a_slurm_step(environment)


def test_restarts_are_refused_where_dead_ranks_addresses_stay() -> None:
    elastic = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(InputError, match=r"--max_restarts 2: .* Export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        refuse_restarts_on_a_shared_store(elastic)
    for fine in (
        {},
        {**elastic, "TORCHELASTIC_MAX_RESTARTS": "0"},
        {**elastic, "TORCHELASTIC_USE_AGENT_STORE": "False"},
    ):
        refuse_restarts_on_a_shared_store(fine)


@pytest.mark.parametrize(
    ("own", "first_host", "given", "used"),
    [
        ("127.0.1.1", "10.77.0.1", None, "eth7"),
        (None, "10.77.0.1", None, "eth7"),
        ("10.77.0.2", "10.77.0.1", None, None),
        ("127.0.1.1", "10.77.0.1", "ib0", "ib0"),
        ("127.0.1.1", "127.0.0.1", None, None),  # all on this machine
        ("127.0.1.1", "nowhere.invalid", None, None),  # which torch will say
    ],
)
def test_interface_replaces_a_name_that_leads_to_the_loopback(
    own: str | None, first_host: str, given: str | None, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(name: str) -> str:
        if own is None:
            raise socket.gaierror
        return own

    way = {"10.77.0.1": "10.77.0.2", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(process_group, "address_towards", way.get)
    monkeypatch.setattr(process_group.socket, "gethostbyname", resolved)
    cards = {name: [SimpleNamespace(address=at)] for name, at in (("lo", "127.0.0.1"), ("eth7", "10.77.0.2"))}
    monkeypatch.setattr(process_group.psutil, "net_if_addrs", lambda: cards)
    environment = {} if given is None else {"GLOO_SOCKET_IFNAME": given}
    process_group.use_reachable_interface(first_host, environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == used


@pytest.mark.parametrize(("machines", "seen"), [("2", ["10.77.0.1"]), ("1", [])])
def test_interface_is_looked_for_on_several_machines(
    machines: str, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"--num_machines {machines} --num_processes 2 --main_process_ip 10.77.0.1 train.py"
    found: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(launch, "_launcher", command.split)
    monkeypatch.setattr(launch, "use_reachable_interface", lambda first_host, _: found.append(first_host))
    launch.check_launch()
    assert found == seen


def test_lock_of_a_killed_compilation_is_named(tmp_path: Path) -> None:
    left, held = (tmp_path / name / "lock" for name in ("killed", "at_work"))
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert warning_of_locks(environment) is None
    for lock in (left, held):
        lock.parent.mkdir()
    baton, other = FileBaton(str(left)), FileBaton(str(held))
    assert baton.try_acquire()
    assert other.try_acquire()
    assert warning_of_locks(environment) is None
    os.close(baton.fd)  # as the kernel does for a killed process
    assert (warning := warning_of_locks(environment)) is not None
    assert f"torch waits until {left} is gone: remove it" in warning
    assert warning_of_locks({**environment, "ACCELERATE_USE_DEEPSPEED": "false"}) is None
    other.release()


def test_hosts_that_differ_are_named_with_both_versions() -> None:
    here = Host("hostA", {"torch": "2.13", "trl": "1.16"}, "{}", ("eth0=10.0.0.1",), ())
    assert differences([here, here]) == []
    there = dataclasses.replace(
        here, name="hostB", versions={"torch": "2.12", "trl": "1.16"}, model="cannot be read (x)"
    )
    assert differences([here, there]) == [
        "torch is 2.12 on hostB (rank 1) and 2.13 on hostA",
        "the model on hostB (rank 1) is not that on hostA: cannot be read (x)",
    ]
    assert differences([there, there]) == ["the model cannot be read (x) on hostB"]


# As torch 2.13 raised them on two hosts.
CLOSED = (
    "[enforce fail at pair.cc:566] gloo: Connection closed by peer [10.77.0.2]:51512. Check the remote worker's logs"
)
SILENT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for send operation to complete"
ALONE = "Gloo connectFullMesh failed with SO_ERROR: Connection refused, remote=[127.0.1.1]:4242"


MISSING = "[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: nope"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(CLOSED), ["lost hostB (10.77.0.2): it closed the connection"]),
        (RuntimeError(SILENT), ["lost hostB", "did not answer within ddp_timeout"]),
        (torch.distributed.DistStoreError("wait timeout after 1800000ms"), ["lost hostB", "did not answer"]),
        (RuntimeError(ALONE), ["at 127.0.1.1", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
        (RuntimeError(MISSING), ["no interface 'nope'", "GLOO_SOCKET_IFNAME"]),
        (
            torch.distributed.DistBackendError("NCCL error: Bootstrap : no socket interface found"),
            ["NCCL_SOCKET_IFNAME"],
        ),
        (torch.distributed.DistNetworkError("port: 1, code: -98, name: EADDRINUSE"), ["--main_process_port"]),
        (RuntimeError("my reward: Connection closed by peer"), []),
        (ConnectionError(CLOSED), []),
        (RuntimeError("gloo: shapes differ"), []),
    ],
)
def test_lost_host_is_a_line_and_other_errors_are_none(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_hosts", {"10.77.0.1": os.uname().nodename, "10.77.0.2": "hostB"})
    said = explain_network_error(error)
    assert (said is None) is not bool(words)
    assert all(word in (said or "") for word in words), said


def test_torch_says_of_a_missing_interface_what_is_read() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.distributed.ProcessGroupGloo.create_device(interface="nope")
    assert "has no interface 'nope'" in (explain_network_error(error.value) or "")


ENDED = """
import weakref, torch
weakref.finalize(torch, lambda: print("in a group:", torch.distributed.is_initialized()))
from trl_ext.hosts.process_group import join_on_cpu
join_on_cpu(60)
print("joined:", torch.distributed.get_world_size())
raise SystemExit("refused")
"""


@pytest.mark.distributed
def test_process_leaves_its_group_however_it_ends() -> None:
    """Else gloo's threads abort it now and then, and the other host's launcher waits for five minutes."""
    here = environment_of_ranks() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDED], env=here | {"RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=100)
        assert (out.split("\n")[:2], rank.returncode) == (["joined: 2", "in a group: False"], 1), err
