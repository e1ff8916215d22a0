"""The sandbox's supervisor with one isolation step silently disabled; the requested global says which."""

from __future__ import annotations

import json
import sys
from typing import Any

from trl_ext.discovery.sandbox import isolation, supervisor

mount, hidden_places = isolation._mount, isolation.hidden_places


def mount_no_proc(source: str, target: str, kind: str | None, *more: Any) -> None:
    if kind != "proc":
        mount(source, target, kind, *more)


def all_but_one() -> list[str]:
    return [place for place in hidden_places() if place != "/var/tmp"]


BROKEN: dict[str, tuple[str, Any]] = {
    "proc": ("_mount", mount_no_proc),
    "network": ("_NEWNET", 0),
    "hidden": ("hidden_places", all_but_one),
    "read_only": ("_read_only", lambda: None),
    "filter": ("forbid_calls", lambda: None),
    "capabilities": ("_drop_capabilities", lambda user: None),
}

if __name__ == "__main__":
    name, value = BROKEN[json.loads(sys.argv[1])["names"][0]]
    assert hasattr(isolation, name)
    setattr(isolation, name, value)
    supervisor.main()
