"""The page of graded samples: examples of each category, and what lost the incorrect ones."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.samples_page import CUT_OFF, MODEL, PARSER, at_fault, readings, samples_page


def row(response: str, answer: str = "12", outcome: str = "neither", **more: Any) -> dict[str, Any]:
    given = {"problem": "What?", "response": response, "answer": answer, "outcome": outcome, "finish_reason": "stop"}
    return {**given, "extracted": None, "reason": "", **more}


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        (row("</think> <answer> 12 </answer>", outcome="correct", extracted="12"), None),
        (row("</think> <answer> 13 </answer>", outcome="format_only", extracted="13"), MODEL),
        (row("so it is 12", finish_reason="length"), PARSER),  # it had it before it was cut off
        (row("so 3 * 4 = 12. That is it!"), PARSER),
        (row(r"thus \boxed{\frac{24}{2}}"), PARSER),
        (row("</think> <answer> 1.2e1 </answer>", outcome="format_only", extracted="12.0"), PARSER),
        (row("I think that", finish_reason="length"), CUT_OFF),
        (row("12 apples, no, 11"), MODEL),
        (row(""), MODEL),
    ],
)
def test_who_lost_a_sample(sample: dict[str, Any], fault: str | None) -> None:
    assert at_fault([sample]) == [fault]


def test_a_response_is_read_in_several_ways() -> None:
    assert readings(row(r"3 = x = 4 so \boxed{7} or 8/9", extracted="5")) == ["5", "7", r"4 so \boxed{7} or 8/9", "8/9"]
    assert readings(row("nothing")) == []


def test_page_counts_comments_and_shows_hostile_text_as_text() -> None:
    rows = [
        row("</think> <answer> 12 </answer>", outcome="correct", extracted="12", problem_id=0),
        row("x" * 2000, problem_id=1),
        row("x ```` </details> <script>", problem_id=2),
        row("it is 12", problem_id=3),
        row("y", finish_reason="length", problem_id=4),
    ]
    page = samples_page("Samples", rows, ["how"], examples=3)
    assert "| neither | 4 | 2 | 1 | 1 |" in page
    assert "Of 4 incorrect samples 1 (25%) give the reference answer by another reading, at most" in page
    assert "## Neither: 4 of 5" in page
    assert "`````text\nx ```` </details> <script>\n`````" not in page  # three examples, one of each fault
    assert [f"Problem {n}:" in page for n in range(5)] == [True, True, False, True, True]
    assert "(500 characters more)" in page
    assert "`````text\nx ```` </details> <script>\n`````" in samples_page("Samples", rows[2:3], [], 1)
    assert "Every sample is correct." in samples_page("Samples", rows[:1], [])
