"""The loop against a scripted server: what is asked, judged, kept and resumed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.discovery import PROBLEM, client, loop, verify
from tests.support.scripted_server import Answer, block, serving
from trl_ext.endpoint.budget import Budget
from trl_ext.endpoint.client import EndpointError
from trl_ext.tools.discovery.log import Log, LogError, attempts_of, read_log
from trl_ext.tools.discovery.problem import Polished, Verdict


def log_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "conversation_log.json").read_text())["entries"]


def test_run_logs_everything_and_keeps_its_best_valid_program(tmp_path: Path) -> None:
    answers = [block("score 1 ok"), block("score 9"), Answer("none"), block("score 3 ok"), block("score 2 ok")]
    with serving(answers) as server:
        run = loop(tmp_path, client(server.url, Budget(calls=5)))
        assert run.run() == "the budget: all 5 calls are made"
    entries = log_of(tmp_path)
    assert [e["kind"] for e in entries] == ["run", *["asked", "answer", "verdict"] * 5]
    assert [e["messages"] for e in entries if e["kind"] == "answer"] == [body["messages"] for body in server.bodies]
    assert "The verifier says: it says 9" in server.bodies[2]["messages"][-1]["content"]
    assert (tmp_path / "best.py").read_text() == "# Attempt 3, made by the answer. it says 3 and ok\nscore 3 ok\n"
    assert run.client.budget.used_tokens == 5 * 120


def test_requests_overlap_up_to_the_concurrency(tmp_path: Path) -> None:
    with serving([replace(block("score 1 ok"), wait=0.05)]) as server:
        loop(tmp_path, client(server.url), "best_of_n", concurrency=4, n=8).run()
    assert len(server.bodies) == 8
    assert server.most_at_once == 4


def test_an_answer_is_on_the_disk_before_its_program_runs(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(program: str) -> Verdict:
        seen.append(sum(e["kind"] == "answer" for e in log_of(tmp_path)))
        return verify(program)

    with serving([block("score 1")]) as server:
        loop(tmp_path, client(server.url), "single", replace(PROBLEM, verify=look)).run()
    assert seen == [1]


def test_killed_run_judges_received_answers_and_pays_only_once(tmp_path: Path) -> None:
    with serving([block("score 1 ok"), block("score 2 ok"), block("score 3 ok")]) as server:
        loop(tmp_path, client(server.url, Budget(calls=2))).run()
        path = tmp_path / "conversation_log.json"
        lines = path.read_bytes().split(b"\n")
        path.write_bytes(b"\n".join(lines[:7]) + b"\n" + lines[7][:50])  # killed while it wrote the second verdict
        run = loop(tmp_path, client(server.url, Budget(calls=3, used_calls=2)))
        run.run()
    assert len(server.bodies) == 3
    assert [a.id for a in run.attempts] == [0, 1, 2]
    assert [a.score[0] for a in run.attempts] == [1, 2, 3]
    ids = [e["id"] for e in log_of(tmp_path) if e["kind"] == "verdict"]
    assert ids == [0, 1, 2]


def test_a_resumed_run_asks_what_the_whole_one_would_have(tmp_path: Path) -> None:
    def answer(number: int, _: Any) -> Answer:
        return block(f"score {(number * 7) % 5} ok # {number}")

    options: dict[str, Any] = {"islands": 2, "migrate_every": 2, "explore": 0.3}
    asked = []
    for parts in ([7], [3, 7]):
        folder = tmp_path / str(len(parts))
        folder.mkdir()
        with serving(answer) as server:
            used = 0
            for calls in parts:
                budget = Budget(calls=calls, used_calls=used)
                loop(folder, client(server.url, budget), "islands", concurrency=1, **options).run()
                used = calls
        asked.append([body["messages"] for body in server.bodies])
    assert asked[0] == asked[1]
    assert len({json.dumps(messages) for messages in asked[0]}) > 2


def test_the_same_program_is_judged_once(tmp_path: Path) -> None:
    judged: list[str] = []

    def count(program: str) -> Verdict:
        judged.append(program)
        return verify(program)

    with serving([block("score 1 ok")]) as server:
        run = loop(tmp_path, client(server.url, Budget(calls=3)), problem=replace(PROBLEM, verify=count))
        run.run()
    assert len(judged) == 1
    assert [a.score for a in run.attempts] == [(1, -1)] * 3
    assert "the same program as in attempt 0: it says 1" in server.bodies[2]["messages"][-1]["content"]


def test_hybrid_keeps_the_polished_program_and_both_verdicts(tmp_path: Path) -> None:
    with serving([block("score 4"), block("nothing")]) as server:
        run = loop(tmp_path, client(server.url, Budget(calls=2)), "hybrid", concurrency=1)
        run.run()
    first, second = run.attempts
    assert first.verdict is not None
    assert first.polished is not None
    assert (first.verdict.valid, first.polished.valid, first.score) == (False, True, (4.5, -1))
    assert (second.polished, second.polish_note) == (None, "nothing to polish")
    assert (tmp_path / "programs" / "0000_finished.py").read_text() == "score 4.5 ok"
    assert "by the numeric method from the program of the answer" in (tmp_path / "best.py").read_text()
    again = attempts_of(read_log(tmp_path / "conversation_log.json"))
    assert [(a.verdict, a.polished, a.polish_note) for a in again] == [
        (a.verdict, a.polished, a.polish_note) for a in run.attempts
    ]


def test_one_request_without_an_answer_costs_itself_only(tmp_path: Path) -> None:
    with serving([Answer("too long", status=400), block("score 1 ok")]) as server:
        run = loop(tmp_path, client(server.url, Budget(calls=2)))
        run.run()
    assert [a.error != "" for a in run.attempts] == [True, False]
    assert log_of(tmp_path)[2]["error"].startswith("the endpoint refused the request")


def test_endpoint_that_answers_nothing_ends_the_run_early(tmp_path: Path) -> None:
    with serving([Answer("too long", status=400)]) as server:
        with pytest.raises(EndpointError, match=r"5 requests in a row got no answer; the last: .*too long"):
            loop(tmp_path, client(server.url, Budget(calls=50)), concurrency=1).run()
        assert len(server.bodies) == 5


def test_incorrect_key_ends_the_run_and_a_resumed_one_asks_again(tmp_path: Path) -> None:
    with serving([block("score 1 ok"), Answer("no", status=401), block("score 2 ok")]) as server:
        with pytest.raises(EndpointError, match="refuses the key"):
            loop(tmp_path, client(server.url, Budget(calls=4)), concurrency=1).run()
        run = loop(tmp_path, client(server.url, Budget(calls=1)), concurrency=1)
        run.run()
    assert [(a.id, a.score[0]) for a in run.attempts] == [(0, 1), (1, 2)]


def test_verifier_fault_is_raised_and_costs_no_answer(tmp_path: Path) -> None:
    def broken(program: str) -> Verdict:
        raise ZeroDivisionError("in the verifier")

    with serving([block("score 1 ok")]) as server:
        with pytest.raises(ZeroDivisionError):
            loop(tmp_path, client(server.url), "single", replace(PROBLEM, verify=broken)).run()
        run = loop(tmp_path, client(server.url), "single")
        run.run()
    assert len(server.bodies) == 1
    assert run.attempts[0].score == (1, -1)


def test_interrupted_run_waits_for_requests_in_flight(tmp_path: Path) -> None:
    with serving([replace(block("score 1 ok"), wait=0.3)]) as server:
        run = loop(tmp_path, client(server.url), "best_of_n", concurrency=2)
        threading.Timer(0.1, run.interrupt).start()
        assert run.run() == "interrupted"
    assert len(server.bodies) == 2
    assert [a.score for a in run.attempts] == [(1, -1)] * 2


def test_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    with serving([replace(block("score 1 ok"), wait=1.0)]) as server:
        run = loop(tmp_path, client(server.url), "best_of_n", concurrency=2)
        began = time.monotonic()
        for _ in range(2):
            threading.Timer(0.1, run.interrupt).start()
        assert run.run() == "interrupted"
        assert time.monotonic() - began < 0.8


def test_a_key_that_the_model_repeats_is_written_nowhere(tmp_path: Path) -> None:
    with serving([block("score 1 ok # sk-secret")]) as server:
        loop(tmp_path, client(server.url, Budget(calls=2), key="sk-secret")).run()
    assert all(b"sk-secret" not in path.read_bytes() for path in tmp_path.iterdir())
    assert "score 1 ok # [key]" in (tmp_path / "best.py").read_text()


def test_keys_and_half_characters_are_never_written_or_sent_on(tmp_path: Path) -> None:
    def shows(program: str) -> Verdict:
        return Verdict(False, (), "ValueError: sk-secret \ud800", {"program_output": ["sk-secret"]})

    def polishes(*_: Any) -> Polished:
        return Polished("score 1 ok # sk-secret", Verdict(True, (1,), "sk-secret \ud800"))

    problem = replace(PROBLEM, verify=shows, polish=polishes)
    for strategy in ("refine", "hybrid"):
        folder = tmp_path / strategy
        folder.mkdir()
        with serving([block("score 1 ok # \ud800")]) as server:
            run = loop(folder, client(server.url, Budget(calls=2), key="sk-secret"), strategy, problem)
            assert run.run() == "the budget: all 2 calls are made"
        assert all(b"sk-secret" not in path.read_bytes() for path in folder.rglob("*.*"))
        assert "sk-secret" not in json.dumps(server.bodies)
        if strategy == "refine":
            assert "The verifier says: ValueError: [key] ?" in server.bodies[1]["messages"][-1]["content"]


@pytest.mark.moderate
def test_requests_in_flight_are_logged_before_an_error_ends_run(tmp_path: Path) -> None:
    def answer(number: int, _: Any) -> Answer:
        return Answer("no", status=401) if number == 0 else replace(block("score 1 ok"), wait=0.5)

    with serving(answer) as server:
        run = loop(tmp_path, client(server.url), "best_of_n", concurrency=2)
        with pytest.raises(EndpointError, match="refuses the key"):
            run.run()
    assert [a.score for a in run.attempts] == [(1, -1)]
    assert sorted(e["kind"] for e in log_of(tmp_path)) == ["answer", "asked", "asked", "refused", "run", "verdict"]


def test_tokens_that_are_only_reserved_do_not_end_the_run(tmp_path: Path) -> None:
    with serving([block("score 1 ok")]) as server:
        asks = client(server.url)
        most = asks.most_tokens([{"content": PROBLEM.task}])
        asks.budget.tokens = most + 2 * 120  # for a third request once two are known to have taken less
        run = loop(tmp_path, asks, "best_of_n", concurrency=2, n=4)
        assert run.run().startswith(f"the budget: 360 of {most + 240} tokens are used")
    assert len(server.bodies) == 3
    assert [(e["calls"], e["tokens"]) for e in log_of(tmp_path) if e["kind"] == "asked"] == [
        (1, most), (2, most), (3, most)
    ]  # fmt: skip


@pytest.mark.moderate
def test_programs_unverified_at_timeout_are_left_for_resume(tmp_path: Path) -> None:
    budget, end = Budget(seconds=3600), threading.Event()

    def slow(program: str) -> Verdict:
        budget.seconds = 0.001
        end.wait(60)
        return verify(program)

    with serving([block("score 1 ok")]) as server:
        run = loop(tmp_path, client(server.url, budget), "single", replace(PROBLEM, verify=slow))
        began = time.monotonic()
        assert run.run() == "the budget: the time is over"
        assert time.monotonic() - began < 30
        end.set()
        assert run.attempts[0].is_pending
        again = loop(tmp_path, client(server.url), "single")
        again.run()
    assert again.attempts[0].score == (1, -1)
    assert len(server.bodies) == 1


def test_resumed_run_writes_the_best_program_missed_by_a_kill(tmp_path: Path) -> None:
    def unsaid(program: str) -> Verdict:
        return replace(verify(program), message="")

    for strategy, problem in (("single", replace(PROBLEM, verify=unsaid)), ("hybrid", PROBLEM)):
        folder = tmp_path / strategy
        folder.mkdir()
        with serving([block("score 1 ok")]) as server:
            loop(folder, client(server.url, Budget(calls=1)), strategy, problem).run()
            written = (folder / "best.py").read_text()
            (folder / "best.py").unlink()
            loop(folder, client(server.url, Budget(calls=1, used_calls=1)), strategy, problem).run()
        assert (folder / "best.py").read_text() == written
        assert written.splitlines()[1].startswith("score 1")


# The log


def test_every_text_of_an_entry_is_redacted(tmp_path: Path) -> None:
    Log(tmp_path / "log.json", [], lambda text: text.replace("key", "-")).add("key", key=["a key", {"b": "key"}, 1])
    assert json.loads((tmp_path / "log.json").read_text())["entries"] == [
        {"kind": "key", "key": ["a -", {"b": "-"}, 1]}
    ]


@pytest.mark.parametrize("torn", [0, 1, 3, 20, 60])
def test_torn_log_loses_at_most_its_last_entry(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "log.json"
    log = Log(path, [])
    for number in range(3):
        log.add("answer", number=number, text="line\nend\u2028 é ```")
    data = path.read_bytes()
    assert json.loads(data)["entries"][2]["number"] == 2
    path.write_bytes(data[: len(data) - torn])
    entries = read_log(path)
    assert [e["number"] for e in entries] == ([0, 1, 2] if torn <= 3 else [0, 1])
    Log(path, entries).add("answer", number=3)
    assert json.loads(path.read_bytes())["entries"][-1]["number"] == 3


def test_a_log_broken_in_the_middle_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text('[\n{"kind": "run"},\n{"kind"\n,{"kind": "ended"}\n]\n')
    with pytest.raises(LogError, match=r"log.json, entry 2: "):
        read_log(path)


def test_an_empty_log_is_valid_json(tmp_path: Path) -> None:
    Log(tmp_path / "log.json", [])
    assert json.loads((tmp_path / "log.json").read_text())["entries"] == []
    assert read_log(tmp_path / "log.json") == []
