"""What is refused or said at a launch: one that came out smaller than it was asked for, and locks left behind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from accelerate.utils import get_int_from_env

from trl_ext.errors import InputError
from trl_ext.hosts.process_group import use_reachable_interface

# What torchrun, MPI's launchers and Accelerate call the number of processes.
_WORLD = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def check_launch() -> None:
    """Compare the processes of this training with those that the launcher was asked for, and with Slurm's step.

    On several machines it sees to it as well that they reach this one.

    Raises:
        InputError: there are fewer.
    """
    world = int(get_int_from_env(_WORLD, 1))
    command = _launcher()
    machines, processes, first_host = asked_for(command) if command else Asked(1, 1, None)
    if world < max(machines, processes or 1):
        raise InputError(
            f"the launch asked for {processes or machines} processes on {machines} machines, and this training has "
            f"{world}: each part would train alone. Under DeepSpeed set deepspeed_multinode_launcher: standard in "
            "deepspeed_config of the --config_file, as accelerate_configs/nodes_zero2.yaml does; on CPUs "
            "distributed_type: MULTI_GPU"
        )
    refuse_part_of_a_slurm_step(os.environ)
    refuse_restarts_on_a_shared_store(os.environ)
    if machines > 1 and first_host is not None:
        use_reachable_interface(first_host, os.environ)


def refuse_restarts_on_a_shared_store(environment: Mapping[str, str]) -> None:
    """Refuse automatic restarts whose ranks would meet in the store of those before them.

    torch 2.13 makes its rendezvous' store the process group's too, so a restarted rank may read the address of a dead
    one (`torch.distributed.rendezvous._create_c10d_store` expects a new store for every attempt).

    Raises:
        InputError: the launcher restarts ranks and shares its store.
    """
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise InputError(
            f"--max_restarts {restarts}: restarted ranks may read the addresses of the dead ones. Export "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where accelerate launch is run, and take --rdzv_backend c10d"
        )


def refuse_part_of_a_slurm_step(environment: Mapping[str, str]) -> None:
    """Refuse to train on one node of a Slurm step of several, as every one of them would.

    Raises:
        InputError: the step has more nodes than torchrun's group of launchers, and no other launcher joined them.
    """
    nodes, launchers = (int(environment.get(name, 1)) for name in ("SLURM_STEP_NUM_NODES", "GROUP_WORLD_SIZE"))
    joined = any(name in environment for name in _WORLD[1:])
    if nodes > launchers and not joined:
        raise InputError(
            f"srun started this step on {nodes} nodes, and this launch has {launchers}: each would train alone. Give "
            "accelerate launch --num_machines $SLURM_NNODES --machine_rank $SLURM_NODEID and --main_process_ip, as "
            "scripts/slurm.sbatch does"
        )


class Asked(NamedTuple):
    """What a launch was asked for.

    Attributes:
        machines: of the launch.
        processes: on all machines together; None for one per GPU.
        first_host: name or address at which the launchers meet; None on one machine.
    """

    machines: int
    processes: int | None
    first_host: str | None


def asked_for(command: Sequence[str]) -> Asked:
    """What the arguments of `accelerate launch` and its configuration file ask for."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    given, _ = launch_command_parser().parse_known_args(list(command))
    path = Path(given.config_file or default_config_file)
    config = load_config_from_file(str(path)) if path.is_file() else None

    def asked(name: str) -> Any:
        return getattr(given, name) or getattr(config, name, None)

    processes = asked("num_processes")
    return Asked(int(asked("num_machines") or 1), int(processes) if processes else None, asked("main_process_ip"))


def _launcher() -> list[str] | None:
    """The arguments of the `accelerate launch` that this process descends from, if there is one."""
    for process in psutil.Process().parents():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        names = [Path(word).name for word in words[:4]]
        for i, name in enumerate(names):
            if name == "accelerate-launch" or words[i] in ("accelerate.commands.launch",):
                return words[i + 1 :]
            if name in ("accelerate", "accelerate.commands.accelerate_cli") and words[i + 1 : i + 2] == ["launch"]:
                return words[i + 2 :]
    return None


def abandoned_locks(environment: Mapping[str, str]) -> list[Path]:
    """The locks in torch's cache of extensions that no process of this user on this machine holds open."""
    from torch.utils.cpp_extension import get_default_build_root

    given = environment.get("TORCH_EXTENSIONS_DIR")
    root, pattern = (Path(given), "*/lock") if given else (Path(get_default_build_root()), "*/*/lock")
    locks = {path.resolve() for path in root.glob(pattern)}
    return sorted(locks - _open_files()) if locks else []


def _open_files() -> set[Path]:
    paths = set()
    for process in psutil.process_iter():
        try:
            paths |= {Path(file.path) for file in process.open_files()}
        except (psutil.Error, OSError):  # another user's, or it has ended
            continue
    return paths


def warning_of_locks(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to say before a run under DeepSpeed, which would wait for such a lock until its time limit."""
    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true" or not (locks := abandoned_locks(environment)):
        return None
    return (
        f"warning: a compilation for DeepSpeed was killed; torch waits until {', '.join(map(str, locks))} is gone: "
        "remove it, unless another host that shares this folder compiles there now"
    )
