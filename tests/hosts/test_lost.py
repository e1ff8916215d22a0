"""A host that is lost without a launcher that restarts ranks; in a file of its own, which another worker can take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts.conftest import faults
from tests.support.hosts import error_lines, two_hosts
from trl_ext.runs.checkpoints import checkpoints, find_corruption, step_of

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(280)]


@pytest.mark.nightly
def test_lost_host_ends_the_run_everywhere_in_a_line(settings: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    arguments = ["--config", settings, "--output_dir", shared]
    with two_hosts(tmp_path, "two_cpu_ranks_zero3", *arguments, **faults(tmp_path / "faults", "SIGKILL")) as hosts:
        assert all(hosts.wait())
        line = error_lines(hosts.printed(0))[-1]
    last = checkpoints(shared)[0]
    assert step_of(last) == 2
    assert find_corruption(last) is None
    assert re.match(rf"error: lost .*closed the connection; .*in {shared} up to checkpoint-2; .*--resume auto$", line)
