"""The loop against a real OpenAI-compatible server: vLLM with the tests' tiny model, which knows 18 words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.discovery import PROBLEM, client, loop
from tests.support.tiny import tiny_model, tiny_tokenizer
from trl_ext.endpoint.budget import Budget
from trl_ext.endpoint.client import EndpointError, RequestFailed

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]  # tests/support/scripted_server.py answers as it does
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"  # the model has none of its own


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    config = {**tiny_model().config.to_dict(), "head_dim": 32}  # the least for which vLLM's CPU attention is compiled
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = f"--dtype float32 --enforce-eager --max-model-len 64 --host 127.0.0.1 --port {port}".split()
    command = [
        "timeout",
        "250",
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "tiny"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *arguments, "--served-model-name", "tiny", "--chat-template", str(folder / "chat.jinja")],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the engine's process, should it be left


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def test_a_run_of_several_requests_at_a_time(tmp_path: Path, server: str) -> None:
    asks = client(server, Budget(calls=6), max_tokens=8, timeout=60.0)
    asks.endpoint = replace(asks.endpoint, model=asks.models()[0])
    run = loop(tmp_path, asks, "best_of_n", concurrency=3, n=6)
    assert run.run() == "the strategy has nothing more to ask"
    answers = [
        e for e in json.loads((tmp_path / "conversation_log.json").read_text())["entries"] if e["kind"] == "answer"
    ]
    assert len(answers) == 6
    assert asks.endpoint.model == "tiny"
    assert all(not e["tokens_are_estimated"] and 1 <= e["completion_tokens"] <= 8 for e in answers)
    assert {e["prompt_tokens"] for e in answers} == {3}  # "Say a score."
    assert len({e["response"] for e in answers}) > 1  # sampled, not the same six times
    assert asks.budget.used_tokens == sum(3 + e["completion_tokens"] for e in answers)
    assert all(a.verdict is not None and not a.verdict.valid for a in run.attempts)


def test_refine_sends_the_verdict_in_turns_the_server_accepts(tmp_path: Path, server: str) -> None:
    asks = client(server, Budget(calls=3), max_tokens=2, timeout=60.0)
    asks.endpoint = replace(asks.endpoint, model="tiny")
    run = loop(tmp_path, asks, "refine", replace(PROBLEM, task="a b"), turns=1)
    run.run()
    roles = [[message["role"] for message in attempt.messages] for attempt in run.attempts]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    assert [attempt.error for attempt in run.attempts] == [""] * 3


def test_server_refusal_is_reported_with_its_message(server: str) -> None:
    asks = client(server, max_tokens=8, timeout=60.0)
    with pytest.raises(EndpointError, match=r"no model 'scripted' at http://127.0.0.1"):
        asks.ask([{"role": "user", "content": "a"}])
    asks.endpoint = replace(asks.endpoint, model="tiny")
    with pytest.raises(RequestFailed, match=r"refused the request: .*64"):
        asks.ask([{"role": "user", "content": "a " * 100}])
