"""A recipe in this process: the `main` of the script that the table has for the task."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_ext.runs.recipes import RECIPES, recipe_of


def script_of(task: Any) -> ModuleType:
    return importlib.import_module(f"recipes.{Path(RECIPES[recipe_of(task)].script).stem}")


def run_recipe(task: Any, model: Any, config: Any) -> dict[str, Any]:
    summary: dict[str, Any] = script_of(task).main(task, model, config)
    return summary
