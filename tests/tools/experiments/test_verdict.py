"""A verdict for an idea: plans that are checked, differences by hand, looks that stop, and the page."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from scripts.benchmarks.false_alarms import (
    BUDGETS,
    CASES,
    INTERVALS,
    alarms,
    correlated,
    naive_alarms,
    skewed_alone,
    tables,
)
from scripts.verdict_page import section
from trl_ext.errors import InputError
from trl_ext.mini.policy import BasePolicyConfig, make_base_policy
from trl_ext.tools.experiments.sweep import run_all
from trl_ext.tools.experiments.verdict.command import arguments, plan_of
from trl_ext.tools.experiments.verdict.evidence import (
    CLOCK,
    SAMPLES,
    at_equal_samples,
    at_equal_wall_clock,
    changes,
    costs,
    resolution,
    timed,
    whole_pairs,
)
from trl_ext.tools.experiments.verdict.findings import decide, failures, findings_of
from trl_ext.tools.experiments.verdict.page import write_report
from trl_ext.tools.experiments.verdict.plan import (
    Arm,
    ComparisonPlan,
    TaskSpec,
    arm_of,
    arms_of,
    check,
    commands_of,
    fix,
    read_tasks,
    run_name,
)
from trl_ext.tools.experiments.verdict.sequential import BETTER, EQUAL, OPEN, WORSE, Design

ROOT = Path(__file__).parents[3]
TASK = TaskSpec("sums", "recipes/grpo_math.yaml", {"max_steps": 20})


def a_plan(most: int = 6, **more: Any) -> ComparisonPlan:
    return ComparisonPlan(Arm("mine", {}), Arm("theirs", {}), (TASK,), Design(most, 2), 0.02, **more)


def summary(
    last: float, *, seconds: float = 20.0, middle: float = 0.5, early: str | None = None, **more: Any
) -> dict[str, Any]:
    """A run of 20 steps whose validations of 5 s each are at 0, 10 and 20; training takes `seconds`."""
    accuracies = {0: 0.4, 10: middle, 20: last}
    entries = [
        {"step": step, "wall_clock_s": 30 + seconds * step / 20 + 5 * i, "seconds": 5.0, "problems": 500,
         "accuracy": accuracy, "mean_tokens": 17.0, "entropy_estimate": 0.1, "truncated": None, **more}
        for i, (step, accuracy) in enumerate(accuracies.items())
    ]  # fmt: skip
    return {
        "validations": entries, "ended_early": early, "commit": "abc", "versions": {"torch": "2"},
        "hardware": {"gpus": [], "cpu": "a CPU", "cpu_threads": 1}, "wall_clock_s": 99.0,
    }  # fmt: skip


# What is compared.


@pytest.mark.parametrize(
    ("idea", "label", "settings"),
    [
        ("dapo", "dapo", {"preset": "dapo"}),
        ("ppo_clip", "ppo_clip", {"policy_loss": "ppo_clip"}),
        ("recipes/my_loss.py:soft_clip", "soft_clip", {"policy_loss": "recipes/my_loss.py:soft_clip"}),
        ("advantage=a.py:f,beta=0.1", "f_beta=0.1", {"advantage": "a.py:f", "beta": "0.1"}),
        ('stop=["a,b"],beta=1', "stop=__a_b___beta=1", {"stop": '["a,b"]', "beta": "1"}),
    ],
)
def test_an_idea_is_a_preset_a_loss_or_settings(idea: str, label: str, settings: dict[str, str]) -> None:
    assert arm_of(idea) == Arm(label, settings)


def test_an_idea_differs_in_its_own_settings_only() -> None:
    mine, theirs = arms_of("a.py:loss", "dapo")
    assert (mine.settings, theirs.settings) == ({"preset": "dapo", "policy_loss": "a.py:loss"}, {"preset": "dapo"})
    assert arms_of("rloo", "dapo")[0].settings == {"preset": "rloo"}
    assert [arm.label for arm in arms_of("dapo", "dapo")] == ["dapo-2", "dapo"]
    with pytest.raises(InputError, match=r"unknown preset or policy loss 'grop_clip'\. Did you mean 'grpo_clip'"):
        arm_of("grop_clip")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "try").mkdir()
    (tmp_path / "base.yaml").write_text("validation_problems: 64\n")
    for name in ("hard", "easy"):
        (tmp_path / "try" / f"{name}.yaml").write_text(
            f"config: ../base.yaml\nsettings: {{}}\nabout: The {name} one.\n"
        )
    return tmp_path / "try"


def test_tasks_are_files_folders_or_names(tasks: Path, tmp_path: Path) -> None:
    easy = TaskSpec("easy", str(tmp_path / "base.yaml"), {}, "The easy one.")
    assert [task.name for task in read_tasks([], tasks)] == ["easy", "hard"]
    assert read_tasks(["easy"], tasks) == read_tasks([str(tasks / "easy.yaml")], tmp_path) == (easy,)
    assert [task.name for task in read_tasks([str(tasks)], tmp_path)] == ["easy", "hard"]
    own = plan_of(
        arguments(["dapo", "--tasks", str(tasks), "--max_seeds", "3", "--beta", "1"])[0], ["--beta", "1"], tmp_path
    )
    assert (own.design, own.more) == (Design(3, 4, first=3), ("--beta", "1"))


@pytest.mark.parametrize(
    ("given", "content", "message"),
    [
        (["hird"], "", r"--tasks: unknown task 'hird'\. Did you mean 'hard'.*, or a YAML file, or a folder of them"),
        (["own"], "config: none.yaml", r"own.yaml: config: no file '.*none.yaml'"),
        (["own"], "config: ../base.yaml\nsettings: {seed: 3}", r"own.yaml: settings: seed is set by `try`; remove it"),
        (["own"], "config: ../base.yaml\nsettings: 3", r"own.yaml: settings must be a mapping, got 3"),
        (["own"], "configg: x", r"own.yaml: unknown field 'configg'\. Did you mean 'config'"),
        (["own"], "config: ../base.yaml\nsettings: {final_validation_problems: 9}",
         r"own.yaml: final_validation_problems is 9 and validation_problems 64; .*leave final_validation_problems out"),
        (["easy", "easy"], "", "two files have the same name"),
        (["nothing"], None, "no YAML file in nothing"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_run_is_refused(
    given: list[str], content: str | None, message: str, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tasks)
    if content is None:
        (tasks / "nothing").mkdir()
    elif content:
        (tasks / "own.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        read_tasks(given, tasks)


def test_the_shipped_tasks_can_be_read() -> None:
    assert "mini_math" in [task.name for task in read_tasks([], ROOT / "recipes" / "try")]


def test_arms_have_the_same_seeds_and_take_turns_to_be_first() -> None:
    plan = a_plan(more=("--beta", "0.5"))
    commands = commands_of(plan, 2, Path("recipes"))
    assert list(commands) == [run_name(TASK, arm, seed) for arm, seed in zip(plan.arms[::-1] + plan.arms, (0, 0, 1, 1), strict=True)]  # fmt: skip
    first = commands["sums,theirs,seed=0"]
    assert first[0] == "recipes/grpo_math.py"
    assert first[1:3] == ["--config", "recipes/grpo_math.yaml"]
    assert first[-4:] == ["--beta", "0.5", "--seed", "0"]
    assert commands["sums,mine,seed=1"][-1] == "1"


def test_a_plan_is_fixed_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    Path("recipes/grpo_math.yaml").touch()
    Path("loss.py").write_text("x = 1")
    plan = ComparisonPlan(Arm("f", {"policy_loss": "loss.py:f"}), Arm("g", {}), (TASK,), Design(6, 2), 0.02)
    fix(plan, Path("out"))
    fix(plan, Path("out"))  # the same one resumes
    more_seeds = ComparisonPlan(plan.idea, plan.against, plan.tasks, Design(8, 2), 0.02)
    with pytest.raises(InputError, match=r"out/plan.json: design was another; choose another --output_dir"):
        fix(more_seeds, Path("out"))
    Path("other.py").write_text("x = 1")
    other_idea = ComparisonPlan(
        Arm("h", {"policy_loss": "other.py:h"}), plan.against, plan.tasks, plan.design, plan.margin
    )
    with pytest.raises(InputError, match=r"out/plan.json: idea was another; choose another --output_dir"):
        fix(other_idea, Path("out"))
    Path("loss.py").write_text("x = 2")
    with pytest.raises(InputError, match=r"out/plan.json: loss.py has changed; choose another --output_dir"):
        fix(plan, Path("out"))


# Evidence.


def test_training_seconds_leave_out_the_start_and_validations() -> None:
    run = timed(summary(0.8, seconds=40.0, middle=0.6))
    assert run.steps == [(0.0, 0.4), (10.0, 0.6), (20.0, 0.8)]
    assert run.seconds == [(0.0, 0.4), (20.0, 0.6), (40.0, 0.8)]
    assert run.seconds_per_step == 2.0
    broken = summary(0.8)
    broken["validations"][-1]["problems"] = 900
    with pytest.raises(InputError, match="validations of different sizes: leave final_validation_problems out"):
        timed(broken)


def test_a_slower_arm_is_read_where_the_faster_one_was_done() -> None:
    # after 20 of its 40 s, where the other has 0.8, it is at its middle, 0.5; after 32 of 40 at 0.5 + 0.6 * 0.3
    slow, half = summary(0.8, seconds=40.0), summary(0.8, seconds=32.0)
    pairs = {0: (slow, summary(0.8)), 1: (summary(0.8), slow), 2: (slow, half)}
    assert at_equal_samples(pairs) == [(0.8, 0.8)] * 3
    found = at_equal_wall_clock(pairs)
    assert found[0] == pytest.approx((0.5, 0.8))
    assert found[1] == pytest.approx((0.8, 0.5))
    assert found[2] == pytest.approx((0.68, 0.8))


def test_a_run_that_ended_early_is_not_the_faster_one_for_it() -> None:
    collapsed = summary(0.1, seconds=5.0, early="collapsed")
    assert at_equal_wall_clock({0: (collapsed, summary(0.8))}) == [(0.1, 0.8)]
    assert at_equal_wall_clock({0: (collapsed, summary(0.2, seconds=8.0, early="it too"))}) == [(0.1, 0.2)]


def test_cost_and_what_else_changed_are_of_the_same_seeds() -> None:
    pairs = {0: (summary(0.8, seconds=30.0), summary(0.8)), 1: (summary(0.8, seconds=40.0), summary(0.8))}
    assert costs(pairs) == [(1.5, 1.0), (2.0, 1.0)]
    assert resolution(pairs) == 1 / 500
    logged = {0: (summary(0.8, mean_tokens=20.0, **{"pass@8": 0.9}), summary(0.8, **{"pass@8": 0.7}))}
    assert changes(logged) == {
        "entropy, nats per token": [(0.1, 0.1)], "tokens per response": [(20.0, 17.0)], "pass@8": [(0.9, 0.7)],
    }  # fmt: skip


def test_seeds_count_up_to_the_first_that_failed() -> None:
    good, bad = summary(0.8), {"failed": "no memory"}
    runs = {"mine": {0: good, 1: good, 2: good}, "theirs": {0: good, 1: bad, 2: good}}
    assert list(whole_pairs(runs, "mine", "theirs")) == [0]
    assert failures({"sums": runs}) == {"sums, theirs, seed 1": "no memory"}


# The sequence.


def runs_with(gains: Sequence[float], base: Sequence[float] = (0.70, 0.72, 0.74, 0.71, 0.73, 0.75)) -> dict[str, Any]:
    """Summaries of both arms by name: the idea gains so much at each seed."""
    found = {}
    for seed, (accuracy, gain) in enumerate(zip(base, gains, strict=False)):
        found[f"sums,mine,seed={seed}"] = summary(accuracy + gain)
        found[f"sums,theirs,seed={seed}"] = summary(accuracy)
    return found


@pytest.mark.parametrize(
    ("gains", "seeds", "said"),
    [
        ([0.10, 0.11, 0.10, 0.11, 9, 9], 4, BETTER),  # the last two are not run
        ([-0.10, -0.11, -0.10, -0.11, 9, 9], 4, WORSE),
        ([0.0, 0.0, 0.0, 0.0, 9, 9], 4, EQUAL),  # a renamed copy
        ([0.03, 0.02, 0.09, 0.10, 0.06, 0.06], 6, BETTER),
        ([0.03, -0.02, 0.09, -0.10, 0.06, 0.06], 6, OPEN),
    ],
)
def test_seeds_are_added_until_the_intervals_decide(gains: list[float], seeds: int, said: str) -> None:
    asked, found, plan = [], runs_with(gains), a_plan(6)

    def run(commands: Mapping[str, Sequence[str]]) -> Mapping[str, Mapping[str, Any]]:
        asked.append(len(commands) // 2)
        return {name: found[name] for name in commands}

    decisions = []

    def report(runs: Any) -> Any:
        decisions.append(findings_of(plan, runs))
        return decisions[-1]

    assert decide(plan, Path("recipes"), run, report)
    assert asked == [n for n in (4, 6) if n <= seeds]
    assert [(one.axis, one.decision) for one in decisions[-1]] == [(SAMPLES, said), (CLOCK, said)]
    assert decisions[-1][0].differences == pytest.approx(gains[:seeds])


def test_a_failed_run_ends_it_and_is_tried_again_next_time() -> None:
    found, plan = runs_with([0.1, 0.11, 0.1, 0.11, 0.1, 0.1]), a_plan(6)
    broken = {**found, "sums,mine,seed=2": {"failed": "NaN"}}
    seen: list[Any] = []

    def once(runs: Mapping[str, Any]) -> Callable[[Mapping[str, Sequence[str]]], dict[str, Any]]:
        return lambda commands: {name: runs[name] for name in commands}

    def report(runs: Any) -> Any:
        seen.append(findings_of(plan, runs))
        return seen[-1]

    assert not decide(plan, Path("recipes"), once(broken), report)
    assert len(seen) == 1
    assert (seen[0][0].decision, len(seen[0][0].differences)) == (OPEN, 2)
    assert decide(plan, Path("recipes"), once(found), report)
    assert seen[-1][0].decision == BETTER


# The page.


def written(tmp_path: Path, found: Mapping[str, Any], seeds: int, plan: ComparisonPlan | None = None) -> str:
    """The page of runs that are on the disk, read as the command reads them."""
    plan = plan or a_plan(6)
    for name, run in found.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        if "failed" not in run:
            (tmp_path / "runs" / name / "summary.json").write_text(json.dumps(run))
    commands = commands_of(plan, seeds, Path("recipes"))
    ended = {name: command for name, command in commands.items() if "failed" not in found[name]}
    runs = {**found, **run_all(ended, tmp_path / "runs", keep_going=True)}
    by_arm = {a.label: {s: runs[run_name(TASK, a, s)] for s in range(seeds)} for a in plan.arms}
    write_report(tmp_path, plan, {"sums": by_arm}, ["recipes/lab.py", "try", "mine", "--hub_token", "hf_secret"])
    return (tmp_path / "verdict.md").read_text()


def test_page_has_verdict_interval_curves_cost_and_power(tmp_path: Path) -> None:
    text = written(tmp_path, runs_with([0.10, 0.11, 0.10, 0.11]), 4)
    # mean 0.105, sd 0.00577, t of 0.05 / 2 * 4 / 6 and 3 degrees of freedom 4.857: +- 0.0140
    for words in (
        "# mine against theirs\n", "- sums, equal samples: **mine is better (+0.105, +0.091 to +0.119; 4 seeds)**",
        "- sums, equal wall-clock: **mine is better (+0.105, +0.091 to +0.119; 4 seeds)**",
        "| sums | equal samples | 0.718 | 0.823 | +0.105 | +0.091 to +0.119 | 0.006 | 4 |",
        "looks after 4 and 6 seeds hold together with a probability of 95%", "![learning curves](curves.png)",
        "| sums | 1.000 (1.000 to 1.000) | 1.000 (1.000 to 1.000) | 1.00 |", "| sums | tokens per response | 17.000 | 17.000 | +0.000 |",
        "| 0.005 | 4 | ", "- Found at equal wall-clock: at most 0.006, for which it takes ", "- Commit: abc", "- Hardware: a CPU",
        "`python recipes/lab.py try mine",
    ):  # fmt: skip
        assert words in text
    assert "hf_secret" not in text
    shown = section(text, " So it is. ", "verdict_a")
    assert shown.startswith("## mine against theirs\n\n**Found.** So it is.\n\n- sums, equal samples: ")
    assert "](verdict_a.png)" in shown
    assert "\n### Cost\n" in shown
    assert "Power" not in shown
    assert "Failed" not in text
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width > 2000


@pytest.mark.moderate
def test_data_next_to_the_page_is_what_it_shows(tmp_path: Path) -> None:
    written(tmp_path, runs_with([0.10, 0.11, 0.10, 0.11]), 4)
    data = json.loads((tmp_path / "verdict.json").read_text())
    assert data["looks"] == [4, 6]
    assert data["findings"][0]["decision"] == BETTER
    assert data["findings"][0]["against"] == [0.70, 0.72, 0.74, 0.71]
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    end = next(
        row for row in rows if (row["panel"], row["curve"], row["x"]) == ("sums, optimizer steps", "theirs", "20.0")
    )
    assert [float(end[name]) for name in ("low", "median", "high", "seeds")] == [0.7075, 0.715, 0.725, 4]
    with (tmp_path / "runs.csv").open() as file:
        assert next(csv.DictReader(file)) == {"task": "sums", "at": "equal samples", "seed": "0", "mine": "0.8", "theirs": "0.7"}  # fmt: skip


def test_page_names_what_failed_and_waits_for_the_first_look(tmp_path: Path) -> None:
    found = runs_with([0.10, 0.11, 0.10, 0.11]) | {"sums,mine,seed=3": {"failed": "no memory"}}
    text = written(tmp_path, found, 4)
    assert "**Failed:** sums, mine, seed 3: no memory" in text
    assert "**no verdict yet: 3 of 4 seeds for the first look (+0.103)**" in text
    assert "The same command tries what failed again." in text


def test_page_of_nothing_says_so(tmp_path: Path) -> None:
    found = runs_with([0.1, 0.1]) | {"sums,mine,seed=0": {"failed": "x"}}
    text = written(tmp_path, found, 2)
    assert "No verdict: no seed has both runs." in text
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.moderate
def test_undecided_and_equal_are_said_in_words(tmp_path: Path) -> None:
    assert "**no difference of 0.02 or more (+0.000, -0.005 to +0.005; 4 seeds)**" in written(tmp_path / "a", runs_with([0.0] * 4), 4)  # fmt: skip
    assert "**undecided (+0.060, " in written(tmp_path / "b", runs_with([0.03, 0.02, 0.09, 0.10]), 4)


# How often it is wrong.


@pytest.mark.parametrize("name", [name for name, arms in CASES.items() if arms is not skewed_alone])
def test_arms_that_are_alike_seldom_look_different(name: str) -> None:
    rows = correlated(CASES[name], np.random.default_rng(3), 4000, 8)
    assert alarms(rows, Design(8, INTERVALS)) <= 0.05 < 0.1 < naive_alarms(rows)


def test_the_page_has_the_simulated_rates() -> None:
    page = (ROOT / "docs" / "results" / "verdict.md").read_text()
    found = json.loads((ROOT / "docs" / "results" / "verdict_false_alarms.json").read_text())
    assert "\n".join(tables(found)) in page
    kept = [of for name, of in found["alarms"].items() if CASES[name] is not skewed_alone]
    assert max(of[str(most)] for of in kept for most in BUDGETS) <= 0.05


# The real thing.


@pytest.mark.slow
def test_an_arm_that_does_not_fit_is_named_before_any_run() -> None:
    plan = ComparisonPlan(Arm("mine", {"policy_loss": "recipes/my_loss.py:soft_klip"}), Arm("dapo", {"preset": "dapo"}), (TASK,), Design(6, 2), 0.02)  # fmt: skip
    with pytest.raises(InputError, match=r"task 'sums', mine: .*has no function 'soft_klip'\. It has: soft_clip"):
        check(plan)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_loss_of_your_own_gets_its_verdict(tmp_path: Path) -> None:
    small = BasePolicyConfig(hidden=32, layers=1, heads=1, intermediate=32, steps=3, batch=4)
    tiny = {
        "model_name_or_path": str(make_base_policy(0, tmp_path, small, progress=False)), "max_steps": 2, "rollout_batch_size": 8,
        "group_size": 4, "train_batch_size": 8, "micro_train_batch_size": 8, "validation_problems": 4,
        "validate_every": 1, "sampling_max_tokens": 4, "use_cpu": True,
    }  # fmt: skip
    task = {"config": str(ROOT / "recipes" / "grpo_math.yaml"), "settings": tiny}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(task))
    given = ["try", "recipes/my_loss.py:soft_clip", "--tasks", str(tmp_path / "tiny.yaml"), "--max_seeds", "2",
             "--jobs", "2", "--output_dir", str(tmp_path / "out")]  # fmt: skip
    for _ in range(2):  # the second time from what is there
        done = subprocess.run(
            [sys.executable, "recipes/lab.py", *given],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "soft_clip against grpo_clip" in done.stdout
    data = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert [len(finding["idea"]) for finding in data["findings"]] == [2, 2]
    assert data["failed"] == {}
