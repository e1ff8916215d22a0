"""The lab: its files, the runs that questions need, and the page with table and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from scripts.lab_page import kept_section, section
from tests.recipes.test_grpo import SMALL
from trl_ext.errors import InputError
from trl_ext.mini.policy import make_base_policy
from trl_ext.tools.experiments.lab.answer import (
    PARTS,
    best_cell,
    difference,
    differences,
    discussion,
    mean_and_deviation,
    mean_by_step,
    noise,
    read_winner,
    span,
    steps_table,
    table,
    training_curves,
    write_accuracy_plot,
    write_report,
)
from trl_ext.tools.experiments.lab.questions import (
    Lab,
    Question,
    cells_of,
    check,
    in_order,
    question_names,
    read_lab,
    read_question,
)
from trl_ext.tools.experiments.metrics import accuracy_over_the_run
from trl_ext.tools.experiments.progress import latest
from trl_ext.tools.experiments.runspec import GRPO, RunSpec

ROOT = Path(__file__).parents[3]
LABS = sorted(path for path in (ROOT / "recipes" / "lab").iterdir() if path.is_dir())
WHOLE = [lab for lab in LABS if lab.name in ("mini_math", "qwen2.5_math_1.5b")]
QUESTION = {"question": "Which?", "reference": "a", "cells": {"a": {}, "b": {"learning_rate": 1e-3}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "base.yaml").write_text("max_steps: 3\n")
    (tmp_path / "lab.yaml").write_text("config: recipe/base.yaml\nsettings: {preset: dapo, learning_rate: 3.0e-4}\n")
    (tmp_path / "which.yaml").write_text(yaml.safe_dump(QUESTION))
    return tmp_path


# Files.


@pytest.mark.parametrize("lab", WHOLE, ids=[lab.name for lab in WHOLE])
def test_every_lab_has_the_course_questions_and_the_debated_ones(lab: Path) -> None:
    assert set(question_names(lab)) == {
        "baseline", "beyond_the_handout", "clipping", "entropy", "expert_iteration", "expert_iteration_batch", "kl",
        "learning_rate", "length_normalization", "off_policy", "off_policy_broad", "prompt", "sft_batch_size",
        "sft_learning_rate", "sft_sizes",
    }  # fmt: skip
    beyond = read_question(lab, "beyond_the_handout").cells
    assert {"leave_one_out", "max_rl", "token_mean", "gspo", "cispo"} < set(beyond)
    assert len(read_question(lab, "length_normalization").cells) == 4
    assert (lab / read_lab(lab).config).is_file()


@pytest.mark.nightly
@pytest.mark.slow  # processes that import every recipe
@pytest.mark.parametrize("lab", LABS, ids=[lab.name for lab in LABS])
def test_every_cell_of_every_question_resolves(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1 + 1 =", "response": "2"}\n')  # which the handout gives out
    winners: dict[str, Any] = {}
    planned, on_a_cpu = [], ["--bf16", "false"]
    for question in in_order(read_question(lab, name) for name in question_names(lab)):
        cells = cells_of(read_lab(lab), lab, question, winners, on_a_cpu)
        winners[question.name] = list(cells.values())[-1].settings
        planned.append((question, cells))
    broken = Question("mine", "?", {"a": {}, "b": {"group_size": 7}}, "a")
    planned.append((broken, cells_of(read_lab(lab), lab, broken, {}, on_a_cpu)))
    with pytest.raises(InputError, match=r"question 'mine', cell 'b': .*group_size .7"):
        check(planned)


def test_a_lab_and_a_question_are_read(folder: Path) -> None:
    assert read_lab(folder) == Lab("recipe/base.yaml", {"preset": "dapo", "learning_rate": 3e-4})
    assert question_names(folder) == ["which"]
    assert read_question(folder, "which") == Question("which", "Which?", QUESTION["cells"], "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "which.yaml: while parsing"),
        ("- a", "which.yaml: not a mapping"),
        (QUESTION | {"sells": {}}, "unknown field 'sells'. Did you mean 'cells'"),
        ({"question": "?", "reference": "a"}, "which.yaml: .*missing.*'cells'"),
        (QUESTION | {"cells": {"a": {}}}, "cells: two at least are needed to compare, got 1"),
        (QUESTION | {"reference": "c"}, "unknown cell 'c'.* Known: a, b"),
        (QUESTION | {"cells": {"a": {}, "b": [1]}}, "cell b must be a mapping, got .1."),
        (QUESTION | {"settings": 3}, "which.yaml: settings must be a mapping, got 3"),
        (QUESTION | {"cells": {"a": {}, "b": {"seed": 1}}}, "cell b: seed is set by the lab; remove it"),
    ],
)
def test_a_file_that_describes_no_question_is_refused(content: Any, message: str, folder: Path) -> None:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (folder / "which.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_question(folder, "which")


def test_unknown_question_is_refused_with_the_choices(folder: Path) -> None:
    with pytest.raises(InputError, match=r"unknown question 'whihc'\. Did you mean 'which'"):
        read_question(folder, "whihc")
    (folder / "lab.yaml").write_text("config: none.yaml\n")
    with pytest.raises(InputError, match=r"lab\.yaml: config: no file .*none\.yaml"):
        read_lab(folder)
    (folder / "lab.yaml").write_text("config: recipe/base.yaml\nrecipes: {sft: {settings: {}}}\n")
    with pytest.raises(InputError, match=r"recipes: sft: config and settings are needed, got settings"):
        read_lab(folder)
    (folder / "lab.yaml").write_text("config: recipe/base.yaml\nrecipes: {stf: {}}\n")
    with pytest.raises(InputError, match=r"unknown recipe 'stf'\. Did you mean 'sft'"):
        read_lab(folder)
    (folder / "lab.yaml").write_text("configg: recipe/base.yaml\n")
    with pytest.raises(InputError, match=r"unknown field 'configg'\. Did you mean 'config'"):
        read_lab(folder)


# Runs.


def test_a_run_is_named_by_what_sets_it_apart() -> None:
    assert RunSpec(GRPO, "base.yaml").run_name(3) == "seed=3"
    assert RunSpec("sft", "base.yaml", {"prompt": "x"}).run_name(3) == "prompt=x,recipe=sft,seed=3"
    settings = {"policy_loss_options": {"eps_low": 0.1}, "learning_rate": 1e-5, "prompt": "mine/a b.prompt"}
    name = "learning_rate=1e-05,policy_loss_options=_eps_low__0.1_,prompt=mine_a_b.prompt,seed=0"
    assert RunSpec(GRPO, "base.yaml", settings).run_name(0) == name


def test_a_long_name_is_one_that_a_file_system_takes() -> None:
    long = {f"setting_{number}": "x" * 20 for number in range(10)}
    names = [RunSpec(GRPO, "base.yaml", {**long, "the_last": last}).run_name(12) for last in "ab"]
    assert all(name.startswith("setting_0=xxx") and name.endswith(",seed=12") for name in names)
    assert all(len(f"{name}.log") < 255 for name in names)
    assert names[0] != names[1]


def test_run_shared_by_questions_is_run_once(folder: Path) -> None:
    lab = read_lab(folder)
    same = Question("other", "?", {"x": {"learning_rate": 3e-4}, "y": {"beta": 0.1}}, "x", {"preset": "dapo"})
    first, second = cells_of(lab, folder, read_question(folder, "which"), {}), cells_of(lab, folder, same, {})
    assert first["a"] == second["x"]
    assert second["y"].settings == {"beta": 0.1}
    assert second["y"].arguments() == [
        "--config", str(folder / "recipe" / "base.yaml"), "--preset", "dapo", "--learning_rate", "0.0003", "--beta",
        "0.1",
    ]  # fmt: skip
    third = Question("third", "?", {"x": {"beta": 0.1}, "y": {}}, "x", {"beta": 0.2, "max_steps": 5})
    assert cells_of(lab, folder, third, {})["x"].settings == {"beta": 0.1, "max_steps": 5}


def test_a_cell_may_be_of_another_recipe_that_the_lab_has(folder: Path) -> None:
    question = Question("mixed", "?", {"a": {}, "b": {"recipe": "sft", "beta": 1}}, "a")
    with pytest.raises(InputError, match=r"question 'mixed', cell 'b': unknown recipe 'sft'\. Known: grpo"):
        cells_of(read_lab(folder), folder, question, {})
    lab = Lab("recipe/base.yaml", {"beta": 1}, {"sft": {"config": "recipe/sft.yaml", "settings": {"lr": 2}}})
    found = cells_of(lab, folder, question, {})
    assert found["b"] == RunSpec("sft", str(folder / "recipe" / "sft.yaml"), {"beta": 1}, common={"lr": 2})


def test_questions_start_from_the_best_cells_of_others(folder: Path) -> None:
    cells = {"x": {}, "y": {"learning_rate": 9.0}}
    later = Question("later", "?", cells, "x", {"beta": 0.5}, after=["which", "other"])
    winners = {"which": {"learning_rate": 1.0, "epochs": 2}, "other": {"beta": 0.1, "epochs": 4}}
    found = cells_of(read_lab(folder), folder, later, winners)
    assert found["x"].settings == {"learning_rate": 1.0, "beta": 0.5, "epochs": 4}
    assert found["y"].settings == {"learning_rate": 9.0, "beta": 0.5, "epochs": 4}
    last = Question("last", "?", cells, "x", after=["later"])
    assert [question.name for question in in_order([last, later])] == ["later", "last"]
    circle = Question("later", "?", cells, "x", after=["last"])
    with pytest.raises(InputError, match="come after one another, in a circle: last, later"):
        in_order([last, circle])


def test_best_cell_has_the_highest_mean_and_no_failed_seed(tmp_path: Path) -> None:
    assert best_cell(RUNS, "b") == "a"
    assert best_cell({"a": RUNS["a"], "b": RUNS["a"]}, "b") == "b"
    assert best_cell({"b": RUNS["b"], "c": RUNS["c"]}, "b") == "b"  # a seed of c failed
    assert best_cell({"a": {0: {"failed": "x"}}, "b": {0: {"failed": "y"}}}, "b") == "b"
    with pytest.raises(InputError, match=r"the winner of 'which' is not known yet; ask which as well"):
        read_winner(tmp_path, "which")


# The page.


def run(accuracy: float, *, seconds: float = 50.0, early: str | None = None, between: float = 0.5) -> dict[str, Any]:
    validations = [
        {"step": step, "wall_clock_s": seconds * step / 60, "accuracy": a}
        for step, a in ((0, 0.4), (30, between), (60, accuracy))
    ]
    return {
        "validation_accuracy_after": accuracy, "validations": validations, "wall_clock_s": seconds,
        "ended_early": early, "final_validation_problems": 2048, "commit": "abc",
        "hardware": {"gpus": [], "cpu": "a CPU", "cpu_threads": 1}, "versions": {"torch": "2"},
    }  # fmt: skip


RUNS: dict[str, dict[int, dict[str, Any]]] = {
    "a": {0: run(0.90), 1: run(0.91), 2: run(0.92)},
    "b": {0: run(0.80), 1: run(0.82), 2: run(0.81, early="collapsed: x")},
    "c": {0: run(0.95), 1: {"failed": "no memory"}, 2: run(0.85)},
}


def test_difference_is_paired_by_seed_and_has_an_interval() -> None:
    assert differences(RUNS, "b", "a") == pytest.approx([-0.10, -0.09, -0.11])
    # mean -0.1, standard deviation 0.01, t 4.303: +- 4.303 * 0.01 / sqrt(3)
    assert difference(RUNS, "b", "a") == "-0.100 (-0.125 to -0.075), worse"
    assert difference(RUNS, "a", "b") == "+0.100 (+0.075 to +0.125), better"
    assert differences(RUNS, "c", "a") == pytest.approx([0.05, -0.07])
    assert differences(RUNS, "a", "c") == pytest.approx([-0.05, 0.07])
    assert difference(RUNS, "c", "a").endswith("no difference seen")
    assert difference({"a": RUNS["a"], "d": {0: run(0.5)}}, "d", "a") == "–"


def test_table_has_a_row_per_cell_with_early_ends_and_failures() -> None:
    head, line, a, b, c = table(RUNS, "a")
    assert head.split(" | ")[1:4] == ["seed 0", "seed 1", "seed 2"]
    assert line.count("---") == head.count("|") - 1
    assert a == "| a | 0.900 | 0.910 | 0.920 | 0.910 ± 0.010 |  | 0.705 | 60 | 50 |  |"
    assert "| 0.810 ± 0.010 | -0.100 (-0.125 to -0.075), worse |" in b
    assert b.endswith("| seed 2: collapsed: x |")
    assert c.startswith("| c | 0.950 | – | 0.850 | 0.900 ± 0.071 |")
    assert c.endswith("| seed 1: no memory |")
    nothing = table({"a": {0: {"failed": "x"}}, "b": {0: {"failed": "y"}}}, "a")
    assert nothing[2] == "| a | – | – |  | – | – | – | seed 0: x |"


def test_figures_in_words() -> None:
    assert accuracy_over_the_run(run(0.9, between=0.7)["validations"]) == pytest.approx(
        0.8
    )  # without the one before training
    assert [span(values) for values in ([], [3], [3, 3], [5, 3])] == ["–", "3", "3", "3 to 5"]
    assert [mean_and_deviation(values) for values in ([], [0.5], [0.4, 0.6])] == ["–", "0.500", "0.500 ± 0.141"]
    ended = {cell: {s: r for s, r in of.items() if "failed" not in r} for cell, of in RUNS.items()}
    assert noise(ended).startswith(
        "Noise: sampled once on 2048 problems, an accuracy of 0.87 has a standard error of 0.007; over seeds the "
        "cells' standard deviation is 0.030 on average."
    )
    assert noise({"a": {}}) == "No run ended."


def test_a_metric_is_the_mean_of_the_runs_that_have_it_at_a_step() -> None:
    logs = [
        [{"step": 1, "x": 1.0}, {"step": 2, "x": 3.0}, {"step": 2, "y": 1.0}],
        [{"step": 1, "x": 2.0}, {"step": 2, "x": None}],
    ]
    assert mean_by_step(logs, "x") == {1: 1.5, 2: 3.0}
    assert mean_by_step(logs, "z") == {}


@pytest.mark.moderate
def test_page_has_table_plots_noise_commands_and_machine(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps({"step": 1, "entropy": 0.5, "completions/mean_length": 9.0, "grad_norm": 0.1}) + "\n")
    metrics = {cell: dict.fromkeys(of, log) for cell, of in RUNS.items()}
    metrics["c"][1] = tmp_path / "none.jsonl"
    commands = {cell: ["recipes/grpo_math.py", "--seed", "0", "--stop", "a b"] for cell in RUNS}
    question = Question("q", "Which?", {"a": {}, "b": {}, "c": {}}, "a", after=["r"], published="38 % without.\n")
    page = write_report(tmp_path / "q", question, RUNS, commands, metrics, ("a", {"beta": 0.1}))
    text = page.read_text()
    assert text.startswith("# Which?\n\n| cell |")
    for words in (
        "Published for the real model: 38 % without.\n", "![validation accuracy](accuracy.png)",
        "![training](training.png)", "- a: `python recipes/grpo_math.py --seed 0 --stop 'a b'`", "Noise: ",
        "Commit: abc.", "Hardware: a CPU, 1 threads; torch 2.",
        "Entropy of the trained tokens went from 0.50 to 0.50, the same in every cell.",
        "| 30 | 0.500 | 0.500 | 0.500 |", "All cells start from the best cells of: r.",
    ):  # fmt: skip
        assert words in text
    assert read_winner(tmp_path, "q") == {"beta": 0.1}
    shown = section(tmp_path / "q" / PARTS, " It does. ", "lab_q")
    assert shown.startswith("## Which?\n\n**Found.** It does.\n\n| cell |")
    assert "\n\n![validation accuracy](lab_q_accuracy.png)\n\n![training](lab_q_training.png)\n\n<details>" in shown
    assert shown.endswith("torch 2.\n\n</details>\n")
    (tmp_path / "page.md").write_text("\n".join(["# A page\n", shown.replace("lab_q_", "lab_r_"), shown]))
    assert kept_section(tmp_path / "page.md", "lab_q") == shown
    assert kept_section(tmp_path / "page.md", "lab_s") is None
    for name in ("accuracy.png", "training.png"):
        with Image.open(tmp_path / "q" / name) as image:
            assert image.width > 800
    curves = (tmp_path / "q" / "accuracy.csv").read_text().splitlines()
    assert "optimizer steps,a,60,0.91,0.905,0.915,3" in curves  # median and quartiles over seeds
    failed: dict[str, dict[int, dict[str, Any]]] = {"a": {0: {"failed": "x"}}}
    write_report(tmp_path / "none", question, failed, {}, {"a": {}}, ("a", {}))
    assert "No run ended." in (tmp_path / "none" / "report.md").read_text()


@pytest.mark.moderate
def test_a_last_validation_on_other_problems_is_off_the_curve(tmp_path: Path) -> None:
    last = run(0.9)
    for entry, problems in zip(last["validations"], (512, 512, 2048), strict=True):
        entry["problems"] = problems
    write_accuracy_plot(tmp_path / "a.png", {"a": {0: last}, "none": {}}, "title")
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert [line for line in lines if line.startswith("optimizer steps")] == [
        "optimizer steps,a,0,0.4,0.4,0.4,1", "optimizer steps,a,30,0.5,0.5,0.5,1",
    ]  # fmt: skip


def test_what_was_logged_is_discussed_and_nothing_else(tmp_path: Path) -> None:
    for cell, clipped in (("a", 0.01), ("b", 0.03)):
        rows = [
            {"step": s, "sampling/entropy_estimate": 1 - 0.05 * s - 0.025, "entropy": 0.5 - 0.02 * s,
             "clip_ratio/region_mean": clipped}
            for s in range(20)
        ]  # fmt: skip
        rows += [{"step": 0, "validation/mean_tokens": 16}, {"step": 19, "validation/mean_tokens": 17}]
        rows += [{"step": 19, "completions/mean_length": 17.25}] * (cell == "a")
        (tmp_path / cell).write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = training_curves({cell: {0: tmp_path / cell} for cell in "ab"})
    assert [panel.metric for panel in curves] == [
        "sampling/entropy_estimate",
        "entropy",
        "completions/mean_length",
        "validation/mean_tokens",
        "clip_ratio/region_mean",
    ]  # no empty panel
    assert discussion(curves) == [
        "Entropy of all sampled tokens went from 0.95 to 0.05, the same in every cell.",
        "Entropy of the trained tokens went from 0.49 to 0.13, the same in every cell.",
        "The response length went from 17.2 to 17.2 in a, the only cell that logs it.",
        "The response length in validation went from 16.0 to 17.0, the same in every cell.",
        "The clip fraction went from 0.0200 to 0.0200 on average, least in a (0.0100 at the end), most in b (0.0300).",
    ]
    assert training_curves({"a": {}}) == {}


def test_accuracy_by_step_has_the_steps_of_all_cells() -> None:
    steps = [(5, 0.1), (60, 0.4), (60, 0.2)]  # the last one is the final validation, on more problems
    other = {0: {"validations": [{"step": step, "accuracy": accuracy} for step, accuracy in steps]}}
    assert steps_table({"a": RUNS["a"], "d": other, "none": {}})[2:] == [
        "| 0 | 0.400 | – |", "| 5 | – | 0.100 |", "| 30 | 0.500 | – |", "| 60 | 0.910 | 0.200 |",
    ]  # fmt: skip
    assert steps_table({"none": {}}) == []


def test_accuracy_by_step_is_over_seeds_whose_steps_differ() -> None:
    def run(*steps: int, first: float) -> dict[str, Any]:
        return {"validations": [{"step": step, "accuracy": first + i / 4} for i, step in enumerate(steps)]}

    seeds = {0: run(0, 10, 21, first=0.0), 1: run(0, 12, 24, first=0.25)}
    assert steps_table({"a": seeds})[2:] == ["| 0 | 0.125 |", "| 11 | 0.375 |", "| 22 | 0.625 |"]
    early = {0: run(0, 10, first=0.0), 1: run(0, 10, 21, first=0.25)}
    assert steps_table({"a": early})[2:] == ["| 0 | 0.125 |", "| 10 | 0.375 |", "| 21 | 0.750 |"]


def test_a_runs_newest_figures_fit_in_a_line(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert latest(log) == "starting"
    lines = [{"step": 1, "reward": 0.0, "loss": 0.1, "wall_clock_s": 3.0}, {"step": 2, "validation/accuracy": 0.25}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert latest(log) == "step 2, reward 0.00, loss 0.10, accuracy 0.250, 3 s"
    with log.open("a") as file:
        file.write('{"step": 3, "rew')  # being written
    assert latest(log) == ""


# The command.


def lab(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "recipes" / "lab.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)


@pytest.mark.slow
def test_questions_are_listed_and_unknown_ones_are_refused() -> None:
    listed = lab("--list")
    assert "baseline: Does subtracting" in listed.stdout
    assert "    no_baseline: preset=no_baseline\n" in listed.stdout
    unknown = lab("basline")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
    assert "unknown question 'basline'. Did you mean 'baseline'" in unknown.stderr
    elsewhere = lab("baseline", "--lab", "none")
    assert (
        "--lab 'none': no such folder. Known: distillation, effects, mini_math, qwen2.5_math_1.5b" in elsewhere.stderr
    )


@pytest.mark.nightly
@pytest.mark.slow  # four runs of the recipe
def test_a_question_is_answered_with_failed_cells_and_once_only(tmp_path: Path, folder: Path) -> None:
    tiny = {
        "max_steps": 3, "rollout_batch_size": 16, "group_size": 4, "train_batch_size": 16,
        "micro_train_batch_size": 8, "sampling_max_tokens": 8, "train_problems": 32, "validation_problems": 8,
        "final_validation_problems": 16, "validate_every": 2, "save_strategy": "no", "preset": "grpo_clip",
        "gradient_checkpointing": False, "report_to": "none", "logging_steps": 1, "learning_rate": 1e-4,
        "model_name_or_path": str(make_base_policy(0, tmp_path / "policies", SMALL, progress=False)),
    }  # fmt: skip
    (folder / "recipe" / "base.yaml").write_text(yaml.safe_dump(tiny))
    (folder / "lab.yaml").write_text("config: recipe/base.yaml\nsettings: {disable_tqdm: true}\n")
    reward = folder / "mine.py"
    reward.write_text("def fails(completions, **_):\n    raise ValueError('not today')\n")
    (folder / "which.yaml").write_text(
        yaml.safe_dump(QUESTION | {"cells": {"a": {}, "b": {"reward": f"{reward}:fails"}}})
    )
    arguments = ["which", "--lab", folder, "--seeds", 0, 1, "--jobs", 2, "--output_dir", tmp_path / "out"]
    done = lab(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "out" / "which" / "report.md").read_text()
    assert text.count("not today") == 2
    kept = (tmp_path / "out" / "runs" / "seed=0" / "summary.json").stat().st_mtime_ns
    summary = json.loads((tmp_path / "out" / "runs" / "seed=1" / "summary.json").read_text())
    assert [(v["step"], v["problems"]) for v in summary["validations"]] == [(0, 8), (2, 8), (3, 16)]
    (folder / "which.yaml").write_text(yaml.safe_dump(QUESTION))
    again = lab(*arguments)
    assert again.returncode == 0, again.stderr[-2000:]
    assert (tmp_path / "out" / "runs" / "seed=0" / "summary.json").stat().st_mtime_ns == kept
    assert "learning_rate 0.001" in (tmp_path / "out" / "which" / "report.md").read_text().replace("--", "")
