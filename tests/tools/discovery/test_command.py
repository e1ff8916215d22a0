"""The command line: what it refuses, what a run leaves in its folder, and the recipes as people start them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from tests.support.discovery import PROBLEM
from tests.support.scripted_server import Answer, block, serving
from tests.tools.discovery.test_kissing_evaluator import CORE_PROGRAM
from trl_ext.registry import UnknownName, import_function
from trl_ext.tools.discovery.arguments import discover_parser
from trl_ext.tools.discovery.command import _budget, _check_same, _digest_of_verifier, discover, run
from trl_ext.tools.discovery.log import Log, LogError
from trl_ext.tools.discovery.report import one_line

ROOT = Path(__file__).parents[3]
check: Any = import_function(f"{ROOT / 'recipes' / 'golomb_ruler' / 'problem.py'}:check", "verifier")


ANSWERED = ["asked", "answer", "verdict"]


def parsed(folder: Path, url: str, *more: str) -> argparse.Namespace:
    common = ["--output_dir", str(folder), "--base_url", url, "--concurrency", "1"]
    return discover_parser({"toy": None}, "words", "runs/toy").parse_args([*common, *more])


@pytest.mark.moderate
def test_a_run_leaves_a_report_of_what_it_did_and_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    monkeypatch.setattr("trl_ext.tools.discovery.report._write_plot", lambda *_: None)  # it takes seconds; see below
    folder = tmp_path / "run"
    answers = [block("score 3 ok"), Answer("no"), block("crash | `x` <b>"), block("score 7"), Answer("x", status=400)]
    with serving(answers) as server:
        arguments = parsed(folder, server.url, "--max_calls", "5", "--api_key_env", "MY_KEY", "--note", "Scripted.")
        before = signal.getsignal(signal.SIGTERM)
        assert run(PROBLEM, arguments) == 0
        assert signal.getsignal(signal.SIGTERM) is before
        assert server.headers[0]["authorization"] == "Bearer sk-secret"
        assert server.bodies[0]["model"] == "scripted"  # the only one that the server has
    report = (folder / "report.md").read_text()
    assert "**Best valid: 3 points**, attempt 0, made by the answer:" in report
    assert "Scripted." in report
    assert "The run ended because of: the budget: all 5 calls are made" in report
    assert "| calls | 5 | 5 |\n| tokens | 480 | none |" in report
    for outcome in ("valid | 1", "a result, but not a valid one | 1", "the program gave no result | 1"):
        assert f"| {outcome} |" in report
    assert "| no program in the answer | 1 |\n| no answer from the endpoint | 1 |" in report
    rows = [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ") and "| the answer |" in line]
    assert rows == ["| 0", "| 3"]  # those that were better than all before
    prompts, _, reflection = report.partition("## Prompts")[2].partition("## Reflection")
    assert "The first, of attempt 0:\n\n```text\n" in prompts
    assert "Before the best score, attempt 3:" in prompts
    assert "The answer to it:\n\n````text\nHere it is:\n```python\nscore 7\n```\n````" in prompts
    assert "1 of 5 attempts gave a valid result.\nThe first valid score was 3, -1 (attempt 0), the best " in reflection
    assert "4 more attempts after it brought nothing better." in reflection
    entries = json.loads((folder / "conversation_log.json").read_text())["entries"]
    assert entries[0]["kind"] == "run"
    assert entries[-1]["reason"] == "the budget: all 5 calls are made"
    assert all(b"sk-secret" not in path.read_bytes() for path in folder.iterdir())


REFUSED: list[tuple[Sequence[str], type[Exception], str]] = [
    (["--strategy", "refne"], UnknownName, "unknown strategy 'refne'. Did you mean 'refine'?"),
    (["--strategy_options", "turn=3"], UnknownName, "Did you mean 'turns'?"),
    (["--strategy_options", "turns=x"], ValueError, "option 'turns' of strategy 'refine' must be int, got 'x'"),
    (["--strategy_options", "turns"], ValueError, "strategy_options 'turns' is neither"),
    (["--strategy_options", "turns=0"], ValueError, "chains and turns of at least 1"),
    (["--concurrency", "0"], ValueError, "must be at least 1"),
    (["--max_calls", "0"], ValueError, "max_calls must be positive, got 0"),
    (["--resume"], ValueError, "there is no conversation_log.json"),
    (["--base_url", ""], ValueError, "no endpoint: give --base_url or set OPENAI_BASE_URL"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_invalid_arguments_are_refused_before_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: type[Exception], words: str
) -> None:
    monkeypatch.setattr("trl_ext.tools.discovery.command._check_sandbox", lambda _: None)
    with pytest.raises(kind) as caught:
        run(PROBLEM, parsed(tmp_path, "http://127.0.0.1:9/v1", "--model", "m", *arguments))
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["_in_use"])


def test_log_is_read_after_the_folder_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> Any:
        with pytest.raises(Timeout):
            FileLock(tmp_path / "_in_use", timeout=0).acquire()
        raise LogError("it was locked")

    monkeypatch.setattr("trl_ext.tools.discovery.command._check_sandbox", lambda _: None)
    monkeypatch.setattr("trl_ext.tools.discovery.command.read_log", read)
    Log(tmp_path / "conversation_log.json", [])
    with pytest.raises(LogError, match="it was locked"):
        run(PROBLEM, parsed(tmp_path, "http://127.0.0.1:9/v1", "--model", "m", "--resume"))


def test_requests_in_flight_of_a_killed_process_count(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"kind": "asked", "id": 0, "calls": 1, "tokens": 50},
        {"kind": "answer", "id": 0, "calls": 1, "prompt_tokens": 20, "completion_tokens": 10},
        {"kind": "asked", "id": 1, "calls": 2, "tokens": 60},
        {"kind": "asked", "id": 1, "calls": 3, "tokens": 70},
        {"kind": "asked", "id": 2, "calls": 4, "tokens": 80},
        {"kind": "refused", "id": 2},
    ]
    budget = _budget(parsed(tmp_path, ""), entries)
    assert (budget.used_calls, budget.used_tokens) == (4, 30 + 60 + 70)


@pytest.mark.moderate
@pytest.mark.skipif(sys.platform != "linux", reason="PR_GET_DUMPABLE is Linux's")
def test_other_processes_of_the_user_cannot_read_api_keys() -> None:
    code = """if True:
        import ctypes, sys
        from trl_ext.tools.discovery.command import discover
        sys.argv = ["discover.py"]
        discover({"toy": lambda: sys.exit(f"dumpable: {ctypes.CDLL(None).prctl(3)}")}, None, "x")
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=ROOT).stderr
    assert said == "dumpable: 0\n"


def test_ctrl_c_before_the_loop_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_ext.tools.discovery.command.set_nondumpable", lambda: None)
    monkeypatch.setattr(sys, "argv", ["discover.py"])
    with pytest.raises(SystemExit) as ended:
        discover({"toy": interrupted}, None, "x")
    assert ended.value.code == 130


def test_several_served_models_are_listed_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_ext.tools.discovery.command._check_sandbox", lambda _: None)
    with (
        serving([Answer("x")], models=["a", "b"]) as server,
        pytest.raises(ValueError, match="serves: a, b; give --model"),
    ):
        run(PROBLEM, parsed(tmp_path, server.url))


@pytest.mark.nightly
@pytest.mark.slow
def test_resume_needs_the_same_settings_and_counts_spent_budget(tmp_path: Path) -> None:
    with serving([block("score 1 ok")]) as server:
        assert run(PROBLEM, parsed(tmp_path, server.url, "--max_calls", "2")) == 0
        with pytest.raises(ValueError, match="already has a run: --resume continues it"):
            run(PROBLEM, parsed(tmp_path, server.url))
        with pytest.raises(ValueError, match="has seed 0, not 1; give the same"):
            run(PROBLEM, parsed(tmp_path, server.url, "--resume", "--seed", "1"))
        with pytest.raises(ValueError, match="has strategy 'refine', not 'islands'"):
            run(PROBLEM, parsed(tmp_path, server.url, "--resume", "--strategy", "islands"))
        assert run(PROBLEM, parsed(tmp_path, server.url, "--max_calls", "3", "--resume")) == 0
    assert len(server.bodies) == 3
    kinds = [entry["kind"] for entry in json.loads((tmp_path / "conversation_log.json").read_text())["entries"]]
    assert kinds == ["run", *ANSWERED, *ANSWERED, "ended", "resumed", *ANSWERED, "ended"]
    assert "| calls | 3 | 3 |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "score.png").stat().st_size > 5000


@pytest.mark.moderate
def test_a_run_is_replayed_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_ext.tools.discovery.report._write_plot", lambda *_: None)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    answers = [block("score 3 ok"), Answer("```python\nwhile", finish_reason="length"), block("score 5 ok")]
    with serving(answers) as server:
        assert run(PROBLEM, parsed(tmp_path / "run", server.url, "--max_calls", "3")) == 0
    log = tmp_path / "run" / "conversation_log.json"
    monkeypatch.setattr(sys, "argv", ["discover.py", "--replay", str(log), "--output_dir", str(tmp_path / "again"),
                                      "--max_calls", "3", "--concurrency", "1"])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        discover({"toy": lambda: PROBLEM}, "words", "runs/toy")
    assert ended.value.code == 0
    first, again = ((tmp_path / name / "report.md").read_text() for name in ("run", "again"))
    assert "**Best valid: 5 points**, attempt 2" in again
    assert "Answers cut off at --max_tokens 16384: 1. Give a model that thinks more of them" in again
    assert first.partition("## Reflection")[2] == again.partition("## Reflection")[2]
    Log(tmp_path / "empty.json", [])
    monkeypatch.setattr(sys, "argv", ["discover.py", "--replay", str(tmp_path / "empty.json")])
    with pytest.raises(SystemExit, match=r"error: .*empty.json has no answers to replay"):
        discover({"toy": lambda: PROBLEM}, "words", "runs/toy")


def test_required_isolation_that_is_missing_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_ext.sandbox.limits import ProgramResult

    monkeypatch.setattr(
        "trl_ext.tools.discovery.command.run_program", lambda *_: ProgramResult({}, "", 0.0, ("network",))
    )
    with pytest.raises(ValueError, match="--require_isolation: not in force here: processes, files, rights"):
        run(PROBLEM, parsed(tmp_path, "http://127.0.0.1:9/v1", "--model", "m", "--require_isolation"))


def test_one_line_keeps_both_ends_and_drops_control_characters() -> None:
    assert one_line("a\n\x1b[2Jb", 100) == "a [2Jb"
    short = one_line("x" * 200 + "end", 50)
    assert len(short) <= 50
    assert short.endswith("end")


# The recipes


def start(recipe: str, folder: Path, url: str, *more: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "recipes" / recipe / "discover.py"), "--output_dir", str(folder)]
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "sk-secret"}
    return subprocess.Popen(
        [*command, *more], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings
    )


@pytest.mark.slow
def test_kissing_recipe_finds_and_shows_the_result_of_the_script(tmp_path: Path) -> None:
    worse = CORE_PROGRAM + "points.append([3, 3, 3, 0, 0, 0, 0, 0, 0, 3, 0])"
    with serving([block("points = [[1.0] * 11]"), block(worse), block(CORE_PROGRAM)]) as server:
        done = start("kissing_number", tmp_path / "run", server.url, "--max_calls", "3")
        said = done.communicate(timeout=100)[0]
    assert done.returncode == 0, said
    assert "valid: 496 points, minimum" in said
    assert "best valid: 496, -1" in said
    told = server.bodies[1]["messages"][-1]["content"]
    assert told.startswith("The verifier says: points[0][0] must be an integer, got the float '1.0'")
    assert "minimum squared distance" in server.bodies[2]["messages"][-1]["content"]
    evaluator = ROOT / "recipes" / "kissing_number" / "evaluator.py"
    again = subprocess.run([sys.executable, evaluator, tmp_path / "run" / "best.py"], capture_output=True, timeout=60)
    assert again.returncode == 0
    assert "sk-secret" not in said


@pytest.mark.slow
def test_model_written_polisher_is_run_on_core_and_movable() -> None:
    problem = import_function(f"{ROOT / 'recipes' / 'kissing_number' / 'polisher_problem.py'}:polisher", "problem")()
    nothing = problem.verify("def polish(core, movable, *, seed, seconds): return None")
    assert (nothing.valid, nothing.score[0]) == (True, 496)
    extra = "def polish(core, movable, *, seed, seconds):\n    assert core.shape == (496, 11) and movable.shape == (98, 11)\n"
    assert problem.verify(extra + "    return core[:100] * 5").score[0] == 100
    ended = problem.verify("from fractions import Fraction\npoints = [[1] + [0] * 10]\npolished = ['', points]\nexit()")
    assert (ended.valid, ended.message.split(";")[0]) == (False, "the program ended before `polish` was called")
    assert "name 'polish' is not defined" in problem.verify("x = 1").message


@pytest.mark.slow
def test_ctrl_c_leaves_a_report_no_process_and_a_resumable_run(tmp_path: Path) -> None:
    with serving([block("marks = [0, 1, 3]"), Answer("late", wait=2.0)]) as server:
        more = ["--max_calls", "9", "--concurrency", "1"]
        running = start("golomb_ruler", tmp_path, server.url, *more, start_new_session=True)
        until = time.monotonic() + 60
        while len(server.bodies) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate(timeout=60)[0]
    assert running.returncode == 130, said
    assert "waiting for 1 answers" in said
    assert "run the same command with --resume" in said
    assert "Traceback" not in said
    assert len(json.loads((tmp_path / "conversation_log.json").read_text())["entries"]) == 8
    assert "**Best valid: 3 marks**" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["kissing_number", "golomb_ruler"])
def test_help_lists_strategies_and_show_prompt_prints_the_task(recipe: str) -> None:
    command = [sys.executable, str(ROOT / "recipes" / recipe / "discover.py")]
    said = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    for words in (
        "refine        Conversations",
        "chains=1, turns=3",
        "n=16",
        "--max_calls",
        "--resume",
        "OPENAI_API_KEY",
        f"recipes/{recipe}/discover.py",
    ):
        assert words in said
    prompt = subprocess.run([*command, "--show_prompt"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "```python" in prompt


@pytest.mark.parametrize(
    ("marks", "valid", "message"),
    [
        ([0, 1, 4, 9, 11], True, "5 marks on a length of 11"),
        ([11, 9, 4, 1, 0], True, "5 marks on a length of 11"),
        ([0, 1, 2], False, "the difference 1 is there twice: (0, 1) and (1, 2)"),
        ([0, 3, 3], False, "the difference 0 is there twice: (3, 3) and (3, 3)"),
        ([3, 3], False, "the difference 0 is there twice"),
        ([0, 101], False, "marks[1] must be an integer from 0 to 100, got '101'"),
        ([0, True], False, "marks[1] must be an integer"),
        ([0, 1.0], False, "got '1.0'"),
        ([1], False, "a list of 2 to 200 integers"),
        ("01", False, "a list of 2 to 200 integers"),
    ],
)
def test_the_ruler_is_judged_exactly(marks: Any, valid: bool, message: str) -> None:
    verdict = check(marks)
    assert verdict.valid is valid
    assert message in verdict.message
    assert verdict.score == ((len(marks), -11) if valid else ())


@pytest.mark.moderate
def test_run_is_not_resumed_with_another_verifier(tmp_path: Path) -> None:
    path, found = tmp_path / "verifier.py", []
    for text in ("def verify(program):\n    return 1\n", "def verify(program):\n    return 2\n"):
        path.write_text(text)
        found.append(_digest_of_verifier(partial(import_function(f"{path}:verify", "verifier"))))
    assert found[0] != found[1]
    with pytest.raises(LogError, match=f"has judged_by '{found[0]}', not '{found[1]}'; give the same"):
        _check_same({"judged_by": found[1]}, [{"kind": "run", "judged_by": found[0]}], tmp_path)
    _check_same({"judged_by": found[1]}, [{"kind": "run"}], tmp_path)  # of an earlier version
