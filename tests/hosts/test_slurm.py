"""What each node would run, by programs that stand in for Slurm's and for the launcher; and when a job is requeued."""

from __future__ import annotations

import datetime
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.recipes.test_grpo import ROOT

# Runs the command once per node with the variables that srun sets for each task.
SRUN = 'shift 2; for node in 0 1; do SLURM_PROCID=$node "$@" || status=$?; done; exit ${status:-0}'
SCONTROL = """case "$1 $2" in
"show hostnames") printf "n07\\nn08\\n" ;;
"show job") echo "   StartTime=2026-11-23T10:20:00 EndTime=$END Deadline=N/A" ;;
*) echo "scontrol $*" ;;
esac"""
ACCELERATE = (
    'echo "accelerate $*"; env | grep -E "TORCH_DISABLE|SOCKET_IFNAME|TRITON_CACHE|ELASTIC" | sort; exit ${RESULT:-0}'
)


def submitted(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("accelerate", ACCELERATE)):
        path = folder / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[07-08]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=30,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": "/scratch", **slurm, **environment},
    )  # fmt: skip


def test_every_node_runs_one_launcher_of_all_gpus(tmp_path: Path) -> None:
    done = submitted(tmp_path, "recipes/grpo_math.py", "--output_dir", "/shared/a b", INTERFACE="ib0")
    assert done.returncode == 0, done.stderr
    launches = [line for line in done.stdout.splitlines() if line.startswith("accelerate")]
    assert launches == [
        "accelerate launch --config_file accelerate_configs/nodes_zero2.yaml --num_machines 2 --num_processes 16 "
        f"--machine_rank {node} --main_process_ip n07 --main_process_port 29500 --rdzv_backend c10d "
        "--rdzv_conf timeout=600 --max_restarts 3 recipes/grpo_math.py --output_dir /shared/a b --resume auto"
        for node in range(2)
    ]
    assert done.stdout.splitlines()[1:6] == [
        "GLOO_SOCKET_IFNAME=ib0",
        "NCCL_SOCKET_IFNAME=ib0",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=840",
        "TRITON_CACHE_DIR=/scratch/trl_ext_42/triton",
    ]


@pytest.mark.parametrize(
    ("result", "seconds_left", "requeued", "status"),
    [("0", 10, False, 0), ("1", 10, True, 0), ("1", 7200, False, 1), ("143", 800, True, 0), ("2", None, False, 2)],
)
def test_job_is_requeued_at_its_time_limit_only(
    result: str, seconds_left: int | None, requeued: bool, status: int, tmp_path: Path
) -> None:
    end = (
        "Unknown"
        if seconds_left is None
        else f"{datetime.datetime.now() + datetime.timedelta(seconds=seconds_left):%FT%T}"
    )
    done = submitted(tmp_path, "recipes/grpo_math.py", RESULT=result, END=end)
    assert ("scontrol requeue 42" in done.stdout) is requeued
    assert done.returncode == status


def test_skypilot_runs_one_launcher_of_all_gpus_per_node(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "scripts" / "skypilot.yaml").read_text())
    program = tmp_path / ".venv" / "bin" / "accelerate"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/usr/bin/env bash\n{ACCELERATE}\n")
    program.chmod(0o755)
    node = {"NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_NODES": "2", "NUM_GPUS_PER_NODE": "8"}
    own = {f"SKYPILOT_{name}": value for name, value in node.items()}
    done = subprocess.run(
        ["bash", "-euc", task["run"]],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, env={"PATH": os.environ["PATH"], **task["envs"], **own},
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == (
        "accelerate launch --config_file accelerate_configs/nodes_zero2.yaml --num_machines 2 --num_processes 16 "
        "--machine_rank 1 --main_process_ip 10.0.0.1 recipes/grpo_math.py --config "
        "recipes/grpo_math_qwen2.5_math_1.5b.yaml --output_dir /shared/run --resume auto"
    ), done.stderr
    assert (ROOT / "recipes" / "grpo_math_qwen2.5_math_1.5b.yaml").is_file()


def test_help_says_how_to_submit(tmp_path: Path) -> None:
    done = submitted(tmp_path, "--help")
    assert done.returncode == 0
    assert "sbatch [options of sbatch] scripts/slurm.sbatch recipes/grpo_math.py" in done.stdout
    assert "INTERFACE" in done.stdout
