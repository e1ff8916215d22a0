"""A run that is resumed by other processes than it had ends in a line where it cannot continue, and never hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.grpo.test_distributed import by_accelerate, on_two_ranks
from tests.support.tiny import prompts
from tests.training.test_resume import OFF_POLICY, made

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(600)]  # tests/runs/test_continuation.py


def test_more_ranks_within_a_rollout_are_refused_in_a_line(tmp_path: Path) -> None:
    settings = {"preset": "grpo_clip", "uninformative_keep_prob": 0.5, "train_dataset": prompts(), "optim": "sgd"}
    made(tmp_path / "one", **settings, **OFF_POLICY, max_steps=4).train()
    for found in on_two_ranks(by_accelerate("two_cpu_ranks_ddp"), tmp_path, "resume", seconds=500):
        assert "checkpoint-2 was written by 1 process, and there are 2 now: it is within a rollout" in found["refused"]
        assert "Resume with 1 process, or after every 4th optimizer step" in found["refused"]
        assert found["refused"].endswith(str(tmp_path / "one" / "checkpoint-4"))
        assert found["steps"] == 5
        assert found["settled"]


def test_reference_of_sharded_weights_is_resumed(tmp_path: Path) -> None:
    for found in on_two_ranks(by_accelerate("two_cpu_ranks_zero3"), tmp_path, "reference", seconds=500):
        assert len(found["whole"]) == 3
        assert found["whole"] == found["again"]
        assert found["whole"][-1] > 0
