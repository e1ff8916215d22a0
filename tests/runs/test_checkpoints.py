"""Checkpoints on disk: corruption is found, a good one is always left, the newest good one is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Trainer

from trl_ext.errors import NotSavedError
from trl_ext.runs import checkpoints as files
from trl_ext.runs.checkpoints import (
    MANIFEST,
    SCRATCH,
    archive_newer,
    checkpoints,
    commit_checkpoint,
    find_corruption,
    link_model,
    newest,
    prune,
    refuse_missing_parts,
    step_of,
    write_manifest,
)
from trl_ext.training.trainer import ReliableTrainer

CONTENT = {"model.safetensors": b"weights" * 99, "trainer_state.json": b"{}", "global_step3/rank0.pt": b"moments"}
CONTENT |= {"trl_ext_0.pt": b"first", "trl_ext_1.pt": b"second"}


def save(run: Path, step: int) -> Path:
    """A complete checkpoint in its place."""
    scratch = run / SCRATCH / f"checkpoint-{step}"
    for name, data in CONTENT.items():
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_bytes(data + str(step).encode())
    write_manifest(scratch, 2)
    return commit_checkpoint(scratch, run)


def test_written_checkpoint_is_intact_and_leaves_nothing_else(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    assert find_corruption(checkpoint) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert newest(tmp_path) == (checkpoint, [])


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize(
    ("how", "words"), [("missing", "missing"), ("cut", "bytes, it was written with"), ("changed", "checksum")]
)
def test_damage_to_any_file_is_found_and_older_checkpoint_used(name: str, how: str, words: str, tmp_path: Path) -> None:
    good, torn = save(tmp_path, 9), save(tmp_path, 10)
    data = (torn / name).read_bytes()
    if how == "missing":
        (torn / name).unlink()
    else:
        (torn / name).write_bytes(data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    found, skipped = newest(tmp_path)
    assert found == good
    assert len(skipped) == 1
    assert all(word in skipped[0] for word in (f"skipped {torn}", name, words))


def test_part_of_a_rank_that_no_manifest_names_is_missed(tmp_path: Path) -> None:
    """As a checkpoint that hosts with separate disks wrote."""
    good, half = save(tmp_path, 1), save(tmp_path, 2)
    refuse_missing_parts(half, 2)
    (half / "trl_ext_1.pt").unlink()
    with pytest.raises(
        NotSavedError, match=r"has no trl_ext_1.pt: rank 1 wrote its part .* storage that all hosts share"
    ):
        refuse_missing_parts(half, 2)
    write_manifest(half, 2)
    assert newest(tmp_path) == (good, [f"skipped {half}: the part of rank 1 is missing (trl_ext_1.pt)"])


def test_manifest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    (checkpoint / MANIFEST).write_text(json.dumps(files))
    assert find_corruption(checkpoint) is None
    (checkpoint / "trl_ext_1.pt").unlink()
    assert find_corruption(checkpoint) == "trl_ext_1.pt is missing"


def test_a_torn_manifest_is_damage(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / MANIFEST).write_text((checkpoint / MANIFEST).read_text()[:20])
    assert find_corruption(checkpoint) == "manifest.json is not JSON"


@pytest.mark.parametrize(
    "content", [[], {"files": []}, {"processes": 1, "files": None}, {"a.pt": 3}, {"a.pt": {"bytes": 3}}], ids=str
)
def test_a_manifest_that_lists_no_files_is_damage(content: object, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    (checkpoint / MANIFEST).write_text(json.dumps(content))
    assert find_corruption(checkpoint) == "manifest.json does not list files with bytes and crc32"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "pytorch_model.bin", "deep/m.pt"]
)
@pytest.mark.parametrize("size", [0, 3, -5])
def test_tensors_of_a_stock_checkpoint_are_complete(name: str, size: int, tmp_path: Path) -> None:
    stock = tmp_path / "checkpoint-5"
    (stock / "deep").mkdir(parents=True)
    (stock / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    path, tensors = stock / name, {"a": torch.zeros(3)}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    assert find_corruption(stock) is None
    path.write_bytes(path.read_bytes()[:size])
    assert str(find_corruption(stock)).startswith(f"{path.name} is not complete")


def test_stock_checkpoint_is_intact_once_its_last_file_is_whole(tmp_path: Path) -> None:
    stock = tmp_path / "checkpoint-5"
    stock.mkdir()
    assert find_corruption(stock) == "trainer_state.json is missing"
    (stock / "trainer_state.json").write_text('{"global_step"')
    assert find_corruption(stock) == "trainer_state.json is not JSON"
    (stock / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    assert newest(tmp_path) == (stock, [])


def test_checkpoints_are_ordered_by_step_and_other_dirs_ignored(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    for name in ("checkpoint-x", "checkpoint-3.set_aside", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-200").write_text("a file")
    assert [step_of(path) for path in checkpoints(tmp_path)] == [100, 10, 9]
    with pytest.raises(ValueError, match="not named checkpoint-N"):
        step_of(tmp_path / "other")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    first = save(tmp_path, 2)
    (first / "stale").write_text("of the other one")
    assert not (save(tmp_path, 2) / "stale").exists()
    assert find_corruption(tmp_path / "checkpoint-2") is None


@pytest.mark.parametrize(
    ("limit", "keep", "left"), [(None, [], [1, 2, 3, 4]), (2, [], [3, 4]), (1, [2], [2, 4]), (0, [], [1, 2, 3, 4])]
)
def test_the_newest_are_left_and_what_is_to_be_kept(
    limit: int | None, keep: list[int], left: list[int], tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    prune(tmp_path, limit, [tmp_path / f"checkpoint-{step}" for step in keep])
    assert sorted(map(step_of, checkpoints(tmp_path))) == left
    assert all(find_corruption(path) is None for path in checkpoints(tmp_path))


def test_resume_from_older_removes_damaged_and_sets_aside_intact(tmp_path: Path) -> None:
    old, torn, good = (save(tmp_path, step) for step in (1, 2, 3))
    (torn / "model.safetensors").unlink()
    archive_newer(old)
    assert checkpoints(tmp_path) == [old]
    assert find_corruption(tmp_path / f"{good.name}.set_aside") is None
    assert not torn.exists()


class PowerCut(BaseException):
    """Nothing after it happens."""


@pytest.mark.moderate
def test_wherever_the_power_goes_there_is_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [(files, "sync"), (files, "write_json"), (Path, "rename"), (files.shutil, "rmtree")]
    remaining, rmtree = 0, files.shutil.rmtree

    def cut(inner):  # type: ignore[no-untyped-def]
        def operation(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal remaining
            if remaining == 0:
                if inner is rmtree:  # it had begun
                    for path in [path for path in Path(args[0]).rglob("*") if path.is_file()][:1]:
                        path.unlink()
                raise PowerCut
            remaining -= 1
            return inner(*args, **kwargs)

        return operation

    moments = 0
    while True:
        run = tmp_path / str(moments)
        save(run, 1)
        save(run, 2)
        with monkeypatch.context() as patch:
            remaining = moments
            for owner, name in operations:
                patch.setattr(owner, name, cut(getattr(owner, name)))
            try:
                save(run, 2)  # in the place of another
                prune(run, 1)
                break
            except PowerCut:
                moments += 1
        found, _ = newest(run)
        assert found is not None
        assert all(find_corruption(path) is None for path in checkpoints(run))
        save(run, 3)
        assert newest(run)[0] == run / "checkpoint-3"
    assert moments > 8


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
def test_linked_model_outlives_its_checkpoint_without_its_state(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no hard links on this disk")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    checkpoint = save(tmp_path, 3)
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth"):
        (checkpoint / name).write_text(name)
    link_model(checkpoint, tmp_path / "best" / "1")
    shutil.rmtree(checkpoint)
    assert (tmp_path / "best" / "1" / "model.safetensors").read_text() == "model.safetensors"
    left = {path.name for path in (tmp_path / "best" / "1").iterdir()}
    assert not left & {"optimizer.pt", "rng_state.pth", "manifest.json", "global_step3"}


def test_checkpoint_removed_while_linking_links_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, link = save(tmp_path, 3), os.link

    def link_once(source: Path, target: Path) -> None:
        link(source, target)
        shutil.rmtree(checkpoint)

    for name in ("a", "b"):
        (checkpoint / name).write_text(name)
    monkeypatch.setattr(os, "link", link_once)
    with pytest.raises(FileNotFoundError):
        link_model(checkpoint, tmp_path / "best" / "1")
    assert list((tmp_path / "best").iterdir()) == []


def test_a_rank_without_an_upload_of_its_own_saves_as_well() -> None:
    class Base(Trainer):
        def _push_from_checkpoint(
            self, folder: str
        ) -> None:  # transformers returns here where it is not the first rank
            pushed.append(folder)

    class Rank(ReliableTrainer, Base):
        def __init__(self) -> None:
            self._being_pushed = [Path("before")]

    pushed: list[str] = []
    rank = Rank()
    rank._push_from_checkpoint("checkpoint-3")
    assert pushed == ["checkpoint-3"]
    assert rank._being_pushed == []
