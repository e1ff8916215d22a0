"""Checkpoints on disk: written atomically, and verified when they are read.

A checkpoint is written in `_saving/`, gets a manifest of its files, and takes its place by one rename. So a folder
`checkpoint-N` is complete unless a disk or a power cut has damaged it since, which the manifest shows. It guards
against accidents only: its checksums are not cryptographic, and who can change a checkpoint can change that too.
"""

from __future__ import annotations

import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from trl_ext.errors import NotSavedError
from trl_ext.io import read_json, write_json

MANIFEST = "manifest.json"
SCRATCH = "_saving"  # `push_to_hub` leaves out what begins with an underscore
_TRAINING_STATE = (".pt", ".pth")
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`; a ValueError where the folder is not named so."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{str(checkpoint)!r} is not named checkpoint-N")
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, the newest first, good or not."""
    folders = [path for path in run.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of, reverse=True)


def state_file(rank: int) -> str:
    """The name of a rank's own file in a checkpoint."""
    return f"trl_ext_{rank}.pt"


def refuse_missing_parts(folder: Path, processes: int) -> None:
    """Refuse a checkpoint in which a rank's part is missing, since it was written to another host's disk."""
    for rank in range(processes):
        if not (folder / state_file(rank)).is_file():
            raise NotSavedError(
                f"{folder} has no {state_file(rank)}: rank {rank} wrote its part of the checkpoint to a folder of "
                "the same name on another host. Put output_dir on storage that all hosts share"
            )


def write_manifest(folder: Path, processes: int) -> None:
    """Write the manifest of a folder's files, and wait until all of it is on the disk."""
    files = _files(folder)
    entries = {name: {"bytes": path.stat().st_size, "crc32": _crc32(path)} for name, path in files.items()}
    write_json(folder / MANIFEST, {"files": entries, "processes": processes})
    for path in [*files.values(), folder / MANIFEST, *(path.parent for path in files.values()), folder]:
        sync(path)


def find_corruption(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None where it agrees with its manifest.

    Stock TRL writes no manifest; of its checkpoints `trainer_state.json`, the last file it writes, and whether tensors
    are complete are looked at.
    """
    if not (folder / MANIFEST).exists():
        return _no_json(folder / "trainer_state.json") or next(
            filter(None, map(_incomplete, _files(folder).values())), None
        )
    if unreadable := _no_json(folder / MANIFEST):
        return unreadable
    manifest = read_json(folder / MANIFEST)
    try:
        processes, files = (manifest["processes"], manifest["files"]) if "processes" in manifest else (0, manifest)
        listed = {name: (entry["bytes"], entry["crc32"]) for name, entry in files.items()}
    except (AttributeError, KeyError, TypeError):
        return f"{MANIFEST} does not list files with bytes and crc32"
    for rank in range(processes):  # earlier versions wrote the files alone
        if state_file(rank) not in files:
            return f"the part of rank {rank} is missing ({state_file(rank)})"
    for name, (size_then, checksum) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size_then:
            return f"{name} has {path.stat().st_size} bytes, it was written with {size_then}"
        if _crc32(path) != checksum:
            return f"{name} is not what was written (its checksum differs)"
    return None


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest good checkpoint, and a line for every newer one that had to be skipped."""
    skipped: list[str] = []
    for checkpoint in checkpoints(run):
        corruption = find_corruption(checkpoint)
        if corruption is None:
            return checkpoint, skipped
        skipped.append(f"skipped {checkpoint}: {corruption}")
    return None, skipped


def commit_checkpoint(scratch: Path, run: Path) -> Path:
    """Move a folder that has its manifest into the run, in the place of one of the same name."""
    target = run / scratch.name
    if target.exists():
        target.rename(scratch.with_name(f"old-{scratch.name}"))
    scratch.rename(target)
    sync(run)
    shutil.rmtree(run / SCRATCH)
    return target


def link_model(checkpoint: Path, target: Path) -> None:
    """Make a folder of a checkpoint's model and tokenizer that is there when the checkpoint is not any more.

    Hard links, which take no space, or copies where the disk has none. Optimizer and random states are left out. A
    `FileNotFoundError` says that the checkpoint was removed meanwhile; there is no such folder then.
    """
    scratch = target.with_name(f".{target.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        for path in checkpoint.iterdir():
            if not path.is_dir() and path.suffix not in _TRAINING_STATE and path.name != MANIFEST:
                try:
                    os.link(path, scratch / path.name)
                except OSError:
                    shutil.copy2(path, scratch / path.name)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def prune(run: Path, limit: int | None, keep: Iterable[Path] = ()) -> None:
    """Remove all checkpoints but the newest `limit` and those to keep."""
    spared = {path.resolve() for path in keep}
    for checkpoint in checkpoints(run)[max(limit, 1) :] if limit else []:
        if checkpoint.resolve() not in spared:
            _discard(checkpoint)


def archive_newer(checkpoint: Path) -> None:
    """Let the run resume from here: newer checkpoints that are damaged are removed, good ones renamed `.set_aside`."""
    for newer in [other for other in checkpoints(checkpoint.parent) if step_of(other) > step_of(checkpoint)]:
        if find_corruption(newer) is not None:
            _discard(newer)
        else:
            aside = newer.with_name(f"{newer.name}.set_aside")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in _files(folder).values())


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; interrupted, it leaves nothing of that name."""
    aside = checkpoint.parent / SCRATCH / f"old-{checkpoint.name}"
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    shutil.rmtree(aside.parent)


def _files(folder: Path) -> dict[str, Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: files[name] for name in sorted(files) if name != MANIFEST}


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _incomplete(path: Path) -> str | None:
    """Whether a file of tensors, as torch or safetensors write them, lacks its end; None of other files."""
    if path.suffix in (*_TRAINING_STATE, ".bin") and not zipfile.is_zipfile(path):
        return f"{path.name} is not complete"
    if path.suffix == ".safetensors":
        try:
            safe_open(path, "pt")
        except SafetensorError as error:
            return f"{path.name} is not complete ({error})"
    return None


def _no_json(path: Path) -> str | None:
    try:
        read_json(path)
    except OSError:
        return f"{path.name} is missing"
    except ValueError:
        return f"{path.name} is not JSON"
    return None
