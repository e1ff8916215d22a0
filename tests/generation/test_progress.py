"""Whoever waits for completions sees a line every half minute, counted in tokens."""

from __future__ import annotations

import pytest

from trl_ext.generation import progress
from trl_ext.generation.progress import advance, reporting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress, "_clock", lambda: now[0])
    return now


def test_lines_come_by_the_clock_and_count_tokens(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("validation at step 20", completions=4, longest=100):
        for second in range(1, 71):
            clock[0] = second
            with reporting("a rollout within it", completions=1, longest=1):
                advance(2, finished=second == 5)
    advance(1000)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "validation at step 20: 1 of 4 completions, 20 tokens, 2 tokens/s, at most 2 min left",
        "validation at step 20: 1 of 4 completions, 80 tokens, 2 tokens/s, at most 2 min left",
        "validation at step 20: 1 of 4 completions, 140 tokens, 2 tokens/s, at most 2 min left",
    ]


def test_short_sampling_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with reporting("rollout", completions=4, longest=100):
        clock[0] = 9.9
        advance(2)
    with pytest.raises(ZeroDivisionError), reporting("rollout", completions=4, longest=100):
        1 / 0  # noqa: B018
    clock[0] = 99
    advance(1)
    assert capsys.readouterr().out == ""
