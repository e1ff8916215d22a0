"""What the ranks of a training tell each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_ext import ranks
from trl_ext.errors import ServerError


@pytest.mark.parametrize(("is_main", "found"), [(True, "ours"), (False, "theirs")])
def test_finding_of_the_main_process_is_every_ranks(is_main: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(is_main_process=is_main, num_processes=1)
    monkeypatch.setattr(ranks, "PartialState", lambda: state)
    monkeypatch.setattr(
        ranks, "broadcast_object_list", lambda mine: mine if mine != [None, [None]] else [None, ["theirs"]]
    )
    assert ranks.run_on_main_and_broadcast(lambda: "ours") == found


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("a row"), ValueError("a row")), (OSError("a disk"), ranks.RankError("OSError on rank 0: a disk"))]
)  # fmt: skip
def test_refusal_is_raised_in_its_own_words(error: Exception, told: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(ranks, "PartialState", lambda: SimpleNamespace(is_main_process=True, process_index=0))
    monkeypatch.setattr(ranks, "broadcast_object_list", lambda mine: sent.append(mine[0]) or mine)

    def refuse() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        ranks.run_on_main_and_broadcast(refuse, ValueError)
    assert (type(sent[0]), str(sent[0])) == (type(told), str(told))


@pytest.mark.parametrize("error", [None, KeyError("x"), ServerError("mine")])
def test_a_lost_server_is_one_on_every_rank(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them save what they have of a checkpoint, which one alone would wait for for ever."""
    state = SimpleNamespace(process_index=0, num_processes=2, device="cpu")
    monkeypatch.setattr(ranks, "PartialState", lambda: state)
    monkeypatch.setattr(ranks, "gather", lambda weight: torch.cat([weight, torch.tensor([2], dtype=torch.uint8)]))
    monkeypatch.setattr(ranks, "gather_object", lambda told: [*told, "ServerError on rank 1: theirs"])
    with pytest.raises(ServerError, match="theirs" if error is None else str(error)) as lost:
        ranks.raise_everywhere(error)
    assert isinstance(error, ServerError) or isinstance(lost.value, ranks.RankError)


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
