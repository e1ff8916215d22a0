"""The endpoints of the Hub that a push and a download speak, on this machine, with everything kept in memory.

Uploads of large files go as LFS objects, the rest inside the commit, as the Hub has it. `failures` lets the next so
many requests of a kind fail.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "x" * 34
LARGE = (".safetensors", ".png", ".bin")


class Hub:
    """What has arrived: repositories, their files by path, LFS objects by hash, and requests by kind."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.commits: list[dict[str, Any]] = []
        self.requests: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.address = ""

    def sha(self, repository: str) -> str:
        return hashlib.sha1(f"{repository}{len(self.commits)}".encode()).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while length := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(length))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def answer(self, data: Any, status: int = 200, **headers: str) -> None:
            content = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def refused(self, kind: str) -> bool:
            """Count the request; fail it if that was asked for, or if it has no token."""
            hub.requests[kind] += 1
            data = self.body()
            self.data = data
            if hub.failures[kind]:
                hub.failures[kind] -= 1
                self.answer({"error": "broken"}, 500)
            elif kind != "put" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer({"error": "Invalid username or password."}, 401)
            else:
                return False
            return True

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/whoami-v2":
                if not self.refused("whoami"):
                    self.answer({"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
                if not self.refused("info"):
                    names = [{"rfilename": name} for name in hub.files[match[1]]]
                    self.answer(
                        {"id": match[1], "sha": hub.sha(match[1]), "siblings": names, "tags": [], "private": True}
                    )
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/.+", path):
                if not self.refused("tree"):
                    found = hub.files[match[1]]
                    self.answer(
                        [{"type": "file", "path": n, "size": len(d), "oid": git_oid(d)} for n, d in found.items()]
                    )
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                if self.refused("resolve"):
                    return
                data = hub.files.get(match[1], {}).get(match[2])
                if data is None:
                    self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
                else:
                    self.answer(data, ETag=f'"{git_oid(data)}"', X_Repo_Commit=hub.sha(match[1]))
            else:
                self.answer({"error": f"unknown {path}"}, 404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            if not self.refused("put"):
                hub.objects[hashlib.sha256(self.data).hexdigest()] = self.data
                self.answer({})

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api/repos/create":
                if not self.refused("create"):
                    asked = json.loads(self.data)
                    name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                    exists = name in hub.repositories
                    hub.repositories.setdefault(name, asked)
                    hub.files.setdefault(name, {})
                    self.answer({"url": f"{hub.address}/{name}", "name": name}, 409 if exists else 200)
            elif path == "/api/validate-yaml":
                if not self.refused("validate"):
                    self.answer({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/.+", path):
                if not self.refused("preupload"):
                    known = hub.files[match[1]]
                    self.answer({"files": [self.mode(f["path"], known) for f in json.loads(self.data)["files"]]})
            elif path.endswith(".git/info/lfs/objects/batch"):
                if not self.refused("batch"):
                    self.answer(
                        {"transfer": "basic", "objects": [self.action(o) for o in json.loads(self.data)["objects"]]}
                    )
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/.+", path):
                if not self.refused("commit"):
                    self.commit(match[1])
            else:
                self.answer({"error": f"unknown {path}"}, 404)

        def mode(self, path: str, known: dict[str, bytes]) -> dict[str, Any]:
            large = path.endswith(LARGE)
            found = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in known:
                found["oid"] = hashlib.sha256(known[path]).hexdigest() if large else git_oid(known[path])
            return found

        def action(self, asked: dict[str, Any]) -> dict[str, Any]:
            if asked["oid"] in hub.objects:
                return asked  # nothing to do
            return {**asked, "actions": {"upload": {"href": f"{hub.address}/objects/{asked['oid']}"}}}

        def commit(self, repository: str) -> None:
            lines = [json.loads(line) for line in self.data.splitlines()]
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    hub.files[repository][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[repository][value["path"]] = hub.objects[value["oid"]]
                    hub.large.add(value["path"])
            hub.commits.append({"repository": repository, "lines": lines})
            address = f"{hub.address}/{repository}/commit/{hub.sha(repository)}"
            self.answer({"success": True, "commitOid": hub.sha(repository), "commitUrl": address})

    return Handler


@contextlib.contextmanager
def local_hub() -> Iterator[Hub]:
    """A Hub at `address` while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
