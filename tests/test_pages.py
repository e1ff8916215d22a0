"""Pages for people say what is so: every test that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "recipes" / "what_happens_when.md"
NAMED = re.findall(r"`(test_\w+)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_every_test_that_the_page_names_is_there(file: str, test: str) -> None:
    assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")


def test_every_line_of_the_page_has_a_test() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| when |", "|---"))]
    assert len(rows) == len(NAMED) > 30
