"""Between a trainer and a real server: a proxy that passes HTTP on until it has a fault."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

GENERATES = "/inference/v1/generate", "/v1/completions"
FINE, BUSY, GONE = 200, 503, 0  # the fate of a request


class Link:
    """A proxy of the server at `url`.

    Args:
        fault: from the number of a request for a completion, from 0, its fate; it may take its time.
    """

    def __init__(self, url: str, fault: Callable[[int], int]) -> None:
        self.to, self.fault, self.asked = url, fault, 0
        link, counting = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            """One connection, one request."""

            def log_message(self, *args: object) -> None:
                """Say nothing."""

            def pass_on(self) -> None:
                """Have the server answer, unless this is a request for a completion that has a fault."""
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fate = FINE
                if self.path.startswith(GENERATES):
                    with counting:
                        number, link.asked = link.asked, link.asked + 1
                    fate = link.fault(number)
                if fate == GONE:
                    return  # closes the connection
                status, content, kind = BUSY, b"{}", "application/json"
                if fate == FINE:
                    kept = {"Content-Type": self.headers.get("Content-Type") or kind}
                    answer = requests.request(self.command, link.to + self.path, data=body, headers=kept, timeout=60)
                    status, content = answer.status_code, answer.content
                    kind = answer.headers.get("Content-Type", kind)
                with contextlib.suppress(OSError):  # who asked may have gone
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST = pass_on  # noqa: N815

        self.proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.proxy.daemon_threads, self.proxy.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.proxy.server_port}"


@contextlib.contextmanager
def linked(url: str, fault: Callable[[int], int]) -> Iterator[Link]:
    """A proxy that is closed at the end of the block."""
    link = Link(url, fault)
    threading.Thread(target=link.proxy.serve_forever, daemon=True).start()
    try:
        yield link
    finally:
        link.proxy.shutdown()
        link.proxy.server_close()


def slow(number: int) -> int:
    """Every answer a fifth of a second late."""
    time.sleep(0.2)
    return FINE


def between(first: int, last: int, fate: int) -> Callable[[int], int]:
    """The fate of the requests from `first` to `last`; all others are answered."""
    return lambda number: fate if first <= number <= last else FINE


def silent_from(first: int) -> Callable[[int], int]:
    """Accepts requests and answers none."""

    def fault(number: int) -> int:
        if number >= first:
            time.sleep(20)
            return GONE
        return FINE

    return fault
