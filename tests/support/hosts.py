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
from tests.recipes.test_launch import wait_for


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


RUN = ["--output_dir", "runs/run"]  # in the launcher's own folder: another one on each host


class Hosts:
    """A recipe that two launchers run together, by a mark in the environment of all their processes."""

    def __init__(
        self,
        folders: list[Path],
        config: str | Path,
        recipe: str,
        arguments: list[str],
        launch: list[str],
        environment: Mapping[str, str],
    ) -> None:
        self.folders, self.mark, self.processes = folders, uuid.uuid4().hex, []
        if not Path(config).is_absolute():
            config = ROOT / "accelerate_configs" / f"{config}.yaml"
        port = str(free_port())
        program = ["--module", recipe] if "." in recipe.removesuffix(".py") else [str(ROOT / "recipes" / recipe)]
        for rank, folder in enumerate(folders):
            folder.mkdir(parents=True, exist_ok=True)
            machines = [
                "--num_machines",
                str(len(folders)),
                "--num_processes",
                str(len(folders)),
                "--machine_rank",
                str(rank),
            ]
            meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
            command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *machines]
            command += [*meeting, *launch, *program, *arguments]
            marked = {**environment_of_ranks(), **environment, "TRL_EXT_TEST_MARK": self.mark}
            with (folder / "said.txt").open("wb") as said:
                self.processes.append(
                    subprocess.Popen(
                        command, cwd=folder, env=marked, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            if (
                "c10d" in launch and rank == 0
            ):  # both have the address at which the first one listens; it has to be that
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

    def alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TRL_EXT_TEST_MARK") == self.mark and process.status() != "zombie":
                    found.append(process)
        return found


@contextlib.contextmanager
def two_hosts(
    folder: Path, config: str | Path, *arguments: Any, recipe: str = "grpo_math.py", launch: list[str] | None = None,
    **environment: str,
) -> Iterator[Hosts]:  # fmt: skip
    """Two launchers that run a recipe together; what is left of them at the end of the block is killed."""
    folders = [folder / "host_a", folder / "host_b"]
    hosts = Hosts(folders, config, recipe, [str(a) for a in arguments], launch or [], environment)
    try:
        yield hosts
    finally:
        for process in hosts.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in hosts.processes:
            launcher.wait(10)


def last_line(text: str) -> str:
    """What ends a run in one line: the last that begins with `error:`."""
    return next((line for line in reversed(text.splitlines()) if line.startswith("error:")), "")
