"""Someone else's verdicts next to ours: counted, shown, written; their graders run where they are installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_ext.errors import InputError
from trl_ext.evaluation import their_graders
from trl_ext.evaluation.disagreements import agreement, disagreeing, main, shown
from trl_ext.evaluation.their_graders import THEIR_GRADERS, TheirGrader, verdicts_of
from trl_ext.io import read_jsonl, write_jsonl
from trl_ext.registry import UnknownName


def row(number: int, ours: str, verdict: bool | None, **more: Any) -> dict[str, Any]:
    same = {"reason": "same text", "response": f"it is {number}", "answer": str(number), "extracted": str(number)}
    return {"number": number, "outcome": ours, "verdict": verdict, **same, **more}


ROWS = [
    row(0, "correct", True),
    row(1, "correct", False, response="9" * 500 + "\x1b[2J"),
    row(2, "format_only", True),
    row(3, "neither", True),
    row(4, "neither", False),
    row(5, "correct", None),
]


def test_four_cases_are_counted_without_rows_lacking_a_verdict() -> None:
    assert [found["number"] for found in disagreeing(ROWS)] == [1, 2, 3]
    lines = agreement(ROWS).splitlines()
    assert lines[0] == "the two graders agree on 2 of 5 responses, 1 without their verdict"
    assert [line.split()[-2:] for line in lines[2:]] == [["1", "1"], ["2", "1"]]


def test_a_shown_response_cannot_steer_the_terminal() -> None:
    text = shown(ROWS[1] | {"their_reason": "\x1b[31m"})
    assert "\x1b" not in text
    assert "ours correct (same text), theirs incorrect" in text
    assert "9" * 116 in text
    assert "9" * 117 not in text


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["disagreements", *arguments])
    main()


def test_command_prints_and_writes_what_is_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "samples.jsonl", ROWS)
    run(monkeypatch, str(tmp_path), "--show", "2")
    printed = capsys.readouterr().out
    assert (printed.count("--- sample"), "agree on 2 of 5" in printed) == (2, True)
    assert [found["number"] for found in read_jsonl(tmp_path / "disagreements.jsonl")] == [1, 2, 3]
    write_jsonl(tmp_path / "samples.jsonl", [row(0, "correct", None)])
    with pytest.raises(SystemExit, match=r"no verdicts of someone else's: name a --grader, one of lm_eval_gsm8k"):
        run(monkeypatch, str(tmp_path))
    with pytest.raises(SystemExit, match=r"has no samples\.jsonl"):
        run(monkeypatch, str(tmp_path / "nowhere"))


@pytest.mark.moderate
def test_another_grader_is_asked_in_a_worker_that_it_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grader of the test's own stands where a library's would: the machinery is ours, their functions are below."""
    (tmp_path / "their_rule.py").write_text(
        "import os\n\n\ndef same(response, reference):\n    if 'crash' in response:\n        os._exit(1)\n"
        "    return response == reference, response\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(THEIR_GRADERS, "same", TheirGrader("json", "nothing", "their_rule:same"))
    pairs = [("1", "1"), ("crash", "1"), ("2", ["1", "2"]), ("3", ["3", "4"]), ("4", 5)]
    expected = [(True, "1"), (None, "crash"), (True, "2"), (True, "3"), (False, "4")]
    assert verdicts_of("same", pairs) == expected
    write_jsonl(tmp_path / "samples.jsonl", [row(7, "correct", None)])
    run(monkeypatch, str(tmp_path), "--grader", "same", "--extracted")
    assert read_jsonl(tmp_path / "disagreements.jsonl")[0]["their_reason"] == "$7$"
    run(monkeypatch, str(tmp_path), "--grader", "same")
    assert "theirs incorrect ('it is 7')" in capsys.readouterr().out


def test_a_grader_that_is_not_known_or_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'lm_eval_gsm8k_strict'"):
        verdicts_of("lm_eval_gsm8k_strickt", [])
    monkeypatch.setitem(THEIR_GRADERS, "none", TheirGrader("no_such_library", "that", "json:loads"))
    with pytest.raises(InputError, match="none needs no_such_library: pip install that"):
        verdicts_of("none", [("1", "1")])


def test_every_grader_of_the_table_has_its_function() -> None:
    folder = Path(their_graders.__file__).parent
    for grader in THEIR_GRADERS.values():
        module, _, function = grader.function.rpartition(":")
        assert f"def {function}(" in (folder / f"{module.rpartition('.')[2]}.py").read_text()


GSM8K = [("so 9 * 2 = 18\n#### 18", "18"), ("The answer is 18.", "18"), ("#### 1,800", "1800"), ("It is 17", "18")]
BOXED = [(r"so it is $\boxed{\frac{1}{2}}$.", r"\frac12"), (r"$\frac{1}{2}$", r"\frac12"), (r"$\boxed{3}$", r"\frac12")]
SEEN = {
    "lm_eval_gsm8k_strict": (GSM8K, [True, False, True, False]),
    "lm_eval_gsm8k_flexible": (GSM8K, [True, True, True, False]),
    "inspect_match_numeric": (GSM8K, [True, True, True, False]),
    "lighteval_gsm8k": (GSM8K, [True, True, True, False]),
    "lm_eval_hendrycks_math": (BOXED, [False, True, False]),
    "lighteval_math_500": (BOXED, [True, True, False]),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_their_graders_judge_as_was_seen(name: str) -> None:
    if importlib.util.find_spec(THEIR_GRADERS[name].library) is None:
        pytest.skip(f"{THEIR_GRADERS[name].library} is not installed")
    if name.startswith("lighteval"):  # it asks for exactly one version of what math-verify stands on
        try:
            importlib.import_module("lighteval.metrics.metrics")
        except ImportError as error:
            pytest.skip(f"lighteval does not import next to the rest: {error}")
    pairs, expected = SEEN[name]
    assert [verdict for verdict, _ in verdicts_of(name, pairs)] == expected
