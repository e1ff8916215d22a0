"""A word that is not the field's is found, wherever a person reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "retired_words.py"


def retired_words(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("text", "word", "use"),
    [
        ('"""Supervised finetuning."""', "finetuning", "fine-tune, SFT"),
        ("def test_a_run_goes_on_where_it_was():", "goes_on", "resume, restart, continue"),
        ("# Interrupted, it goes\n# on where it was.", "goes # on", "resume, restart, continue"),
        ("Weights are the same to the\nbit.", "to the bit", "bit-identical"),
        ("the Likeliest token", "Likeliest", "most likely; greedy decoding, where a token is meant"),
    ],
)
def test_a_retired_word_is_found(tmp_path: Path, text: str, word: str, use: str) -> None:
    (tmp_path / "page.md").write_text(f"first line\n{text}\n", encoding="utf-8")
    done = retired_words(tmp_path)
    assert done.returncode == 1
    assert done.stdout == f"page.md:2: {word} -> {use}\n"
    assert "1 retired word" in done.stderr


def test_other_words_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("The chain rule; the range goes from 1 to 2; spread evenly.\n", encoding="utf-8")
    (tmp_path / "figures.json").write_text('"finetuning"', encoding="utf-8")
    done = retired_words(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_path_that_is_not_there_is_an_error() -> None:
    done = retired_words("no_such_folder")
    assert done.returncode == 2
    assert "there is no no_such_folder" in done.stderr
