"""A real training process, killed again and again and resumed, against an uninterrupted one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.grpo.test_distributed import environment_of_ranks
from tests.recipes.test_grpo import ROOT


def killed(case: str, kills: int, folder: Path) -> dict[str, Any]:
    """The script's figures of a case; it fails where anything differs."""
    found = folder / "found.json"
    command = [sys.executable, str(ROOT / "scripts" / "kill_and_resume.py"), "--cases", case, "--kills", str(kills)]
    done = subprocess.run(
        [*command, "--json", str(found)],
        cwd=folder, env=environment_of_ranks(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results: dict[str, Any] = json.loads(found.read_text())["results"][0]
    assert results["same"] == dict.fromkeys(("metrics", "generations", "validations", "weights"), True)
    assert sum(results["kills"].values()) == kills
    return results


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("case", "kills"),
    [
        ("off_policy", 4),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in (("on_policy", 3), ("off_policy", 8))),
    ],
)
def test_killed_at_many_moments_and_resumed_a_run_ends_the_same(case: str, kills: int, tmp_path: Path) -> None:
    assert killed(case, kills, tmp_path)["kills"]["training"] >= kills // 2


@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_killed_on_two_ranks_under_zero2_a_run_ends_the_same(tmp_path: Path) -> None:
    assert killed("zero2", 1, tmp_path)["kills"]["training"] == 1


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.timeout(500)
def test_killed_with_a_colocated_engine_a_run_ends_the_same(tmp_path: Path) -> None:
    assert killed("vllm", 1, tmp_path)["kills"]["training"] == 1
