"""A dataset's rows by the settings that a test has on its mind, without a recipe."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.load import Problems


def read_problems(
    dataset: str,
    split: str,
    prompt: str,
    n: int | None = None,
    seed: int = 0,
    in_sample_order: bool = False,
    **more: Any,
) -> Problems:
    """`DatasetSettings.read`, with `more` settings."""
    return DatasetSettings(dataset=dataset, prompt=prompt, **more).read(split, n, seed, in_sample_order)


def load_problems(dataset: str, split: str, prompt: str, **options: Any) -> Dataset:
    """The rows of `read_problems`."""
    return read_problems(dataset, split, prompt, **options).rows
