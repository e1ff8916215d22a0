"""Training on the problems that an evaluation has solved sometimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trl_ext.io import write_jsonl
from trl_ext.recipes.grpo import GRPOTask

PROBLEMS = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
SOLVED: dict[int, tuple[int, ...]] = {0: (0, 0), 1: (1, 0), 2: (1, 1)}  # problem 3 has not been evaluated


def task(folder: Path, solved: dict[int, tuple[int, ...]]) -> GRPOTask:
    for split, begins in (("train", ""), ("validation", "Now ")):
        write_jsonl(folder / f"{split}.jsonl", [{**row, "problem": begins + row["problem"]} for row in PROBLEMS])
    (folder / "evaluation").mkdir()
    samples = [{**PROBLEMS[i], "answer_reward": reward} for i, rewards in solved.items() for reward in rewards]
    write_jsonl(
        folder / "evaluation" / "samples.jsonl",
        [{**row, "outcome": "correct" if row["answer_reward"] else "neither"} for row in samples],
    )
    return GRPOTask(dataset=str(folder / "{split}.jsonl"), pass_rates_from=str(folder / "evaluation"))


def test_only_problems_solved_sometimes_are_trained_on(tmp_path: Path) -> None:
    data = task(tmp_path, SOLVED).data(0)
    assert data.train["problem"][:] == ["1 + 1"]
    assert len(data.validation) == 4
    line = data.sources["train"].line("train")
    assert "train: 1 problems of 4" in line
    assert f"those that {tmp_path / 'evaluation'} has solved sometimes, of 3 there: 1 never, 1 always" in line


@pytest.mark.parametrize(
    ("solved", "words"),
    [
        ({0: (0, 0), 2: (1, 1)}, "nothing to train on: those that .* of 2 there: 1 never, 1 always"),
        ({0: (0,), 2: (1,)}, "one sample per problem: evaluate with --samples 4"),
    ],
)
def test_an_evaluation_that_says_nothing_is_refused(solved: dict[int, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        task(tmp_path, solved).data(0)


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no samples.jsonl: no evaluation has ended there"):
        GRPOTask(train_problems=4, validation_problems=4, pass_rates_from=str(tmp_path)).data(0)
