"""What is refused on several hosts before a model loads, by real launches: folders, checkpoints, lost processes, names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.recipes.test_grpo import ROOT
from tests.support.hosts import RUN, Hosts, two_hosts
from tests.support.launch import ended

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(280)]


@pytest.mark.nightly
def test_every_program_refuses_separate_folders_in_a_minute(settings: Path, tmp_path: Path) -> None:
    """And a checkpoint that is another one on another host; the check says what two hosts have in common."""
    recipes = ("grpo_math.py", "sft_math.py", "expert_iteration.py", "evaluate.py", "best_of_n.py", "trl_ext.hosts")
    apart = [word for recipe in recipes for word in (recipe, *RUN, "--")]
    for host in ("host_a", "host_b"):
        checkpoint = tmp_path / host / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(host)
    shared, model = tmp_path / "shared", yaml.safe_load(settings.read_text())["model_name_or_path"]
    resumed = ["grpo_math.py", "--output_dir", shared, "--resume", "checkpoint-2", "--"]
    checked = ["trl_ext.hosts", "--output_dir", shared, "--model", model, "--megabytes", 4]
    environment = {"PYTHONPATH": str(ROOT), "TRL_EXT_CACHE": str(tmp_path / "cache")}
    with two_hosts(
        tmp_path, "two_cpu_ranks_ddp", *apart, *resumed, *checked, recipe="tests.support.every_recipe", **environment
    ) as hosts:
        assert hosts.wait() == [0, 0], hosts.printed(0)[-3000:]
    for host in range(2):
        said = hosts.printed(host)
        for recipe in recipes:
            refusal = r"after (\d+) s: error: .*\(rank 1\) does not see output_dir 'runs/run' of host.*"
            line = re.search(rf"^{recipe} .* {refusal}", said, re.M)
            assert line is not None, said
            assert int(line[1]) < 60
            assert all(str(folder / "runs") in line[0] for folder in hosts.folders)
        assert re.search(r"^grpo_math.py .*the checkpoint 'checkpoint-2/\S+ is not the same on host", said, re.M), said
    assert not (tmp_path / "cache").exists(), "a policy was made before the refusal"
    assert not [path for path in tmp_path.rglob("*") if path.name in ("summary.json", "_in_use")]
    assert not list(tmp_path.rglob(".trl_ext_*"))
    said = hosts.printed(0)
    assert "2 ranks on 1 hosts, backend gloo" in said
    assert f"every rank sees {shared}" in said
    assert re.search(r"an all-reduce of 4 MB takes \d+ ms: [\d.]+ Gbit/s per link", said)


def test_launch_of_fewer_processes_is_refused(settings: Path, tmp_path: Path) -> None:
    """DeepSpeed's pdsh without a hostfile; and Accelerate's one process where it is told to use a CPU."""
    pdsh = yaml.safe_load((ROOT / "accelerate_configs" / "two_cpu_ranks_zero2.yaml").read_text())
    del pdsh["deepspeed_config"]["deepspeed_multinode_launcher"]
    cpu = {"distributed_type": "NO", "use_cpu": True, "num_machines": 2, "num_processes": 2}
    path = tmp_path / "config.yaml"
    for number, config in enumerate((pdsh, cpu)):  # each host refuses by itself, so one of them is enough
        path.write_text(yaml.safe_dump(config))
        launch = ["--num_machines", "2", "--num_processes", "2"]
        arguments = ["--config", str(settings), *RUN]
        with ended(Hosts([tmp_path / f"host_{number}"], path, "grpo_math.py", arguments, launch, {}, None)) as host:
            assert all(host.wait(100))
        assert "the launch asked for 2 processes on 2 machines, and this training has 1" in host.printed(0)
    assert not list(tmp_path.rglob("metrics.jsonl"))
