"""The run that the tests of several hosts start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.recipes.test_grpo import SMALL, TINY_RUN
from trl_ext.mini.policy import make_base_policy


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML file for a run of four small steps whose reward differs within every group."""
    folder = tmp_path_factory.mktemp("hosts")
    policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
    (folder / "mine.py").write_text(
        "def length(completions, **_):\n    return [len(set(c)) / 9 for c in completions]\n"
    )
    run = {
        **TINY_RUN,
        "model_name_or_path": str(policy),
        "reward": f"{folder / 'mine.py'}:length",
        "learning_rate": 1e-3,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**run, "disable_tqdm": True}))
    return path
