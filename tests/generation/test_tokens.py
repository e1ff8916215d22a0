"""Prompts and completions with tokenizers of every kind that checkpoints bring along: the same figures, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_evaluate import samples, settings
from tests.recipes.test_grpo import TINY_RUN, write_splits
from tests.recipes.test_sft_and_pipeline import SMALL_SFT
from tests.support.recipe import run_recipe
from tests.support.tokenizers import BOS, KINDS, TURN, Kind, save, tokenizer_of
from trl import ModelConfig
from trl_ext import ExtGRPOConfig
from trl_ext.errors import InputError
from trl_ext.generation.tokens import completion_texts, prompt_ids
from trl_ext.io import read_json, read_jsonl
from trl_ext.mini.policy import EOS, PAD, TAGS
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.sft import SFTTask
from trl_ext.sft.trainer import ExtSFTConfig, tokenized

ROWS = [{"problem": f"What is ${i} + {i}$?", "answer": str(5 if i % 2 else 6), "level": 1} for i in range(16)]
LENGTH = 12


def write_problems(folder: Path) -> str:
    write_splits(folder, ROWS, [{**row, "problem": f"Now: {row['problem']}"} for row in ROWS])
    return str(folder / "{split}.jsonl")


def evaluated(folder: Path, model: str, **more: Any) -> list[dict[str, Any]]:
    """The rows of an evaluation of all problems."""
    from trl_ext.recipes.evaluate import run_evaluation

    given = {"dataset": write_problems(folder), "problems": None, "prompt": f"{model}/own.prompt", "max_tokens": LENGTH}
    run_evaluation(settings(model, folder / "evaluation", answer_format="r1_zero", **given, **more))
    return samples(folder / "evaluation")


def check(rows: list[dict[str, Any]], kind: Kind) -> None:
    assert {row["response"] for row in rows} == {kind.text}
    assert {row["finish_reason"] for row in rows} == {"stop"}
    if kind.text == KINDS["ordinary"].text:
        assert sum(row["answer_reward"] for row in rows) == len(rows) / 2


@pytest.mark.parametrize("name", KINDS)
def test_evaluation(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = save(tmp_path / "model", kind)
    if kind.refused:
        with pytest.raises(InputError, match=kind.refused):
            evaluated(tmp_path, model)
        return
    check(evaluated(tmp_path, model), kind)
