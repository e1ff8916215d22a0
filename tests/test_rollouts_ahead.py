"""What the scripts that measure `rollout_ahead` make of runs' metrics."""

from __future__ import annotations

import pytest

from scripts.benchmarks.rollouts_ahead import Rollout, gained, rollouts_in
from scripts.benchmarks.staleness import difference, scores


def test_a_rollout_lasts_from_the_end_of_the_one_before() -> None:
    sampled = {"rollout_time": 2.0, "sync_time": 0.5}
    rows = [{"wall_clock_s": at, **(sampled if i % 2 == 0 else {})} for i, at in enumerate((1.0, 2.0, 6.0, 8.0, 9.0))]
    (only,) = rollouts_in(rows, 2)  # the third has not ended
    assert only == Rollout(total=6.0, sampling=2.0, sync=0.5)
    assert only.training == 3.5


def test_all_is_gained_where_only_the_longer_side_is_left() -> None:
    assert gained(together=5.0, ahead=3.0, longer=3.0) == 1
    assert gained(together=5.0, ahead=5.0, longer=3.0) == 0
    assert gained(together=5.0, ahead=4.0, longer=3.0) == 0.5


@pytest.mark.moderate
def test_runs_are_compared_by_seed() -> None:
    def run(*accuracies: float) -> dict[str, dict[str, float]]:
        return {"accuracy": {str(8 * i): value for i, value in enumerate(accuracies)}}  # 16 is before 8 as a text

    assert scores(run(0.1, 0.4, 0.6)) == (pytest.approx(0.5), 0.6)
    first, second = {"0": run(0, 0.4), "1": run(0, 0.6), "2": run(0, 1)}, {"0": run(0, 0.2), "1": run(0, 0.2)}
    assert difference(first, second, 1).startswith("+0.300 (-0.971 to +1.571)")  # 0.2 and 0.4, t of 12.706
    assert difference({"0": run(0, 0.4)}, second, 1) == ""
