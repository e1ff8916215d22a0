"""Pages for people say what is so: commands, flags, outputs, tests, settings and links are those that there are."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trl_ext
from scripts import algorithms_page, docs_pages
from tests.test_package import LAYERS
from trl_ext import PRESETS, rewards
from trl_ext.grpo import config as grpo_config
from trl_ext.io import read_yaml
from trl_ext.mini.policy import make_base_policy
from trl_ext.training.settings import RunSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}
FAULTS = PAGES["faults.md"]
NAMED = re.findall(r"`((?:\w+/)*test_\w+)::(test_\w+)`", FAULTS.read_text(encoding="utf-8"))
WITH_EXAMPLES = ("tutorial.md", "packages/algorithms.md", "packages/rewards.md")


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")


def test_every_line_of_the_page_has_a_test() -> None:
    lines = [line for line in FAULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| when |", "|---"))]
    assert len(rows) == len(NAMED) > 30


def flags_of_recipes(text: str) -> Iterator[tuple[str, set[str]]]:
    """Recipe and flags of every command in the blocks of a page."""
    for block in re.findall(r"```bash\n(.*?)```", text.replace("\\\n", ""), re.DOTALL):
        for match in re.finditer(r"recipes/(\w+\.py)(.*)$", block, re.MULTILINE):
            yield match[1], set(re.findall(r"--(\w+)", match[2]))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES.values()], ids=lambda page: page.stem)
def test_every_flag_that_a_page_gives_a_recipe_is_there(page: Path) -> None:
    for recipe, flags in flags_of_recipes(page.read_text(encoding="utf-8")):
        if tables := docs_pages.RECIPES.get(recipe):
            known = {field.name for table in tables for field in dataclasses.fields(table)} | {"config"}
            assert flags <= known, (recipe, flags - known)


def test_such_flags_are_found() -> None:
    found = dict(flags_of_recipes("```bash\nx recipes/grpo_math.py \\\n --preset dapo --nope\n```"))
    assert found == {"grpo_math.py": {"preset", "nope"}}


@pytest.mark.parametrize(
    "page", ["getting_started.md", "two_gpus.md", *(p for p in PAGES if p.startswith("packages/"))]
)
def test_every_flag_in_the_prose_of_a_page_is_one(page: str) -> None:
    prose = re.sub(r"```.*?```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.DOTALL)
    fields = {field.name for tables in docs_pages.RECIPES.values() for t in tables for field in dataclasses.fields(t)}
    # of argparse, evaluate.py, launchers and vLLM's server
    others = {"config", "help", "show", "category", "resume", "config_file", "generation", "override", "replay"}
    assert set(re.findall(r"`[^`\n]*--(\w+)[^`\n]*`", prose)) <= fields | others


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if "optimizers" in path else ()) for path in docs_pages.PAGES],
)
def test_a_written_page_is_what_the_code_says(path: str) -> None:
    assert (DOCS / path).read_text(encoding="utf-8") == docs_pages.PAGES[path](), "run: python -m scripts.docs_pages"


def test_every_package_has_its_page_and_every_page_its_place() -> None:
    packages = {name for layer in LAYERS for name in layer.split() if (ROOT / "trl_ext" / name).is_dir()}
    pages = {name: PAGES[f"packages/{Path(name).name}.md"] for name in packages}
    for name, page in pages.items():
        assert f"::: trl_ext.{name.replace('/', '.')}\n" in page.read_text(encoding="utf-8")
    single = {name for layer in LAYERS for name in layer.split()} - packages
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES.values())
    assert all(f"::: trl_ext.{name}\n" in shown for name in single)
    nav = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(leaves(nav)) == sorted(PAGES)


def test_the_diagram_names_methods_that_are_ours() -> None:
    ours = re.findall(r"^ours.*$", (DOCS / "site" / "step.txt").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for line in ours for name in re.findall(r"(?<![\w.])_?[a-z]+_\w+(?![\w.])|(?<=\.)plan\b", line)}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "trl_ext").rglob("*.py"))
    assert len(named) > 10
    assert {name for name in named if f"def {name}(" not in code} == set()


def test_the_public_names_are_on_their_page() -> None:
    named = re.findall(r"^::: \S*\.(\w+)$", PAGES["reference/api.md"].read_text(encoding="utf-8"), re.MULTILINE)
    assert {*trl_ext.__all__, *(name for name in rewards.__all__ if name.endswith("_reward_fn"))} == {
        *named,
        "__version__",
    }


def leaves(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(part)]


def test_every_file_that_a_page_links_to_is_there() -> None:
    others = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md")]
    for page in [*others, *PAGES.values()]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_the_python_of_a_page_gives_what_its_comments_say(page: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGES[page].read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.parse(block).body:
            if not isinstance(node, ast.Expr):
                exec(ast.unparse(node), names)
                continue
            said = block.splitlines()[node.end_lineno - 1][node.end_col_offset :].strip().removeprefix("# ")
            assert repr(eval(ast.unparse(node), names)) == said


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (extra `docs`)")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", DOCS / "site" / "mkdocs.yml", "-d", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "packages" / "training.html").read_text(encoding="utf-8")
    assert f'id="{RunSettings.__module__}.RunSettings"' in settings  # the modules are read, not only named
    for page in PAGES:
        assert (tmp_path / page).with_suffix(".html").exists(), page


@pytest.mark.nightly
@pytest.mark.slow
def test_the_evaluation_block_runs_as_it_is_copied(tmp_path: Path, policy_cache: Path) -> None:
    """With the base policy where its first block leaves a trained one, which takes minutes."""
    block = re.search(r"```bash\n(.*?)```", PAGES["packages/evaluation.md"].read_text(encoding="utf-8"), re.DOTALL)
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


def test_every_member_of_an_axis_is_on_the_page_of_algorithms() -> None:
    told = read_yaml(algorithms_page.SOURCE)
    assert told.pop("preset").keys() == PRESETS.keys()
    assert told.keys() == algorithms_page.AXES.keys() == set(grpo_config.AXES)
    assert {axis: set(of) for axis, of in told.items()} == {
        axis: set(of) for axis, (_, of) in algorithms_page.AXES.items()
    }
    page = PAGES["reference/algorithms.md"].read_text(encoding="utf-8")
    assert all(f"| `{preset}` |" in page for preset in PRESETS)
