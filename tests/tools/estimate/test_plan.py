"""Planning a budget: rates from a run's logs, what fits, what buys more, by hand-worked numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.plan_budget import levers
from trl_ext.tools.estimate.pilot import read_run
from trl_ext.tools.estimate.plan import (
    Rates,
    Workload,
    fraction_trained,
    measured,
    plan,
    seconds_of,
    workload,
)

ROOT = Path(__file__).parents[3]
RATES = Rates(
    start=10,
    completion_token=0.001,
    trained_token=0.002,
    sync=0.4,
    step=0.1,
    problem=0.01,
    slowest_problem=0.02,
    save=2.0,
)
WORK = Workload(
    rollout_batch_size=100, updates=2, epochs=1, tokens=10.0, validate_every=10, problems=50, final_problems=500,
    save_every=20,
)  # fmt: skip


def test_optimizer_step_includes_its_share_of_periodic_work() -> None:
    assert seconds_of(RATES, WORK, 1) == pytest.approx(
        {"rollout": 0.5, "training": 1.0, "weight sync": 0.2, "overhead": 0.1, "validation": 0.05, "checkpoints": 0.1}
    )
    twice = seconds_of(RATES, replace(WORK, epochs=2, updates=4), 1)  # the same rollout, trained on twice
    assert (twice["rollout"], twice["training"]) == pytest.approx((0.25, 1.0))
    assert seconds_of(RATES, replace(WORK, save_every=None), 1)["checkpoints"] == 0.0


def test_skipped_rows_cost_no_training_and_their_trend_continues() -> None:
    fewer = replace(WORK, pilot_steps=100, pilot_rows=0.5, rows_growth=0.5)
    assert fraction_trained(fewer, 100) == 0.5
    assert fraction_trained(fewer, 400) == pytest.approx(0.25)  # twice the rows in four times the steps
    assert fraction_trained(fewer, 1) == 1.0  # there are no more
    assert fraction_trained(fewer, 0) == 0.0
    assert fraction_trained(WORK, 10_000) == 1.0
    seconds = seconds_of(RATES, fewer, 400)
    assert (seconds["rollout"], seconds["training"]) == pytest.approx((200.0, 100.0))


def test_a_plan_is_the_last_number_of_steps_that_fits() -> None:
    fewer = replace(WORK, pilot_steps=100, pilot_rows=0.5, rows_growth=0.5)
    found = plan(RATES, fewer, 1000.0)
    left = 1000.0 - 10 - 0.5 - 16.4
    assert sum(seconds_of(RATES, fewer, found.steps).values()) <= left
    assert sum(seconds_of(RATES, fewer, found.steps + 1).values()) > left


def test_what_fits_is_what_the_start_and_the_end_leave() -> None:
    # 120 - 10 to start - 0.5 to validate - 1.2 (10 + 2) - 2 at the end leave 93.1, for steps of 1.95
    found = plan(RATES, WORK, 120.0)
    assert found.steps == 47
    assert found.seconds["rollout"] == pytest.approx(23.5)
    assert found.seconds["validation"] == pytest.approx(0.5 + 2.35)
    assert found.seconds["end"] == pytest.approx(16.4)
    assert sum(found.seconds.values()) == pytest.approx(120.0 - (93.1 - 47 * 1.95))
    assert plan(RATES, WORK, 15.0).steps == 0
    assert plan(RATES, replace(WORK, restore_best=True), 120.0).seconds["end"] == pytest.approx(18.8)  # read once more


def test_what_buys_most_comes_first() -> None:
    found = levers(RATES, WORK, 1000.0)
    names = [name for name, _ in found]
    assert names[:2] == ["twice the updates per rollout", "training twice as fast"]
    assert [steps for _, steps in found] == sorted((steps for _, steps in found), reverse=True)
    # training 0.5 s quicker: 973.1 / 1.45 - 973.1 / 1.95
    assert dict(found)["training twice as fast"] == 671 - 499


# A run whose steps all take the same: 16 completions of 5 tokens, two updates per rollout.
SETTINGS = {
    "rollout_batch_size": 16, "train_batch_size": 8, "epochs_per_rollout_batch": None, "validation_problems": 20,
    "final_validation_problems": None, "validate_every": 10, "save_strategy": "steps", "save_steps": 20,
}  # fmt: skip


def run(steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Odd steps roll out (0.8 s, a sync of 0.1 s) and train 0.3 s; even ones train 0.3 s; 0.05 s between them."""
    now, metrics, validations = 10.0, [], [{"step": 0, "wall_clock_s": 10.0, "seconds": 2.0, "problems": 20}]
    for step in range(1, steps + 1):
        rolls = step % 2
        took = 0.3 + 0.9 * rolls
        now += took + 0.05
        entry = {"step": step, "wall_clock_s": now, "step_time": took, "completions/mean_length": 5.0}
        metrics.append(entry | ({"rollout_time": 0.8, "sync_time": 0.1} if rolls else {}))
        if step % 10 == 0:
            now += 3.0
            validations.append({"step": step, "wall_clock_s": now, "seconds": 3.0, "problems": 20})
            metrics.append({"step": step, "wall_clock_s": now, "validation/accuracy": 0.5})
        if step % 20 == 0:
            now += 1.5
    return metrics, {"validations": validations, "seconds_to_save": 1.5}


def test_rates_are_those_of_the_last_three_quarters_of_a_run() -> None:
    metrics, summary = run(60)
    summary["validations"][1]["seconds"] = 4.2  # before them
    for entry in metrics[:15]:  # 14 steps and a validation
        if "step_time" in entry:
            entry["step_time"] += 100.0
    found = measured(metrics, summary, SETTINGS)
    assert found.start == pytest.approx(8.0)
    assert found.completion_token == pytest.approx(0.8 / 80)
    assert found.trained_token == pytest.approx(0.6 / 80)
    assert (found.sync, found.save) == pytest.approx((0.1, 1.5))
    assert found.step == pytest.approx(0.05)
    assert found.problem == pytest.approx(3.2 / 20)  # the first warms up
    assert found.slowest_problem == pytest.approx(4.2 / 20)


def test_a_base_policy_that_the_run_made_is_not_made_again() -> None:
    metrics, summary = run(60)
    assert measured(metrics, {**summary, "seconds_to_make_policy": 7.5}, SETTINGS).start == pytest.approx(0.5)


def test_one_validation_suffices_to_measure_validation_time() -> None:
    metrics, summary = run(60)
    found = measured(metrics, {**summary, "validations": summary["validations"][:1]}, SETTINGS)
    assert (found.problem, found.slowest_problem) == pytest.approx((0.1, 0.1))


def test_rates_are_of_whole_rollouts() -> None:
    """Rollouts that are used for 8 steps, of which a quarter of 45 cuts two; what is logged once in 4 steps is a mean."""
    eight = SETTINGS | {"train_batch_size": 2, "save_strategy": "no"}
    metrics = [
        {"step": step, "wall_clock_s": 10.0 + step * 0.35 + -(-step // 8) * 0.9, "completions/mean_length": 5.0}
        | ({"step_time": 1.2, "rollout_time": 0.8, "sync_time": 0.1} if step % 8 == 1 else {"step_time": 0.3})
        for step in range(1, 46)
    ]
    _, summary = run(0)
    for every in (1, 4):
        logged = [
            metrics[last - 1] | {"step_time": sum(e["step_time"] for e in metrics[last - every : last]) / every}
            | {k: v for k, v in metrics[last - every].items() if k in ("rollout_time", "sync_time")}
            for last in range(every, 46, every)
        ]  # fmt: skip
        found = measured(logged, summary, eight)
        assert found.trained_token == pytest.approx(8 * 0.3 / 80)
        assert found.completion_token == pytest.approx(0.8 / 80)
        assert found.step == pytest.approx(0.05)


def test_completions_stay_as_long_as_in_the_last_quarter() -> None:
    metrics, _ = run(60)
    for entry in metrics:
        entry["completions/mean_length"] = 9.0 if entry["step"] <= 44 else 5.0
    assert workload(metrics, SETTINGS).tokens == 5.0


def test_the_rows_of_a_pilots_halves_say_how_they_add_up() -> None:
    metrics, summary = run(60)
    for entry in metrics:
        if "step_time" in entry:
            entry["step/rows_trained"] = 1.0 if entry["step"] <= 15 else 0.6 if entry["step"] <= 30 else 0.2
    found = workload(metrics, SETTINGS)
    assert (found.pilot_steps, found.pilot_rows) == (60, pytest.approx(0.5))
    assert 60 * fraction_trained(found, 60) == pytest.approx(30 * 0.8 + 30 * 0.2)
    assert 30 * fraction_trained(found, 30) == pytest.approx(30 * 0.8)

    rows = (1.0 + 15 * 0.6 + 30 * 0.2) / 46  # of the steps 15 to 60
    assert measured(metrics, summary, SETTINGS).trained_token == pytest.approx(0.6 / (80 * rows))
    for entry in metrics:
        entry["step/rows_trained"] = 0.0
    assert measured(metrics, summary, SETTINGS).trained_token == 0.0
    assert workload(metrics, SETTINGS).rows_growth == 1.0


def test_two_passes_train_on_every_token_twice() -> None:
    metrics, summary = run(60)
    twice = SETTINGS | {"epochs_per_rollout_batch": 2, "train_batch_size": 16}
    assert workload(metrics, twice).updates == 2
    assert measured(metrics, summary, twice).trained_token == pytest.approx(0.6 / 160)


def test_time_outside_steps_validation_and_saving_is_overhead() -> None:
    metrics, summary = run(80)
    assert measured(metrics, summary, SETTINGS).step == pytest.approx(0.05)
    unsaved = SETTINGS | {"save_strategy": "no"}  # then the 1.5 s of step 60 are something else
    assert measured(metrics, summary, unsaved).step == pytest.approx(0.05 + 1.5 / 20)
    metrics, summary = run(61)  # the last rollout is not whole; 14 to 60 have the savings of 20 and 40
    assert measured(metrics, summary, unsaved).step == pytest.approx(0.05 + 3.0 / 46)


def test_a_plan_from_a_run_predicts_that_run() -> None:
    metrics, summary = run(200)
    rates, work = measured(metrics, summary, SETTINGS), workload(metrics, SETTINGS)
    end = 1.2 * (3.0 + 1.5) + 2.0
    assert plan(rates, work, metrics[-1]["wall_clock_s"] + 1.5 + end).steps == pytest.approx(200, abs=4)


@pytest.mark.parametrize(("steps", "timed"), [(0, True), (9, True), (60, False)])
def test_a_run_that_says_too_little_is_refused(steps: int, timed: bool) -> None:
    metrics, summary = run(steps)
    if not timed:
        metrics = [{k: v for k, v in entry.items() if k != "rollout_time"} for entry in metrics]
    with pytest.raises(ValueError, match=f"{steps} logged steps of {steps // 2} rollouts; at least 10 steps of"):
        measured(metrics, summary, SETTINGS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics, summary = run(60)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "config.yaml").write_text("# validate_every: 7\n")
    (tmp_path / "resolved.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def test_settings_are_read_as_data_and_not_from_comments(folder: Path) -> None:
    assert read_run(folder)[1].validate_every == 10
    (folder / "resolved.json").unlink()
    with pytest.raises(ValueError, match=r"no resolved\.json; a finished run of recipes/grpo_math\.py has them"):
        read_run(folder)


def planned(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "plan_budget.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)


def test_the_script_plans_from_a_run_and_compares_with_one(folder: Path) -> None:
    done = planned(
        folder, "--time_budget", 100, "--set", "validate_every=20", "--compare", folder, "--json", folder / "plan.json"
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((folder / "plan.json").read_text())
    assert content["workload"]["validate_every"] == 20
    steps = content["plan"]["steps"]
    assert done.stdout.startswith(f"{steps} optimizer steps, {steps / 2:.0f} rollouts, in 100 s;")
    assert f"{folder}: 60 steps; the prediction of {steps} is {steps / 60 - 1:+.1%} off" in done.stdout
    assert "training twice as fast" in done.stdout


@pytest.mark.moderate
def test_a_runs_first_steps_are_a_pilot(folder: Path) -> None:
    """Later steps take twice as long, which the first ones do not know."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    slow = [m | {"step_time": 2 * m["step_time"]} if m["step"] > 20 and "step_time" in m else m for m in metrics]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in slow))

    def steps(*more: object) -> int:
        done = planned(folder, "--time_budget", 100, *more, "--json", folder / "plan.json")
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "plan.json").read_text())["plan"]["steps"]

    assert steps("--first", 20) > 1.3 * steps()
    refused = planned(folder, "--time_budget", 100, "--first", 4)
    assert "too few steps to measure rates: 4 logged steps of 2 rollouts" in refused.stderr


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("validat_every=3", "unknown quantity 'validat_every'. Did you mean 'validate_every'"),
        ("save=x", "'x' is not a number"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(change: str, message: str, folder: Path) -> None:
    done = planned(folder, "--time_budget", 100, "--set", change)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    (folder / "summary.json").unlink()
    assert "no summary.json; a finished run" in planned(folder, "--time_budget", 100).stderr
