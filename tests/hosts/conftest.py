"""The run that the tests of several hosts start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.recipes.test_grpo import SMALL, TINY_RUN
from trl_ext.mini.policy import make_base_policy

# The reward differs within every group. With FAULTS="KILL STOP" the second rank kills itself in its fourth rollout
# and, once its launcher has started it again, stops in the fourth, which is what a dead link is to the other hosts.
REWARD = """
import os, signal
rollouts = []
faults = dict(enumerate(os.environ.get("FAULTS", "").split()))

def length(completions, **_):
    rollouts.append(1)
    fault = faults.get(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)))
    if fault and len(rollouts) == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))
    return [len(set(c)) / 9 for c in completions]
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A YAML file for a run of small steps with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("hosts")
    policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
    (folder / "mine.py").write_text(REWARD)
    run = {
        **TINY_RUN,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 2,
        "validate_every": 100_000,
        "model_name_or_path": str(policy),
        "reward": f"{folder / 'mine.py'}:length",
        "learning_rate": 1e-3,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**run, "disable_tqdm": True}))
    return path
