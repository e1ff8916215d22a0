"""The client asks any OpenAI-compatible server, survives its faults, keeps to the budget, and shows the key to nobody."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.support.discovery import client
from tests.support.scripted_server import Answer, serving
from trl_ext.endpoint.budget import Budget, BudgetSpent
from trl_ext.endpoint.client import Endpoint, EndpointError, Reply, RequestFailed

MESSAGES = [{"role": "user", "content": "Say a score."}]
GOOD = Answer("fine")


def ask(script: Any, budget: Budget | None = None, **settings: Any) -> tuple[Reply, Any]:
    with serving(script) as server:
        asks = client(server.url, budget, **settings)
        asks.budget.take(asks.most_tokens(MESSAGES))
        return asks.ask(MESSAGES), server


def test_client_sends_the_settings_and_reads_text_and_tokens() -> None:
    settings: dict[str, Any] = {"max_tokens": 7, "temperature": 0.5, "extra_body": {"top_k": 3}, "key": "sk-secret"}
    reply, server = ask([Answer("fine", finish_reason="length")], **settings)
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == (
        "fine",
        "length",
        100,
        20,
    )
    (body,) = server.bodies
    assert body == {"model": "scripted", "messages": MESSAGES, "max_tokens": 7, "temperature": 0.5, "top_k": 3}
    assert server.headers[0]["authorization"] == "Bearer sk-secret"


FAULTS = {
    "429": Answer("slow down", status=429),
    "500": Answer("oh", status=500),
    "503": Answer("oh", status=503),
    "not json": Answer(raw=b"<html>"),
    "half of it": Answer(raw=b'{"choices": [{"mess'),
    "no choices": Answer(raw=b'{"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}'),
    "another object": Answer(raw=b"[1, 2]"),
    "empty": Answer(raw=b""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_may_pass_is_tried_again(fault: str) -> None:
    reply, server = ask([FAULTS[fault], FAULTS[fault], GOOD])
    assert reply.text == "fine"
    assert reply.tries == len(server.bodies) == 3


@pytest.mark.slow
def test_a_server_that_is_too_late_is_tried_again() -> None:
    reply, _ = ask([Answer("late", wait=2.0), GOOD], timeout=1.0)
    assert (reply.text, reply.tries, reply.prompt_tokens) == ("fine", 2, 104)


@pytest.mark.moderate
def test_client_honors_retry_after_within_the_run_time() -> None:
    began = time.monotonic()
    ask([Answer(status=429, headers={"Retry-After": "0.2"}), GOOD])
    assert 0.2 <= time.monotonic() - began < 2
    budget = Budget(seconds=0.3)
    with pytest.raises(RequestFailed, match=r"the time of 0\.3 s is over"):
        ask([Answer(status=429, headers={"Retry-After": "50"}), GOOD], budget)
    assert time.monotonic() - began < 4


def test_waits_grow_and_are_given_up_after_the_tries() -> None:
    budget = Budget(calls=10)
    with serving([Answer("down", status=500)]) as server:
        asks = client(server.url, budget, tries=3)
        budget.take(asks.most_tokens(MESSAGES))
        with pytest.raises(RequestFailed, match=r"no answer after 3 tries: .*down"):
            asks.ask(MESSAGES)
    assert len(server.bodies) == budget.used_calls == 3
    assert budget.reserved == budget.used_tokens == 0


def test_tries_again_count_as_calls() -> None:
    with pytest.raises(RequestFailed, match="not tried again: all 2 calls are made"):
        ask([Answer(status=500)], Budget(calls=2))


def test_no_request_waits_for_a_retry_when_the_run_has_stopped() -> None:
    with serving([Answer(status=429, headers={"Retry-After": "50"})]) as server:
        asks = client(server.url)
        threading.Timer(0.1, asks.stopped.set).start()
        began = time.monotonic()
        with pytest.raises(RequestFailed):
            asks.ask(MESSAGES)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "refuses the key"), (403, "refuses the key"), (404, "no model 'scripted' at http://127.0.0.1")],
)
def test_permanent_error_ends_the_run_and_says_what_to_change(status: int, words: str) -> None:
    with pytest.raises(EndpointError, match=words):
        ask([Answer("no", status=status), GOOD])


def test_a_request_that_is_too_long_is_given_up_alone() -> None:
    with pytest.raises(RequestFailed, match=r"refused the request: .*maximum context length"):
        ask([Answer("maximum context length is 512", status=400), GOOD])


def test_unreachable_server_is_named_without_its_password() -> None:
    asks = client("http://user:pass@127.0.0.1:9/v1?token=abc", tries=1)
    with pytest.raises(RequestFailed, match=r"refused at http://127.0.0.1:9/v1\)"):
        asks.ask(MESSAGES)


def test_the_key_is_in_no_error_and_no_repr() -> None:
    with serving([Answer("your key sk-secret is wrong", status=401)]) as server:
        asks = client(server.url, key="sk-secret")
        with pytest.raises(EndpointError) as caught:
            asks.ask(MESSAGES)
    assert "sk-secret" not in str(caught.value)
    assert "your key [key] is wrong" in str(caught.value)
    assert "sk-secret" not in repr(asks.endpoint)
    assert caught.value.__cause__ is None


def test_tokens_are_estimated_where_the_server_reports_none() -> None:
    reply, _ = ask([Answer("x" * 300, has_usage=False)])
    assert (reply.completion_tokens, reply.is_estimated) == (100, True)


def test_broken_reply_counts_prompt_tokens_and_refusal_does_not() -> None:
    prompt = len(MESSAGES[0]["content"]) // 3
    for fault, cost in (("not json", prompt), ("no choices", prompt), ("500", 0)):
        budget = Budget(calls=9)
        reply, _ = ask([FAULTS[fault], GOOD], budget)
        assert (reply.prompt_tokens, budget.used_tokens, budget.reserved) == (100 + cost, 120 + cost, 0)
    with pytest.raises(RequestFailed) as caught:
        ask([FAULTS["not json"]], tries=2)
    assert (caught.value.tokens, caught.value.tries) == (2 * prompt, 2)


def test_no_prompt_has_more_tokens_than_are_reserved_for_it() -> None:
    asks = client("http://127.0.0.1:9/v1", max_tokens=7)
    assert asks.most_tokens([{"content": "\N{SNOWMAN}" * 100}] * 2) >= 2 * (300 + 5) + 7


def test_what_cannot_be_sent_is_not_tried_again() -> None:
    with serving([GOOD]) as server, pytest.raises(RequestFailed, match="cannot be sent"):
        client(server.url).ask([{"role": "user", "content": "\ud800"}])
    assert server.bodies == []


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_the_server_separates_is_kept(name: str) -> None:
    raw = json.dumps({"choices": [{"message": {"content": "fine", name: "hm"}, "finish_reason": "stop"}]}).encode()
    reply, _ = ask([Answer(raw=raw)])
    assert (reply.text, reply.reasoning) == ("fine", "hm")


def test_a_message_without_content_is_an_empty_answer() -> None:
    assert ask([Answer(None)])[0].text == ""


def test_models_are_listed() -> None:
    with serving([GOOD], models=["a", "b"]) as server:
        assert client(server.url).models() == ["a", "b"]
    with pytest.raises(EndpointError, match="does not list its models"):
        client(server.url).models()


# The budget


def test_token_budget_holds_with_requests_in_flight() -> None:
    budget = Budget(tokens=250)
    budget.take(100)
    budget.take(100)
    with pytest.raises(BudgetSpent, match="0 of 250 tokens are used, 200 are reserved"):
        budget.take(100)
    budget.settle(100, 30)
    budget.settle(100, 50)
    budget.take(100)
    assert (budget.used_calls, budget.used_tokens, budget.reserved) == (3, 80, 100)


def test_earlier_processes_of_the_run_count() -> None:
    with pytest.raises(BudgetSpent, match="all 2 calls"):
        Budget(calls=2, used_calls=2).take(1)
    with pytest.raises(BudgetSpent, match="the time of 10 s"):
        Budget(seconds=10, seconds_before=10).take(1)
    assert Budget(seconds=10, seconds_before=4).seconds_left() == pytest.approx(6, abs=0.1)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_calls must be positive, got 0"):
        Budget(calls=0)


def test_shown_url_of_a_plain_address_is_the_address() -> None:
    assert Endpoint("http://localhost:8000/v1", "m").shown_url == "http://localhost:8000/v1"
