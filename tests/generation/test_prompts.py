from __future__ import annotations

from pathlib import Path

import pytest

from trl_ext.generation.prompts import format_prompt, load_prompt, prompt_names

R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: {question}\n"
    "Assistant: <think>"
)


def test_the_shipped_prompts_are_the_handouts_to_the_letter() -> None:
    assert prompt_names() == ["chat", "question_only", "r1_zero"]
    assert load_prompt("r1_zero") == R1_ZERO
    assert load_prompt("question_only") == "{question}"


@pytest.mark.parametrize("name", ["question_only", "r1_zero"])
def test_question_is_inserted_once_and_its_braces_are_kept(name: str) -> None:
    question = r"What is \frac{1}{2} + {x}, %s, \1?"
    before, after = load_prompt(name).split("{question}")
    assert format_prompt(load_prompt(name), question) == before + question + after


def test_every_placeholder_is_filled_and_other_braces_are_kept() -> None:
    assert format_prompt(r"\boxed{} {x} {question}, {question}", "1?") == r"\boxed{} {x} 1?, 1?"


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_file_of_your_own_is_read_without_the_editors_newline(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("  Frage: {question}\n→ {other}" + ending, encoding="utf-8")
    assert load_prompt(path) == load_prompt(str(path)) == "  Frage: {question}\n→ {other}"
    path.write_text("{question}\n\n")
    assert load_prompt(path) == "{question}\n"  # one newline, not all


def test_unknown_prompt_name_suggests_the_nearest_and_choices() -> None:
    with pytest.raises(ValueError) as caught:
        load_prompt("r1_zer")
    assert str(caught.value) == (
        "unknown prompt 'r1_zer'. Did you mean 'r1_zero'? Known: chat, question_only, r1_zero, or a file's path"
    )


def test_a_template_without_a_place_for_the_question_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flat.txt").write_text("What is {problem}?")
    with pytest.raises(ValueError, match=r"flat.txt' has no \{question\} placeholder"):
        load_prompt(tmp_path / "flat.txt")
    with pytest.raises(ValueError, match=r"prompt 'Why\?' has no \{question\} placeholder"):
        format_prompt("Why?", "x")
