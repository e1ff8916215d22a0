"""What other harnesses answered next to ours: where responses differ first, and their logs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scripts.compare_harnesses import Answer, Difference, compare, first_difference, gaps, main, shown, until_stop
from tests.support.tiny import save_tiny
from trl_ext.errors import InputError
from trl_ext.io import write_json, write_jsonl

ROOT = Path(__file__).parents[2]
STOP = ("</answer>",)


def answers(*responses: str, correct: bool = True) -> list[Answer]:
    return [Answer(f"P{number}", text, correct) for number, text in enumerate(responses)]


@pytest.mark.parametrize(
    ("one", "other", "at"), [("ab", "ab", None), ("ab", "ac", 1), ("ab", "abc", 2), ("", "a", 0), ("", "", None)]
)
def test_where_two_responses_differ_first(one: str, other: str, at: int | None) -> None:
    assert (first_difference(one, other), first_difference(other, one)) == (at, at)


def test_a_stop_string_ends_a_response_where_it_is_first() -> None:
    assert until_stop("a </answer> b </answer>", STOP) == "a "
    assert until_stop("a \n\n b </answer>", (*STOP, "\n\n")) == "a "
    assert until_stop("a </answer>", ()) == "a </answer>"


def test_a_stop_string_taken_away_is_no_difference() -> None:
    found = compare(answers("1 </answer>", "2", "3"), answers("1 ", "2", "30"), STOP)
    assert (found.problems, found.same, found.same_as_drawn, found.same_verdicts) == (3, 2, 1, 3)
    (one,) = found.differences
    assert (one.problem, one.at, one.ours, one.theirs) == (2, 1, "3", "30")


def test_a_verdict_or_a_prompt_that_differs_is_counted() -> None:
    theirs = [Answer("P0", "1", False), Answer("another", "2", True)]
    found = compare(answers("1", "2"), theirs, STOP)
    assert (found.same, found.same_verdicts, found.other_prompts, found.accuracies) == (2, 1, 1, (1.0, 0.5))
    (one,) = found.differences
    assert one.at is None
    assert shown(one) == "problem 0: the same response, ours correct, theirs incorrect: ...'1'"


def test_other_numbers_of_problems_are_refused() -> None:
    with pytest.raises(InputError, match="1 problems of ours and 2 of theirs: run both on the same rows"):
        compare(answers("1"), answers("1", "2"), STOP)


def run_of(folder: Path) -> None:
    """What the script leaves of two problems, in the layouts of lm-eval 0.4.13 and inspect 0.3.285."""
    rows = [("P0", "1 </answer>", 1), ("P1", "2 </answer>", 0)]
    ours = [
        {"number": n, "prompt": prompt, "response": text, "outcome": ("format_only", "correct")[right]}
        for n, (prompt, text, right) in enumerate(rows)
    ]
    (folder / "ours").mkdir(parents=True)
    write_jsonl(folder / "ours" / "samples.jsonl", ours[::-1])
    write_json(folder / "ours" / "summary.json", {"settings": {"stop": ["</answer>"]}})
    lm_eval = [
        {"doc_id": n, "arguments": {"gen_args_0": {"arg_0": prompt}}, "resps": [[text[:2]]], "accuracy": float(right)}
        for n, (prompt, text, right) in enumerate(rows)
    ]
    (folder / "lm_eval" / "model").mkdir(parents=True)
    write_jsonl(folder / "lm_eval" / "model" / "samples_task_DATE.jsonl", lm_eval[::-1])
    inspect: list[dict[str, Any]] = [
        {"id": n + 1, "input": prompt, "output": {"choices": [{"message": {"content": text}}]},
         "scores": {"graded": {"value": "IC"[right]}}}
        for n, (prompt, text, right) in enumerate(rows)
    ]  # fmt: skip
    inspect[1]["output"]["choices"][0]["message"]["content"] = "3 </answer>"
    (folder / "inspect").mkdir()
    write_json(folder / "inspect" / "log.json", {"samples": inspect[::-1]})


def test_logs_become_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| lm_eval | ours | 2 | 2 | 2 | 0 | 2 | 0.500 | 0.500 |" in printed
    assert "| inspect | ours | 2 | 2 | 1 | 1 | 2 | 0.500 | 0.500 |" in printed
    assert "problem 1: from character 0, ours ...'2 ', theirs ...'3 ' (incorrect, incorrect)" in printed
    assert json.loads((tmp_path / "compared.json").read_text())["inspect"]["differences"][0]["problem"] == 1


def test_an_engine_of_vllm_is_compared_with_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    (tmp_path / "lm_eval").rename(tmp_path / "lm_eval_vllm")
    main([str(tmp_path)])
    assert "| lm_eval_vllm | ours | 2 | 2 | 2 |" in capsys.readouterr().out  # where there is no ours_vllm
    rows = [json.loads(line) for line in (tmp_path / "ours" / "samples.jsonl").read_text().splitlines()]
    rows[0]["response"] = "4 </answer>"
    (tmp_path / "ours_vllm").mkdir()
    write_jsonl(tmp_path / "ours_vllm" / "samples.jsonl", rows)
    main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| ours_vllm | ours | 2 | 2 | 1 |" in printed
    assert "| lm_eval_vllm | ours_vllm | 2 | 2 | 1 |" in printed
    assert "problem 1: from character 0, ours ...'4 ', theirs ...'2 ' (incorrect, incorrect)" in printed


def test_the_first_problems_are_compared_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    log = next((tmp_path / "lm_eval" / "model").iterdir())
    write_jsonl(log, [row for row in map(json.loads, log.read_text().splitlines()) if row["doc_id"] == 0])
    with pytest.raises(SystemExit, match="2 problems of ours and 1 of theirs"):
        main([str(tmp_path)])
    main([str(tmp_path), "--problems", "1"])
    printed = capsys.readouterr().out
    assert "| lm_eval | ours | 1 | 1 | 1 | 0 | 1 | 1.000 | 1.000 |" in printed
    assert "| inspect | ours | 1 | 1 | 1 | 1 | 1 | 1.000 | 1.000 |" in printed


def test_the_details_of_lighteval_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    run_of(tmp_path)
    rows = [
        {"doc": {"query": f"P{n}", "id": str(n)}, "model_response": {"text": [f"{n + 1} "]},
         "metric": {"accuracy": 1 - n}}
        for n in (1, 0)
    ]  # fmt: skip
    (tmp_path / "lighteval").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "lighteval" / "details_task.parquet")
    main([str(tmp_path)])
    assert "| lighteval | ours | 2 | 2 | 2 | 0 | 2 | 0.500 | 0.500 |" in capsys.readouterr().out


def test_a_folder_without_logs_names_the_script(tmp_path: Path) -> None:
    run_of(tmp_path)
    for path in (tmp_path / "lm_eval" / "model").iterdir():
        path.unlink()
    with pytest.raises(SystemExit, match=r"error: .*lm_eval' has no samples_\*.jsonl: run scripts/harnesses.sh first"):
        main([str(tmp_path)])


def test_the_script_says_how_it_is_run() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "harnesses.sh"), "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: bash scripts/harnesses.sh" in done.stdout
    assert "TRL_EXT_HARNESSES" in done.stdout


def test_a_difference_is_explained_by_its_logits(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()  # in no order, and larger than the model's
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word.isalnum()][:3]
    one = Difference(0, 1, " ".join(words[:2]), f"{words[0]} {words[2]}", (True, True))
    turned = Difference(1, 1, one.theirs, one.ours, (True, True))
    found, other = gaps(str(folder), [(words[0], one), (words[0], turned)])
    drawn_in_64 = gaps(str(folder), [(words[0], one)], "float64")[0]
    assert drawn_in_64["as run"] == drawn_in_64["float64"]
    assert (found["token"], [text.strip() for text in found["tokens"]]) == (1, words[1:])
    assert found["as run"] == pytest.approx(found["float64"], rel=1e-3)
    assert other["float64"] == pytest.approx(-found["float64"])
    assert found["float64"] != 0
