"""Chromium without a window, steered by the DevTools protocol over a pipe, which is all of it that a test needs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()


class Page:
    """A tab; a script's exceptions and the policy's refusals are in `complaints`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        """A command's result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Network.requestWillBeSent"):
                self.complaints.append(json.dumps(answer["params"]))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is waited for. Runs whatever the page's policy says."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """The expression's value as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} is {value!r} after {seconds} s: {self.complaints}"
            time.sleep(0.02)
        return value

    def open(self, page: Path, state: str = "") -> None:
        """Show a file and wait until its script has drawn it."""
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=f"{page.resolve().as_uri()}#{state}")
        self.wait_for("document.documentElement?.dataset.openedMs")

    def press(self, *keys: str) -> None:
        """Keys as a keyboard sends them; letters too."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **_code(key))
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, **_code(key))

    def screenshot(self, path: Path, width: int, height: int, scheme: str) -> None:
        """A picture of the page at this size; `light` or `dark`."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))


def _code(key: str) -> dict[str, int]:
    codes = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
    number = (codes | {"ArrowDown": 40, "PageDown": 34, "PageUp": 33}).get(key)
    return {} if number is None else {"windowsVirtualKeyCode": number}


@contextlib.contextmanager
def chromium() -> Iterator[Page]:
    """A tab of a browser with an empty profile, which ends with the block."""
    assert PROGRAM is not None
    down, up = os.pipe(), os.pipe()  # to the browser's descriptor 3, from its 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *_QUIET, f"--user-data-dir={profile}"]
        shell = f'exec 3<&{down[0]} 4>&{up[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(down[0], up[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down[0])
        os.close(up[1])
        try:
            yield Page(down[1], up[0])
        finally:
            process.terminate()
            process.wait(30)
            os.close(down[1])
            os.close(up[0])
