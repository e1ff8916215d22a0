"""What of a checkpoint cannot be continued, or restarts, is known from its files, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_ext.errors import InputError
from trl_ext.runs.checkpoints import write_manifest
from trl_ext.runs.continuation import Resuming, processes_of, refuse_what_does_not_continue, state_of_rank

COMPLETE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def checkpoint(run: Path, step: int, files: tuple[str, ...] = COMPLETE, ranks: int = 1, **state: Any) -> Path:
    folder = run / f"checkpoint-{step}"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for rank in range(ranks):
        torch.save({"rank": rank, "steps_per_rollout": 4, "last_rollout": [], **state}, folder / f"trl_ext_{rank}.pt")
    write_manifest(folder, ranks)
    return folder


def test_more_or_fewer_processes_are_compared_first(tmp_path: Path) -> None:
    within = checkpoint(tmp_path, 6, rollout=[torch.ones(2)])
    between = checkpoint(tmp_path, 4)
    for changed in (False, True):
        with pytest.raises(
            InputError,
            match=rf"was written by 1 process, and there are 2 now: it is within a rollout.*after "
            rf"every 4th optimizer step, where a rollout is used up: {re.escape(str(between))}$",
        ):
            refuse_what_does_not_continue(within, Resuming(2), changed)  # fmt: skip
    with pytest.raises(
        InputError, match=r"random states of the processes, which were 1 and are 2.*--resume_changed, or start"
    ):
        refuse_what_does_not_continue(between, Resuming(2), changed=False)
    (line,) = refuse_what_does_not_continue(between, Resuming(2), changed=True)
    assert "this restarts: the random states of the processes" in line
    assert refuse_what_does_not_continue(within, Resuming(1), changed=False) == []
    fewer = checkpoint(tmp_path / "two", 6, ("rng_state_0.pth", "rng_state_1.pth", *COMPLETE), ranks=2, rollout=[])
    with pytest.raises(InputError, match=r"written by 2 processes, and there is 1 now.*there is no such checkpoint"):
        refuse_what_does_not_continue(fewer, Resuming(1), changed=True)
    for sharded_by in ("DeepSpeed", "FSDP"):
        with pytest.raises(
            InputError, match=rf"{sharded_by} has divided the optimizer's state among them. Resume with 2"
        ):
            refuse_what_does_not_continue(fewer, Resuming(4, sharded_by), changed=True)


def test_new_ranks_take_the_first_ranks_state_but_its_rows(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2, ranks=2, rollout=[1])
    assert state_of_rank(folder, 1) == {"rank": 1, "steps_per_rollout": 4, "last_rollout": [], "rollout": [1]}
    assert state_of_rank(folder, 2) == {"rank": 0, "steps_per_rollout": 4}


def test_step_of_expert_iteration_needs_as_many_rows(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2, ei_left=3, rows_per_step=8)
    with pytest.raises(
        InputError, match=r"planned with 8 rows for an optimizer step, and now there are 16.*train_batch_size 8"
    ):
        refuse_what_does_not_continue(folder, Resuming(2, rows_per_step=16), changed=True)
    assert refuse_what_does_not_continue(folder, Resuming(2, rows_per_step=8), changed=True)


def test_what_is_missing_is_named_with_a_complete_checkpoint(tmp_path: Path) -> None:
    older = checkpoint(tmp_path, 2, (*COMPLETE, "reference/model.safetensors"))
    cases: dict[str, tuple[tuple[str, ...], Resuming]] = {
        "this would restart: the optimizer's moments (no optimizer.pt). Ask": (COMPLETE[2:], Resuming(1)),
        "(no scheduler.pt); the random states (no rng_state.pth), since it was saved with save_only_model": (
            COMPLETE[:1], Resuming(1),
        ),
        "the reference of sync_ref_model": (COMPLETE, Resuming(1, syncs_reference=True)),
        "Mean, whose tensors are in no checkpoint": (COMPLETE, Resuming(1, callbacks=["Mean", "Other"])),
    }  # fmt: skip
    for number, (words, (files, resuming)) in enumerate(cases.items(), start=3):
        folder = checkpoint(tmp_path, number, files, without_state=["Mean"])
        with pytest.raises(
            InputError, match=f"{re.escape(words)}.*resume_changed, resume from {re.escape(str(older))}, wh"
        ):
            refuse_what_does_not_continue(folder, resuming, changed=False)
        (line, *_) = refuse_what_does_not_continue(folder, resuming, changed=True)
        assert f"{folder} is resumed, and this restarts: " in line
        for path in [*folder.rglob("*.*")]:
            path.unlink()
        (folder / "reference").exists() and (folder / "reference").rmdir()
        folder.rmdir()


def test_checkpoints_of_deepspeed_and_of_stock_trl_are_known(tmp_path: Path) -> None:
    deepspeed = checkpoint(tmp_path, 2, ("global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt", "rng_state.pth"))
    assert refuse_what_does_not_continue(deepspeed, Resuming(1, "DeepSpeed"), changed=False) == []
    with pytest.raises(InputError, match=r"no optimizer\.pt"):
        refuse_what_does_not_continue(deepspeed, Resuming(1), changed=False)
    plain = checkpoint(tmp_path, 3)
    with pytest.raises(InputError, match="no global_step folder"):
        refuse_what_does_not_continue(plain, Resuming(1, "DeepSpeed"), changed=True)
    for path in (plain / "manifest.json", plain / "trl_ext_0.pt"):
        path.unlink()
    assert processes_of(plain) == 1
    assert refuse_what_does_not_continue(plain, Resuming(1), changed=False) == []
    (plain / "rng_state.pth").rename(plain / "rng_state_0.pth")
    (plain / "rng_state_1.pth").write_text("x")
    assert processes_of(plain) == 2
