"""Two hosts in network namespaces: a link that is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts.test_two_hosts import steps_of
from tests.support.hosts import Network, error_lines, two_hosts
from tests.support.launch import wait_for
from trl_ext.runs.checkpoints import checkpoints, find_corruption


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip and network namespaces"),
]


DEBIAN_ADDRESS = "127.0.1.1"  # of a host's own name


@pytest.mark.nightly
def test_link_down_for_30_s_is_survived_and_for_good_is_a_line(settings: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    arguments = ["--config", settings, "--output_dir", shared, "--max_steps", 100_000, "--ddp_timeout", 60]
    with (
        Network(tmp_path, DEBIAN_ADDRESS) as network,
        two_hosts(tmp_path, "two_cpu_ranks_ddp", *arguments, network=network) as hosts,
    ):
        wait_for(lambda: len(steps_of(shared)) > 4)
        network.cut()
        time.sleep(2)
        before = steps_of(shared)
        time.sleep(28)
        assert steps_of(shared) == before, "the link is not between the ranks"
        network.heal()
        wait_for(lambda: len(steps_of(shared)) > len(before) + 4, 60)
        network.cut()
        wait_for(lambda: all(error_lines(hosts.printed(host)) for host in range(2)), 120)
        assert hosts.processes[0].wait(30) != 0
        network.heal()  # the second launcher asks the first one's store for the end
        assert hosts.processes[1].wait(30) != 0
        assert "host hostB uses the interface link0, since its own name leads to 127.0.1.1" in hosts.printed(1)
        lines = [error_lines(hosts.printed(host))[-1] for host in range(2)]
    last = checkpoints(shared)[0]
    assert find_corruption(last) is None
    for line, other in zip(lines, ("hostB", "hostA"), strict=True):
        assert f"lost {other}: it did not answer within ddp_timeout" in line, lines
        assert f"up to {last.name}" in line
