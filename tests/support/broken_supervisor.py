"""The sandbox's supervisor with one isolation step silently disabled; the requested global says which."""

from __future__ import annotations

import json
import sys
from typing import Any

from trl_ext.sandbox import filesystem, isolation, supervisor

mount, show = filesystem.mount, filesystem._show


def mount_no_proc(source: str, target: str, kind: str | None, *more: Any) -> None:
    if kind == "proc":
        raise PermissionError
    mount(source, target, kind, *more)


def show_more(path: str, root: str, shown: set[str]) -> None:
    show(path, root, shown)
    show("/etc/passwd", root, shown)


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "proc": (filesystem, "mount", mount_no_proc),
    "network": (isolation, "_NEWNET", 0),
    "more": (filesystem, "_show", show_more),
    "read_only": (filesystem, "_read_only", lambda: None),
    "filter": (isolation, "forbid_calls", lambda: None),
    "capabilities": (isolation, "_drop_capabilities", lambda user: None),
}

if __name__ == "__main__":
    module, name, value = BROKEN[json.loads(sys.argv[1])["names"][0]]
    assert hasattr(module, name)
    setattr(module, name, value)
    supervisor.main()
