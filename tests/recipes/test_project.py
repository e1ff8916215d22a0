"""`trl-ext init`: a project is the examples of the package, its settings name its loss, and nothing is overwritten."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from trl_ext.errors import InputError
from trl_ext.grpo.ineffective_settings import ineffective_settings
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.project import project_files, write_project

RECIPES = Path(__file__).parents[2] / "recipes"


def code_of(source: str) -> str:
    """A module without its docstring."""
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    return ast.unparse(tree.body[1:])  # type: ignore[arg-type]


def test_a_project_is_the_recipe_and_the_loss_of_the_package(tmp_path: Path) -> None:
    said = write_project(tmp_path / "deep" / "mine")
    assert f"cd {tmp_path / 'deep' / 'mine'}\n    python train.py\n    pip install pytest && pytest\n" in said
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "deep" / "mine").iterdir()}
    assert written == project_files("mine")
    assert written["README.md"].startswith("# mine\n")
    for name, example in {
        "train.py": "grpo_math.py",
        "my_loss.py": "my_loss.py",
        "test_my_loss.py": "test_my_loss.py",
    }.items():
        assert code_of(written[name]) == code_of((RECIPES / example).read_text(encoding="utf-8"))
    for name in ("train.py", "my_loss.py"):
        assert "recipes/" not in (ast.get_docstring(ast.parse(written[name])) or "")


def test_its_settings_are_the_recipes_and_its_own_loss() -> None:
    settings = yaml.safe_load(project_files("mine")["train.yaml"])
    usual = yaml.safe_load((RECIPES / "grpo_math.yaml").read_text(encoding="utf-8"))
    assert settings == {**usual, "policy_loss": "my_loss.py:soft_clip", "train_batch_size": 64}


def test_its_loss_has_an_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = parse(GRPO_SETTINGS, None, tmp_path / "train.yaml", ["--use_cpu", "true"])[2]
    assert "policy_loss" not in ineffective_settings(config)


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_project(tmp_path / "empty")
    before = {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()}
    with pytest.raises(InputError, match=r"empty is there and not empty; name a new folder$"):
        write_project(tmp_path / "empty")
    assert {path: path.read_bytes() for path in (tmp_path / "empty").iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is there"):
        write_project(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        write_project(tmp_path / "file" / "project")
