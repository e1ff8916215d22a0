"""What one rank meets and all have to know of, before they wait for each other."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object

from trl_ext.errors import ServerError

Found = TypeVar("Found")


class RankError(RuntimeError):
    """Another rank raised an exception; the message says which, and what it was."""


def is_of_gather(error: BaseException) -> bool:
    """Whether Accelerate's `gather` raised it, because of another rank: there is nothing to tell the others then."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any((f.f_globals.get("__name__"), f.f_code.co_name) == (gather.__module__, "gather") for f in frames)


def raise_everywhere(error: Exception | None, kind: type[Exception] = RankError) -> None:
    """Raise on every rank if any of them has an error: its own, or that of the first one that has.

    A collective operation: every rank calls it, those without an error too.

    Raises:
        kind: on ranks without an error of their own.
    """
    state = PartialState()
    everyones: list[str | None] = []
    if state.num_processes > 1:
        weight = 0 if error is None else 2 if isinstance(error, ServerError) else 1
        weights = gather(torch.tensor([weight], dtype=torch.uint8, device=state.device))
        if weights.any():  # one byte per rank tells that there is nothing to tell
            everyones = gather_object([_told(error)])
        if (weights == 2).any() and weight < 2:  # every rank has to save its part of a checkpoint
            kind = kind if issubclass(kind, ServerError) else type(kind.__name__, (kind, ServerError), {})
            error = None if error is None else kind(str(error))
    if error is not None:
        raise error
    for said in everyones:
        if said is not None:
            raise kind(said)


@contextlib.contextmanager
def server_errors_on_all_ranks() -> Iterator[None]:
    """A `ServerError` of the block on one rank becomes one on all ranks. A collective operation."""
    error = None
    try:
        yield
    except ServerError as failed:
        error = failed
    raise_everywhere(error, ServerError)


def run_on_main_and_broadcast(find: Callable[[], Found], refusal: type[Exception] = RankError) -> Found:
    """What the main process finds, on every rank; what it raises is raised on all of them. A collective operation.

    A `refusal` is raised in its own words, any other error as a `RankError`.
    """
    values: list[Found | None] = [None]
    error = None
    try:
        if PartialState().is_main_process:
            values = [find()]
    except Exception as raised:
        error = raised
    told = refusal(str(error)) if isinstance(error, refusal) else RankError(_told(error)) if error else None
    said, (value,) = broadcast_object_list([told, values])
    if error is not None:
        raise error
    if said is not None:
        raise said
    return value


def gather_on_main(mine: list[Found]) -> list[Found]:
    """The lists of all ranks as one, on the main process; elsewhere nothing. A collective operation."""
    state = PartialState()
    if state.num_processes == 1:
        return mine
    everyones: list[list[Found]] | None = [[]] * state.num_processes if state.is_main_process else None
    torch.distributed.gather_object(mine, everyones)
    return list(chain(*everyones or ()))


def _told(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__} on rank {PartialState().process_index}: {error}"
