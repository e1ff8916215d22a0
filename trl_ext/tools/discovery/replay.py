"""An endpoint on this machine that answers with the answers of an earlier run: a whole run without a model.

Client, budget, sandbox, verifier and report are those of any run; only the model is not there.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trl_ext.tools.discovery.log import LogError, read_log

MODEL = "replay"


@contextlib.contextmanager
def replaying(log: Path) -> Iterator[str]:
    """The address of an endpoint that gives the answers of a log in turn, and from the first again; for the block.

    Raises:
        LogError: there are none in it.
    """
    answers = [e for e in read_log(log) if e["kind"] == "answer" and e["response"] is not None]
    if not answers:
        raise LogError(f"{log} has no answers to replay")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answers))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(answers: list[dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    lock, asked = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer in one piece: two would wait 40 ms for each other

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": ""}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                answer = answers[asked[0] % len(answers)]
                asked[0] += 1
            message = {"role": "assistant", "content": answer["response"]}
            choice = {"index": 0, "finish_reason": answer["finish_reason"], "message": message}
            usage = {name: answer[name] for name in ("prompt_tokens", "completion_tokens")}
            usage["total_tokens"] = sum(usage.values())
            head = {"id": "0", "object": "chat.completion", "created": 0, "model": MODEL}
            self._send({**head, "choices": [choice], "usage": usage})

        def _send(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
