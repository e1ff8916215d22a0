"""The run that the tests of several hosts start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.recipes.test_grpo import SMALL, TINY_RUN
from trl_ext.mini.policy import make_base_policy

# The reward differs within every group. In its fourth rollout the second rank takes the first of the faults away that
# are left in a folder, if one is named, and sends itself that signal.
REWARD = """
import os, signal
from pathlib import Path
rollouts = []

def length(completions, **_):
    rollouts.append(1)
    if "FAULTS" in os.environ and len(rollouts) == 4 and os.environ["RANK"] == "1":
        for fault in sorted(Path(os.environ["FAULTS"]).iterdir())[:1]:
            fault.unlink()
            os.kill(os.getpid(), getattr(signal, fault.suffix[1:]))
    return [len(set(c)) / 9 for c in completions]
"""


def faults(folder: Path, *names: str) -> dict[str, str]:
    """Environment of a launch whose second rank gets these signals, one after the other."""
    folder.mkdir(parents=True)
    for i, name in enumerate(names):
        (folder / f"{i}.{name}").touch()
    return {"FAULTS": str(folder)}


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
