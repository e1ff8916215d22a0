"""SFT, expert iteration and pipelines as they are started: settings, files, learning, resuming."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.recipes.test_grpo import ON_A_CPU, ROOT, SMALL, rows, without_times
from tests.support.recipe import run_recipe
from tests.support.tiny import save_tiny
from trl_ext.errors import InputError
from trl_ext.mini.policy import make_base_policy
from trl_ext.recipes.cli import parse
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.sft import SFT_SETTINGS, SFTTask
from trl_ext.tools.experiments.pipeline.settings import read_pipeline

RECIPES = ROOT / "recipes"
YAMLS = [
    *((path, SFT_SETTINGS) for path in sorted(RECIPES.glob("sft_*.yaml"))),
    *((path, EXPERT_ITERATION_SETTINGS) for path in sorted(RECIPES.glob("expert_iteration*.yaml"))),
]
SMALL_RUN: dict[str, Any] = {
    "train_batch_size": 8, "micro_train_batch_size": 4, "sampling_max_tokens": 8, "validation_problems": 8,
    "max_length": 256, "stop": ["</answer>"], "report_to": "none", "gradient_checkpointing": False,
    "dataloader_pin_memory": False, "logging_steps": 1, "lr_scheduler_type": "constant",
}  # fmt: skip
SMALL_SFT = {**SMALL_RUN, "train_problems": 40, "max_steps": 3, "validate_every": 2, "save_strategy": "no"}
SMALL_EI = {
    **SMALL_RUN, "train_problems": 16, "n_ei_steps": 2, "questions_per_step": 4, "group_size": 2, "save_steps": 1,
    "validation_grader": "tests/recipes/test_sft_and_pipeline.py:anything", "rollout_chunk": 4,
}  # fmt: skip


def anything(responses: list[str], truths: list[Any]) -> list[Any]:
    """A grader for a policy that knows nothing: every other response is correct."""
    from trl_ext.rewards.graders import Grade

    return [Grade(True, text[:3], len(text) % 2 == 0, "by length") for text in responses]


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "settings"), YAMLS, ids=[path.stem for path, _ in YAMLS])
def test_every_yaml_that_ships_resolves(path: Path, settings: Any) -> None:
    task, _, config = parse(settings, "about", path, ON_A_CPU)
    assert config.output_dir == f"runs/{path.stem}"
    assert config.max_grad_norm == 1.0
    assert (task.prompt, config.stop) == ("r1_zero", ["</answer>"])
    written = yaml.safe_load(path.read_text()).get("train_batch_size", 64)  # 64: the handout's
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == written


def test_qwen_math_expert_iteration_has_the_handout_settings() -> None:
    path = RECIPES / "expert_iteration_qwen2.5_math_1.5b.yaml"
    task, model, config = parse(EXPERT_ITERATION_SETTINGS, "about", path, ON_A_CPU)
    assert model.model_name_or_path == "Qwen/Qwen2.5-Math-1.5B"
    assert task.dataset == "DigitalLearningGmbH/MATH-lighteval"
    resolved = {"n_ei_steps": 5, "questions_per_step": 1024, "sampling_min_tokens": 4, "sampling_temperature": 1.0,
                "sampling_max_tokens": 1024}  # fmt: skip
    assert {name: getattr(config, name) for name in resolved} == resolved
    assert config.max_steps == 5 * config.epochs_per_step * 1024 * config.group_size // 64  # at most


@pytest.mark.parametrize("path", sorted(RECIPES.glob("pipeline*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_pipeline_is_readable_and_its_files_exist(path: Path) -> None:
    pipeline = read_pipeline(path)
    assert len(pipeline.stages) > 1
    assert pipeline.time_budget is not None
    for stage in pipeline.stages:
        assert stage.config is None or (ROOT / stage.config).is_file()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_unique_examples": "half"}, "num_unique_examples must be a positive number or full, got 'half'"),
        ({"num_unique_examples": "0"}, "must be a positive number or full, got '0'"),
        ({"validation_grader": "stritc"}, "Did you mean 'strict'"),
        ({"validate_every": 0}, "validate_every must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SFTTask(**settings)


# --- which traces -----------------------------------------------------------------------------------------------


def chosen(**settings: Any) -> tuple[list[dict[str, Any]], dict[str, int], list[str]]:
    """Traces that a task fine-tunes on, their counts, and what a run prints of them."""
    data = SFTTask(validation_problems=1, **settings).data(seed=0)
    return data.train, data.counts, data.lines()


def test_only_correct_traces_are_kept_counted_and_reported() -> None:
    rows, counts, said = chosen(train_problems=200, filter_correct=True)
    everything, _, _ = chosen(train_problems=200)
    assert counts == {"unique": len(everything), "correct": len(rows), "chosen": len(rows)}
    assert 0.4 < len(rows) / len(everything) < 0.8
    assert said == [f"{len(rows)} of {len(everything)} traces have the correct answer"]
    some, counts, _ = chosen(train_problems=200, filter_correct=True, num_unique_examples="10")
    assert some == rows[:10]
    assert counts["chosen"] == 10


def test_traces_without_answers_use_those_of_the_same_prompt(tmp_path: Path) -> None:
    problems = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "problems_train.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    (tmp_path / "problems_validation.jsonl").write_text(json.dumps(problems[0]) + "\n")
    settings = {"dataset": str(tmp_path / "problems_{split}.jsonl"), "traces": str(tmp_path / "sft.jsonl")}
    prompts = [row["prompt"] for row in SFTTask(**settings).read("train", None, 0).rows]
    traces = [{"prompt": p, "response": f" Easy. </think> <answer> {[1, 2, 9, 4][i]} </answer>"} for i, p in enumerate(prompts)]  # fmt: skip
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(t) + "\n" for t in traces))
    rows, counts, _ = chosen(filter_correct=True, **settings)
    assert {row["answer"] for row in rows} == {"1", "2", "4"}
    assert counts == {"unique": 4, "correct": 3, "chosen": 3}


# --- runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_base_policy(0, tmp_path_factory.mktemp("cache"), SMALL, progress=False))


def started(script: str, *arguments: str, cwd: Path, timeout: int = 280) -> str:
    """What the recipe printed."""
    done = subprocess.run(
        [sys.executable, str(RECIPES / script), *arguments], cwd=cwd, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def run_here(settings: tuple[type, ...], content: dict[str, Any], folder: Path, policy: str, *arguments: str) -> Any:
    """The recipe in this process."""
    (folder / "mine.yaml").write_text(yaml.safe_dump({**content, "model_name_or_path": policy, "disable_tqdm": True}))
    given = ["--config", str(folder / "mine.yaml"), "--output_dir", str(folder / "run"), *ON_A_CPU, *arguments]
    return run_recipe(*parse(settings, "about", folder / "mine.yaml", given))


@pytest.mark.slow
def test_fine_tuning_leaves_a_run_that_its_config_reproduces(tmp_path: Path, policy: str) -> None:
    summary = run_here(SFT_SETTINGS, SMALL_SFT, tmp_path, policy, "--filter_correct", "--num_unique_examples", "12")
    folder = tmp_path / "run"
    assert [v["step"] for v in summary["validations"]] == [0, 2, 3]
    assert summary["trace_counts"]["chosen"] == 12
    assert summary["recipe"] == "sft"
    metrics = rows(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3]
    assert all(m["entropy"] > 0 and m["grad_norm"] > 0 for m in metrics if "loss" in m)
    assert {g["step"] for g in rows(folder / "generations.jsonl")} == {0, 2, 3}
    assert (
        "fine-tuned on 12 reasoning traces with the correct answer of `mini_math`" in (folder / "README.md").read_text()
    )
    assert (folder / "curve.png").exists()
    written = folder / "config.yaml"
    run_recipe(*parse(SFT_SETTINGS, "about", written, ["--config", str(written), *ON_A_CPU]))
    again = tmp_path / "run-2"
    first, second = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, again))
    assert all(first[name].equal(second[name]) for name in first)
    assert without_times(rows(again / "metrics.jsonl")) == without_times(metrics)


@pytest.mark.slow
def test_packing_and_handout_normalizer_run_from_command_line(tmp_path: Path, policy: str) -> None:
    packed = run_here(SFT_SETTINGS, SMALL_SFT, tmp_path, policy, "--packing", "--packing_strategy", "wrapped")
    assert packed["validations"][-1]["step"] == 3
    constant = run_here(SFT_SETTINGS, SMALL_SFT, tmp_path, policy, "--normalize_constant", "100")
    assert constant["normalize_constant"] == 100.0


@pytest.mark.slow
def test_an_adapter_is_trained_by_expert_iteration(tmp_path: Path, policy: str) -> None:
    lora = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--lora_r", "4"]
    summary = run_here(EXPERT_ITERATION_SETTINGS, SMALL_EI, tmp_path, policy, *lora)
    assert len(summary["steps"]) == 2
    assert (tmp_path / "run" / "adapter_config.json").exists()


@pytest.mark.slow
def test_expert_iteration_saves_its_steps_and_resumes(tmp_path: Path, policy: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    run_here(EXPERT_ITERATION_SETTINGS, {**SMALL_EI, "save_total_limit": 9, "save_steps": 500}, whole, policy)
    run = whole / "run"
    steps = rows(run / "expert_iteration" / "steps.jsonl")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    ends = {step["optimizer_step"] + step["optimizer_steps"] for step in steps}
    assert ends <= {int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*")}
    assert [v["step"] for v in summary["validations"]][1:] == [s["optimizer_step"] + s["optimizer_steps"] for s in steps]  # fmt: skip
    assert (run / "expert_iteration.png").exists()
    assert "fine-tuned by expert iteration on its own correct answers" in (run / "README.md").read_text()
    logged = [m for m in rows(run / "metrics.jsonl") if "expert_iteration/kept" in m]
    assert [m["expert_iteration/kept"] for m in logged] == [s["kept"] for s in steps]

    first = steps[0]["optimizer_steps"]
    subprocess.run(["cp", "-r", str(run), str(cut / "run")], check=True)
    for step in range(first + 1, summary["validations"][-1]["step"] + 1):
        subprocess.run(["rm", "-rf", str(cut / "run" / f"checkpoint-{step}")], check=True)
    run_here(
        EXPERT_ITERATION_SETTINGS,
        {**SMALL_EI, "save_total_limit": 9, "save_steps": 500},
        cut,
        policy,
        "--resume",
        "auto",
    )
    models = [AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (run, cut / "run")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    assert without_times(rows(cut / "run" / "metrics.jsonl")) == without_times(rows(run / "metrics.jsonl"))


@pytest.mark.slow
def test_pipeline_passes_its_model_shares_its_budget_and_resumes(tmp_path: Path, policy: str) -> None:
    grpo = {"max_steps": 2, "rollout_batch_size": 8, "group_size": 4, "train_batch_size": 8, "micro_train_batch_size": 8,
            "train_problems": 16, "validation_problems": 8, "sampling_max_tokens": 8, "save_strategy": "no"}  # fmt: skip
    sft = {k: v for k, v in SMALL_SFT.items() if k not in ("report_to", "dataloader_pin_memory")}
    stages = [{"recipe": "sft", "share": 0.5, "settings": sft}, {"recipe": "grpo", "settings": grpo}]
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({"time_budget": 500, "stages": stages}))
    given = ["--config", "chain.yaml", "--model_name_or_path", policy]
    printed = started("pipeline.py", *given, cwd=tmp_path)
    folder = tmp_path / "runs" / "chain"
    summary = json.loads((folder / "summary.json").read_text())
    record = json.loads((folder / "pipeline.json").read_text())
    assert "after all stages" in printed
    assert record["1_sft"]["time_budget"] == 250
    used = record["overhead"]["seconds"] + record["1_sft"]["seconds"] + 4  # seconds of the report of all stages
    assert record["2_grpo"]["time_budget"] == pytest.approx(500 - used, abs=0.2)  # three roundings to 0.1
    assert yaml.safe_load((folder / "2_grpo" / "config.yaml").read_text())["model_name_or_path"].endswith("1_sft")
    assert [v["step"] for v in summary["validations"]] == [0, 2, 3, 3, 5]
    assert summary["validations"][2]["accuracy"] == summary["validations"][3]["accuracy"]  # the same policy
    clock = [v["wall_clock_s"] for v in summary["validations"]]
    assert clock == sorted(clock)
    assert (folder / "curve.png").exists()

    begun = (folder / "2_grpo" / "summary.json").stat().st_mtime_ns
    assert "stage" not in started("pipeline.py", *given, cwd=tmp_path).partition("after all")[0]
    assert (folder / "2_grpo" / "summary.json").stat().st_mtime_ns == begun


@pytest.mark.nightly
@pytest.mark.slow
def test_a_pipelines_stages_are_checked_before_the_first_runs(tmp_path: Path) -> None:
    stages = [{"recipe": "sft"}, {"recipe": "grpo", "settings": {"preset": "grpo_clp"}}]
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump({"stages": stages}))
    done = subprocess.run(
        [sys.executable, str(RECIPES / "pipeline.py"), "--config", "chain.yaml"], cwd=tmp_path, capture_output=True,
        text=True, timeout=100, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "stage 2 (grpo): unknown preset 'grpo_clp'. Did you mean 'grpo_clip'" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "runs" / "chain").iterdir()] == ["pipeline.json"]  # the time it took


@pytest.mark.nightly
@pytest.mark.slow
def test_several_sizes_are_run_once_each_and_plotted(tmp_path: Path, policy: str) -> None:
    flags = [text for name, value in SMALL_SFT.items() if not isinstance(value, (list, bool)) for text in (f"--{name}", str(value))]  # fmt: skip
    given = ["--sizes", "8", "--filter_correct", "both", "--jobs", "2", "--model_name_or_path", policy, *flags]
    printed = started("sft_sizes.py", *given, cwd=tmp_path)
    found = json.loads((tmp_path / "runs" / "sft_sizes" / "sizes.json").read_text())
    assert [(r["num_unique_examples"], r["filter_correct"]) for r in found] == [("8", False), ("8", True)]
    assert "only traces with the correct answer: 8 " in printed
    assert (tmp_path / "runs" / "sft_sizes" / "sizes.png").exists()
    (tmp_path / "runs" / "sft_sizes" / "sizes.png").unlink()
    started("sft_sizes.py", *given, cwd=tmp_path, timeout=40)  # from what is there
    assert (tmp_path / "runs" / "sft_sizes" / "sizes.png").exists()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_embedded_default_expert_iteration_learns(
    tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(policy_cache))
    started("expert_iteration.py", cwd=tmp_path, timeout=580)
    summary = json.loads((tmp_path / "runs" / "expert_iteration" / "summary.json").read_text())
    assert summary["validation_problems"] == 512
    assert summary["validation_accuracy_before"] <= 0.5
    assert summary["validation_accuracy_after"] >= 0.8


def test_missing_trace_file_is_refused_before_anything_loads(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    with pytest.raises(InputError, match=r"no file '.*none.jsonl'"):
        run_here(SFT_SETTINGS, {"traces": str(tmp_path / "none.jsonl"), **SMALL_RUN}, tmp_path, str(tmp_path))


def test_runs_of_several_recipes_are_plotted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, last in (("sft", 0.5), ("grpo", 0.75)):
        (tmp_path / name).mkdir()
        validations = [
            {"step": step, "wall_clock_s": step, "accuracy": a} for step, a in ((0, 0.25), (1, 1.0), (2, last))
        ]
        summary = {"validation_accuracy_before": 0.25, "validation_accuracy_after": last, "wall_clock_s": 12.4,
                   "best_validation_accuracy": 1.0, "validations": validations}  # fmt: skip
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(sys, "argv", ["plot_runs.py", str(tmp_path / "sft"), str(tmp_path / "grpo"), "--output", str(tmp_path / "a.png")])  # fmt: skip
    runpy.run_path(str(RECIPES / "plot_runs.py"), run_name="__main__")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["sft", "0.250", "0.500", "1.000", "12"]
    assert printed[2].split() == ["grpo", "0.250", "0.750", "1.000", "12"]


def test_every_setting_of_a_task_has_help() -> None:
    for settings in (SFT_SETTINGS, EXPERT_ITERATION_SETTINGS):
        for field in dataclasses.fields(settings[0]):
            assert field.metadata["help"]
