"""Pages for people say what is so: every test that a page names exists."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.evaluate import Evaluation
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.sft import SFT_SETTINGS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "recipes" / "what_happens_when.md"
NAMED = re.findall(r"`((?:\w+/)?test_\w+)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")


def test_every_line_of_the_page_has_a_test() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| when |", "|---"))]
    assert len(rows) == len(NAMED) > 30


def test_every_flag_that_the_readme_gives_a_recipe_is_there() -> None:
    blocks = re.findall(
        r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", ""), re.DOTALL
    )
    given = [m for block in blocks for m in re.finditer(r"(recipes/\w+\.py)(.*)$", block, re.MULTILINE)]
    tables = {
        "grpo_math": GRPO_SETTINGS, "sft_math": SFT_SETTINGS, "expert_iteration": EXPERT_ITERATION_SETTINGS,
        "evaluate": (Evaluation,), "best_of_n": (BestOfN,),
    }  # fmt: skip
    checked = 0
    for recipe, rest in (match.groups() for match in given):
        if settings := tables.get(Path(recipe).stem):
            known = {field.name for table in settings for field in dataclasses.fields(table)} | {"config"}
            flags = re.findall(r"--(\w+)", rest)
            assert set(flags) <= known, (recipe, flags)
            checked += len(flags)
    assert checked > 10


@pytest.mark.slow
def test_the_readmes_evaluation_block_runs_as_it_is_copied(tmp_path: Path, policy_cache: Path) -> None:
    """With the base policy where its first block leaves a trained one, which takes minutes."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How good is a model?")[2]
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert block[1].count("recipes/") == 4
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "grpo_math").symlink_to(make_base_policy(0, policy_cache, progress=False))
    known = {"TRL_EXT_CACHE": str(policy_cache), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block[1]], cwd=tmp_path, env={**os.environ, **known, "PATH": path},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("before", "after", "after_at_16"):
        assert (tmp_path / "runs" / name / "summary.json").is_file(), name
    assert "accuracy" in done.stdout
