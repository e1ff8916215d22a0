"""One folder for all hosts, checked before a model loads: on separate disks a run would end well, in parts."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from trl_ext.errors import InputError
from trl_ext.ranks import raise_everywhere

PATIENCE = 10.0  # seconds; network file systems keep a list of files for some seconds


def refuse_unshared(folder: Path, setting: str) -> None:
    """Refuse a folder that is another one on another host. A collective operation.

    The first rank makes a file in it, or in the one above where it does not exist yet, and every rank looks for that.

    Raises:
        InputError: on every rank, if any of them does not see it, or the first one cannot write there.
    """
    state = PartialState()
    if state.num_processes == 1:
        return
    mark, error = None, None
    if state.is_main_process:
        try:
            place = (folder if folder.is_dir() else folder.parent).absolute()
            place.mkdir(parents=True, exist_ok=True)
            mark = place / f".trl_ext_{secrets.token_hex(8)}"
            mark.touch()
        except OSError as refused:
            error = InputError(f"{setting} {str(folder)!r} cannot be written ({refused.strerror}); choose another one")
    raise_everywhere(error, InputError)
    mark, is_parent = broadcast_object_list([mark, mark is not None and not folder.is_dir()])
    mine = (folder.parent if is_parent else folder).absolute() / mark.name
    reports = gather_object([(socket.gethostname(), str(mine.parent), _appears(mine))])
    if state.is_main_process:
        mark.unlink(missing_ok=True)
    first, there, _ = reports[0]
    for rank, (host, here, seen) in enumerate(reports):
        if not seen:
            raise InputError(
                f"host {host} (rank {rank}) does not see {setting} {str(folder)!r} of host {first} (rank 0): what rank "
                f"0 writes into {there} is not in {here} there. Put it on storage that all hosts share"
            )


def refuse_different(path: Path, setting: str) -> None:
    """Refuse a file that some hosts do not have, or have with another content. A collective operation.

    Raises:
        InputError: on every rank.
    """
    if PartialState().num_processes == 1:
        return
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        content = error.strerror or type(error).__name__
    contents = gather_object([(socket.gethostname(), content)])
    first, wanted = contents[0]
    for rank, (host, content) in enumerate(contents):
        if content != wanted:
            raise InputError(
                f"{setting} {str(path)!r} is not the same on host {first} (rank 0) and host {host} (rank {rank}): put "
                "it on storage that all hosts share"
            )


def _appears(path: Path) -> bool:
    end = time.monotonic() + PATIENCE
    while True:
        if path.parent.is_dir():
            os.listdir(path.parent)  # has a network file system ask again
        if path.exists():
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
