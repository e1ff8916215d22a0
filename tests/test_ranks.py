"""What the ranks of a training tell each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_ext import ranks


@pytest.mark.parametrize(("is_main", "found"), [(True, "ours"), (False, "theirs")])
def test_finding_of_the_main_process_is_every_ranks(is_main: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(is_main_process=is_main, num_processes=1)
    monkeypatch.setattr(ranks, "PartialState", lambda: state)
    monkeypatch.setattr(
        ranks, "broadcast_object_list", lambda mine: mine if mine != [None, [None]] else [None, ["theirs"]]
    )
    assert ranks.run_on_main_and_broadcast(lambda: "ours") == found


@pytest.mark.parametrize("error", [None, KeyError("x")])
def test_ranks_without_an_error_send_no_text(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    state = SimpleNamespace(process_index=0, num_processes=2, device="cpu")
    monkeypatch.setattr(ranks, "PartialState", lambda: state)
    monkeypatch.setattr(ranks, "gather", lambda has_error: torch.cat([has_error, has_error]))
    monkeypatch.setattr(ranks, "gather_object", lambda told: sent.append(told) or told * 2)
    if error is None:
        ranks.raise_everywhere(error)
    else:
        with pytest.raises(KeyError):
            ranks.raise_everywhere(error)
    assert sent == ([] if error is None else [["KeyError on rank 0: 'x'"]])
