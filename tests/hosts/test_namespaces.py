"""Two hosts in network namespaces: a link that is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts.test_two_hosts import LONG, steps_of
from tests.support.hosts import Network, last_line, two_hosts
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


def test_link_down_for_30_s_is_survived_and_for_good_is_a_line(settings: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    arguments = ["--config", settings, "--output_dir", shared, *LONG, "--ddp_timeout", 60]
    with Network(tmp_path) as network, two_hosts(tmp_path, "two_cpu_ranks_ddp", *arguments, network=network) as hosts:
        wait_for(lambda: steps_of(shared) > 4)
        network.cut()
        time.sleep(2)
        before = steps_of(shared)
        time.sleep(28)
        assert steps_of(shared) == before, "the link is not between the ranks"
        network.heal()
        wait_for(lambda: steps_of(shared) > before + 4, 60)
        network.cut()
        assert hosts.processes[0].wait(120) != 0
        line = last_line(hosts.printed(0))
    assert "lost hostB" in line, hosts.printed(0)[-2000:]
    assert "did not answer within ddp_timeout" in line
    assert find_corruption(checkpoints(shared)[0]) is None
