"""Recipes on two hosts: two launchers on the loopback, each in a folder of its own."""

from __future__ import annotations

import json
import re
import signal as signals
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.recipes.test_grpo import ROOT, rows
from tests.recipes.test_launch import launched, wait_for
from tests.support.hosts import RUN, last_line, two_hosts
from trl_ext.runs.checkpoints import checkpoints, find_corruption

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(280)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("config", ["two_cpu_ranks_ddp", "two_cpu_ranks_zero2", "two_cpu_ranks_zero3"])
def test_two_hosts_train_as_one(config: str, settings: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with two_hosts(tmp_path, config, "--config", settings, "--output_dir", shared) as hosts:
        assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:] + hosts.printed(1)[-3000:]
    assert json.loads((shared / "summary.json").read_text())["hardware"]["processes"] == 2
    assert not list(tmp_path.glob("*/runs")), "the second host trained for itself"
    assert not list(tmp_path.rglob(".deepspeed_env")), "the environment, with its tokens, was written to a file"
    with launched(tmp_path, config, "--config", str(settings)) as one:
        assert one.wait() == 0, one.printed()[-3000:]
    start = load_file(Path(yaml.safe_load(settings.read_text())["model_name_or_path"]) / "model.safetensors")
    apart, together = weights(tmp_path / "run"), weights(shared)
    assert max((apart[k] - start[k]).abs().max() for k in start) > 1e-3, "nothing was learned"
    # Two ranks of one host add the same numbers through shared memory, in another order: a few units of float32.
    assert max((apart[k] - together[k]).abs().max() for k in start) < 1e-6


def test_separate_folders_are_refused(settings: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    with two_hosts(tmp_path, "two_cpu_ranks_ddp", "--config", settings, *RUN) as hosts:
        assert all(hosts.wait(100))
    assert time.monotonic() - began < 60 + 20, "torchrun takes some seconds more"
    for host in range(2):
        line = last_line(hosts.printed(host))
        assert "(rank 1) does not see output_dir 'runs/run' of host" in line, hosts.printed(host)
        assert all(str(folder / "runs") in line for folder in hosts.folders)
    assert not list(tmp_path.rglob("summary.json"))
    assert not list(tmp_path.rglob(".trl_ext_*"))


def test_every_recipe_refuses_separate_folders_and_checkpoints(settings: Path, tmp_path: Path) -> None:
    recipes = ("sft_math.py", "expert_iteration.py", "evaluate.py", "best_of_n.py")
    apart = [word for recipe in recipes for word in (recipe, *RUN, "--")]
    for host in ("host_a", "host_b"):
        checkpoint = tmp_path / host / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(host)
    resumed = ["grpo_math.py", "--output_dir", tmp_path / "shared", "--resume", "checkpoint-2"]
    with two_hosts(
        tmp_path, "two_cpu_ranks_ddp", *apart, *resumed, recipe="tests.support.every_recipe", PYTHONPATH=str(ROOT)
    ) as hosts:
        assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:]
    for host in range(2):
        said = hosts.printed(host)
        for recipe in recipes:
            assert re.search(rf"^{recipe} .*\(rank 1\) does not see output_dir 'runs/run' of host", said, re.M), said
        assert re.search(r"^grpo_math.py .*the checkpoint 'checkpoint-2/\S+ is not the same on host", said, re.M), said


def test_preflight_says_what_two_hosts_have_in_common(settings: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(settings.read_text())["model_name_or_path"]
    arguments = ["--output_dir", tmp_path / "shared", "--model", model, "--megabytes", 4]
    with two_hosts(tmp_path, "two_cpu_ranks_ddp", *arguments, recipe="trl_ext.hosts") as hosts:
        assert hosts.wait() == [0, 0], hosts.printed(0) + hosts.printed(1)
    said = hosts.printed(0)
    assert "2 ranks on 1 hosts, backend gloo" in said
    assert f"every rank sees {tmp_path / 'shared'}" in said
    assert re.search(r"an all-reduce of 4 MB takes \d+ ms: [\d.]+ Gbit/s per link", said)
    with two_hosts(tmp_path / "apart", "two_cpu_ranks_ddp", *RUN, recipe="trl_ext.hosts") as hosts:
        assert all(hosts.wait())
    assert "does not see output_dir" in last_line(hosts.printed(0))


@pytest.mark.parametrize("zero", [True, False])
def test_launch_of_fewer_processes_is_refused(zero: bool, settings: Path, tmp_path: Path) -> None:
    """DeepSpeed's pdsh without a hostfile; and Accelerate's one process where it is told to use a CPU."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / "two_cpu_ranks_zero2.yaml").read_text())
    if zero:
        del config["deepspeed_config"]["deepspeed_multinode_launcher"]
    else:
        config = {"distributed_type": "NO", "use_cpu": True, "num_machines": 2, "num_processes": 2}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with two_hosts(tmp_path, path, "--config", settings, *RUN) as hosts:
        assert all(hosts.wait(100))
    for host in range(2):
        assert "the launch asked for 2 processes on 2 machines, and this training has 1" in hosts.printed(host)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return sum("loss" in row for row in rows(path)) if path.exists() else 0


LONG = ["--max_steps", 100_000, "--save_strategy", "steps", "--save_steps", 2, "--validate_every", 100_000]


@pytest.mark.parametrize(
    # A rank that died, and what a dead link is to the other host; DeepSpeed has groups of its own.
    ("signal", "config"),
    [("SIGKILL", "two_cpu_ranks_ddp"), ("SIGSTOP", "two_cpu_ranks_ddp"), ("SIGSTOP", "two_cpu_ranks_zero2")],
)
def test_lost_host_ends_the_run_in_a_line(signal: str, config: str, settings: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    arguments = ["--config", settings, "--output_dir", shared, *LONG, "--ddp_timeout", 15]
    with two_hosts(tmp_path, config, *arguments) as hosts:
        wait_for(lambda: steps_of(shared) > 4)
        hosts.rank(1).send_signal(getattr(signals, signal))
        assert hosts.processes[0].wait(60) != 0
        line = last_line(hosts.printed(0))
    how = "closed the connection" if signal == "SIGKILL" else "did not answer within ddp_timeout"
    assert line.startswith("error: lost "), hosts.printed(0)[-3000:]
    assert all(words in line for words in (how, f"the run is in {shared}", "--resume auto"))
    last = checkpoints(shared)[0]
    assert find_corruption(last) is None
    assert last.name in line


def test_killed_rank_restarts_by_itself_and_ends_the_same(settings: Path, tmp_path: Path) -> None:
    shared, once = tmp_path / "shared", tmp_path / "once"
    run = ["--config", settings, *LONG, "--max_steps", 30, "--resume", "auto"]
    elastic = ["--rdzv_backend", "c10d", "--max_restarts", "2", "--monitor_interval", "1", "--rdzv_conf", "timeout=120"]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with two_hosts(tmp_path / "one", "two_cpu_ranks_ddp", *run, "--output_dir", once) as hosts:
        assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:]
    with two_hosts(
        tmp_path / "two", "two_cpu_ranks_ddp", *run, "--output_dir", shared, launch=elastic, **own_store
    ) as hosts:
        wait_for(lambda: steps_of(shared) > 5)
        hosts.rank(1).kill()
        assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:]
        assert "resumed from" in hosts.printed(0) + hosts.printed(1)
    assert steps_of(shared) == 30
    before, after = weights(once), weights(shared)
    assert all(torch.equal(before[k], after[k]) for k in before)
