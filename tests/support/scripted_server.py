"""An OpenAI-compatible server on this machine that answers from a script: programs, or the faults of real servers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One reply: a text, or whatever bytes and status a server at fault sends, perhaps late."""

    text: str | None = ""
    status: int = 200
    raw: bytes | None = None
    wait: float = 0.0
    finish_reason: str = "stop"
    headers: Mapping[str, str] = field(default_factory=dict)
    has_usage: bool = True

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        if self.status != 200:
            return json.dumps({"error": {"message": self.text or "no"}}).encode()
        choice = {
            "index": 0,
            "finish_reason": self.finish_reason,
            "message": {"role": "assistant", "content": self.text},
        }
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        more = {"usage": usage} if self.has_usage else {}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted"}
        return json.dumps({**head, "choices": [choice], **more}).encode()


@dataclass
class Server:
    """What the server was asked: bodies and headers of requests, and how many it had at a time."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def block(program: str) -> Answer:
    return Answer(f"Here it is:\n```python\n{program}\n```\n")


Script = Sequence[Answer] | Callable[[int, dict[str, Any]], Answer]


@contextlib.contextmanager
def serving(script: Script, models: Sequence[str] = ("scripted",)) -> Iterator[Server]:
    """A server for the block. `script`: the answers in turn, the last one for ever; or number and request to answer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one piece: two would wait 40 ms for each other

        def do_GET(self) -> None:
            listed = [{"id": name, "object": "model", "created": 1, "owned_by": "x"} for name in models]
            self._send(200, json.dumps({"object": "list", "data": listed}).encode(), {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            answer = script(number, body) if callable(script) else script[min(number, len(script) - 1)]
            time.sleep(answer.wait)
            with server.lock:
                server.at_once -= 1
            with contextlib.suppress(OSError):  # the client has given up
                self._send(answer.status, answer.body(), answer.headers)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(f"http://127.0.0.1:{http.server_port}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
