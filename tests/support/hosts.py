"""Two hosts on one machine: a launcher each, in a folder of its own, joined over the loopback."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.grpo.test_distributed import environment_of_ranks, free_port
from tests.recipes.test_grpo import ROOT
from tests.support.launch import Marked, ended, wait_for

RUN = ["--output_dir", "runs/run"]  # in the launcher's own folder: another one on each host


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Network:
    """Two network namespaces with a host name each, joined by a link. Needs root and the command `ip`.

    Args:
        own: address of the second host's name in its own /etc/hosts.
    """

    LINK, ADDRESSES, NAMES = "link0", ("10.77.0.1", "10.77.0.2"), ("hostA", "hostB")

    def __init__(self, folder: Path, own: str = ADDRESSES[1]) -> None:
        self.spaces = [f"trl_ext_{uuid.uuid4().hex[:8]}" for _ in self.ADDRESSES]
        self.files = [folder / f"hosts_{name}" for name in self.NAMES]
        names = [f"{address} {name}" for address, name in zip(self.ADDRESSES, self.NAMES, strict=True)]
        folder.mkdir(parents=True, exist_ok=True)
        for file, second in zip(self.files, (names[1], f"{own} {self.NAMES[1]}"), strict=True):
            file.write_text("\n".join(["127.0.0.1 localhost", names[0], second, ""]))

    def __enter__(self) -> Network:
        first, second = self.spaces
        for space in self.spaces:
            ip("netns", "add", space)
        ip("link", "add", self.LINK, "netns", first, "type", "veth", "peer", "name", self.LINK, "netns", second)
        for space, address in zip(self.spaces, self.ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", self.LINK)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", self.LINK, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            ip("netns", "del", space)

    def cut(self) -> None:
        ip("-n", self.spaces[1], "link", "set", self.LINK, "down")

    def heal(self) -> None:
        ip("-n", self.spaces[1], "link", "set", self.LINK, "up")

    def on(self, host: int) -> list[str]:
        """Words before a command that has it run on that host, in the same process."""
        enter = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
        unshared = ["unshare", "--mount", "--uts", "bash", "-c", enter, "_", self.NAMES[host], str(self.files[host])]
        return ["ip", "netns", "exec", self.spaces[host], *unshared]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts(Marked):
    """A recipe that two launchers run together."""

    def __init__(
        self,
        folders: list[Path],
        config: str | Path,
        recipe: str,
        arguments: list[str],
        launch: list[str],
        environment: Mapping[str, str],
        network: Network | None,
    ) -> None:
        super().__init__()
        self.folders, self.processes = folders, []
        if not Path(config).is_absolute():
            config = ROOT / "accelerate_configs" / f"{config}.yaml"
        port, number = str(free_port()), str(len(folders))
        program = ["--module", recipe] if "." in recipe.removesuffix(".py") else [str(ROOT / "recipes" / recipe)]
        meeting = ["--main_process_ip", network.ADDRESSES[0] if network else "127.0.0.1", "--main_process_port", port]
        machines = ["--num_machines", number, "--num_processes", number, *meeting, *launch]
        marked = {**environment_of_ranks(), **environment, **self.environment}
        for rank, folder in enumerate(folders):
            folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *machines]
            command += ["--machine_rank", str(rank), *program, *arguments]
            with (folder / "said.txt").open("wb") as said:
                self.processes.append(
                    subprocess.Popen(
                        [*(network.on(rank) if network else []), *command],
                        cwd=folder, env=marked, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
            if "c10d" in launch and rank == 0:  # both have the address at which the first one has to listen
                wait_for(lambda: is_listening(int(port)))

    def wait(self, seconds: float = 200) -> list[int]:
        """Their exit codes."""
        return [process.wait(seconds) for process in self.processes]

    def printed(self, host: int) -> str:
        return (self.folders[host] / "said.txt").read_text(errors="replace")

    def rank(self, host: int) -> psutil.Process:
        """The process that trains on a host."""
        launcher = psutil.Process(self.processes[host].pid)
        return next(p for p in launcher.children(recursive=True) if p.environ().get("RANK") == str(host))


@contextlib.contextmanager
def two_hosts(
    folder: Path, config: str | Path, *arguments: Any, recipe: str = "grpo_math.py", launch: list[str] | None = None,
    network: Network | None = None, **environment: str,
) -> Iterator[Hosts]:  # fmt: skip
    """Two launchers that run a recipe together; what is left of them at the end of the block is killed."""
    folders = [folder / "host_a", folder / "host_b"]
    hosts = Hosts(folders, config, recipe, [str(a) for a in arguments], launch or [], environment, network)
    with ended(hosts):
        yield hosts


def error_lines(text: str) -> list[str]:
    """What ranks end with in one line each: those that begin with `error:`."""
    return [line for line in text.splitlines() if line.startswith("error:")]
