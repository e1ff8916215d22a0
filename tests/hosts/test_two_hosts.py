"""Recipes on two hosts: two launchers on the loopback, each in a folder of its own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.hosts.conftest import faults
from tests.recipes.test_grpo import rows
from tests.recipes.test_launch import launched
from tests.support.hosts import error_lines, two_hosts

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(280)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [row["step"] for row in rows(path) if "loss" in row] if path.exists() else []


@pytest.fixture(scope="module")
def trained(settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder in which two hosts have trained without a fault, once per configuration for all tests."""

    @functools.cache
    def of(config: str) -> Path:
        folder = tmp_path_factory.mktemp(config)
        with two_hosts(folder, config, "--config", settings, "--output_dir", folder / "shared") as hosts:
            assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:] + hosts.printed(1)[-3000:]
        return folder

    return of


@pytest.mark.parametrize(
    "config",
    [
        "two_cpu_ranks_ddp",
        *(pytest.param(f"two_cpu_ranks_{name}", marks=pytest.mark.nightly) for name in ("zero2", "zero3")),
    ],
)
def test_two_hosts_train_as_one(config: str, trained: Callable[[str], Path], settings: Path, tmp_path: Path) -> None:
    folder = trained(config)
    assert json.loads((folder / "shared" / "summary.json").read_text())["hardware"]["processes"] == 2
    assert not list(folder.glob("*/runs")), "the second host trained for itself"
    assert not list(folder.rglob(".deepspeed_env")), "the environment, with its tokens, was written to a file"
    with launched(tmp_path, config, "--config", str(settings)) as one:
        assert one.wait() == 0, one.printed()[-3000:]
    start = load_file(Path(yaml.safe_load(settings.read_text())["model_name_or_path"]) / "model.safetensors")
    apart, together = weights(tmp_path / "run"), weights(folder / "shared")
    assert max((apart[k] - start[k]).abs().max() for k in start) > 1e-3, "nothing was learned"
    # Two ranks of one host add the same numbers through shared memory, in another order: a few units of float32.
    assert max((apart[k] - together[k]).abs().max() for k in start) < 1e-6


LOST = {"SIGKILL": "closed the connection", "SIGSTOP": "did not answer within ddp_timeout"}  # as a dead link does


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "signals"), [("two_cpu_ranks_ddp", ["SIGKILL"]), ("two_cpu_ranks_zero2", ["SIGKILL", "SIGSTOP"])]
)
def test_killed_and_silent_ranks_restart_and_end_the_same(
    config: str, signals: list[str], trained: Callable[[str], Path], settings: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    arguments = ["--config", settings, "--output_dir", shared, "--resume", "auto", "--ddp_timeout", 20]
    elastic = ["--rdzv_backend", "c10d", "--max_restarts", "2", "--monitor_interval", "1", "--rdzv_conf", "timeout=120"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **faults(tmp_path / "faults", *signals)}
    with two_hosts(tmp_path, config, *arguments, launch=elastic, **environment) as hosts:
        assert hosts.wait(240) == [0, 0], hosts.printed(0)[-3000:] + hosts.printed(1)[-3000:]
        said = hosts.printed(0) + hosts.printed(1)
    for signal, step in zip(signals, (2, 4), strict=False):
        line = next((line for line in error_lines(said) if LOST[signal] in line), said[-3000:])
        assert re.match(rf"error: lost .*; the run is in {shared} up to checkpoint-{step}; .* --resume auto$", line)
        assert f"resumed from {shared}/checkpoint-{step}" in said
    assert steps_of(shared) == list(range(1, 9))
    before, after = weights(trained(config) / "shared"), weights(shared)
    assert all(torch.equal(before[k], after[k]) for k in before)
