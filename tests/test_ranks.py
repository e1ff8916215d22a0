"""What the ranks of a training tell each other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_ext import ranks


@pytest.mark.parametrize(("is_main", "found"), [(True, "ours"), (False, "theirs")])
def test_finding_of_the_main_process_is_every_ranks(is_main: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(is_main_process=is_main, num_processes=1)
    monkeypatch.setattr(ranks, "PartialState", lambda: state)
    monkeypatch.setattr(ranks, "broadcast_object_list", lambda mine: mine if mine != [None] else ["theirs"])
    assert ranks.run_on_main_and_broadcast(lambda: "ours") == found
