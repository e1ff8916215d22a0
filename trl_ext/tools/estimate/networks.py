"""A model's configuration without its weights: from a folder, the Hub's cache, or a table of published shapes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.errors import InputError
from trl_ext.generation.gguf import file_named, read_config
from trl_ext.generation.model_source import ADAPTER, locate

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@cache
def published() -> dict[str, Any]:
    """`models`, `prompts` and `marks` by name, each with its source."""
    return dict(json.loads((files("trl_ext.tools.estimate") / "published.json").read_text(encoding="utf-8")))


def network_of(name: str, revision: str = "main") -> PretrainedConfig:
    """The configuration of a model; nothing is downloaded.

    Raises:
        InputError: it is nowhere on this machine and not in the table.
    """
    from transformers import AutoConfig

    if (Path(name) / ADAPTER).is_file():
        name = locate(name).base
    if file := file_named(name):
        return read_config(file)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, revision=revision)
    except (OSError, ValueError):
        table = published()["models"]
    if name in table:
        given = dict(table[name]["config"])
        return AutoConfig.for_model(given.pop("model_type"), **given)
    raise InputError(
        f"model {name!r}: its config.json is neither in a folder of that name nor in the Hub's cache, and its shape is "
        f"not among the published ones ({', '.join(table)}). Give a folder that holds its config.json with --set "
        f"model_name_or_path=FOLDER, or fetch that file: hf download {name} config.json"
    )


def prompt_lengths(dataset: str) -> tuple[float, int]:
    """Mean and longest prompt of a dataset in tokens, where they are known; else of one with prompts of 200 tokens."""
    lengths = published()["prompts"].get(dataset, {"mean": 200, "longest": 400})
    return float(lengths["mean"]), int(lengths["longest"])
