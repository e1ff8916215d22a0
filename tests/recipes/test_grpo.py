"""The recipe: what it accepts, what it refuses before a model loads, and what it leaves in a run's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import grpo_math
from tests.support.recipe import run_recipe
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.versions import needs_vllm
from trl_ext import ADVANTAGES, PRESETS
from trl_ext.errors import InputError
from trl_ext.generation.model_source import locate
from trl_ext.mini.policy import BasePolicyConfig, make_base_policy
from trl_ext.recipes import preflight
from trl_ext.recipes import run as recipe
from trl_ext.recipes.cli import parse, start
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.grpo import GRPO_SETTINGS, GRPOTask
from trl_ext.recipes.preflight import Prepared, check_server, tokenizer_and_shape
from trl_ext.recipes.run import write_config
from trl_ext.recipes.settings import Data
from trl_ext.recipes.settings_help import other_words
from trl_ext.recipes.sft import SFT_SETTINGS
from trl_ext.rewards import GRADERS
from trl_ext.runs.folder import Run
from trl_ext.runs.recipes import RECIPES

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "grpo_math.py"
DEFAULT = RECIPE.with_suffix(".yaml")
CONFIGS = sorted((ROOT / "recipes").glob("grpo_*.yaml"))
ON_A_CPU = ["--bf16", "false"]  # Trainer refuses bf16 without a device that has it
SMALL = BasePolicyConfig(hidden=32, layers=1, heads=1, intermediate=32, steps=3, batch=4)
TINY_RUN = {
    "max_steps": 4,
    "rollout_batch_size": 16,
    "group_size": 4,
    "train_batch_size": 16,
    "micro_train_batch_size": 8,
    "sampling_max_tokens": 8,
    "train_problems": 32,
    "validation_problems": 16,
    "validate_every": 3,
    "log_generations_every": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "stop": ["</answer>"],
    "preset": "grpo_clip",
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], default: Path = DEFAULT) -> str:
    """What stands on stderr when `arguments` end the process while they are parsed."""
    with pytest.raises(SystemExit) as stop:
        parse(GRPO_SETTINGS, "about", default, arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def write_splits(folder: Path, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> None:
    """`train.jsonl` and `validation.jsonl`."""
    for name, given in (("train", train), ("validation", validation)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))


# --- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_yaml_that_ships_resolves(path: Path) -> None:
    task, _, config = parse(GRPO_SETTINGS, "about", path, ON_A_CPU)
    assert config.uses_axes
    assert config.output_dir == f"runs/{path.stem}"
    assert task.prompt == ("chat" if re.search("laptop|gb$|t4", path.stem) else "r1_zero")
    assert config.generation_batch_size == config.rollout_batch_size


@pytest.mark.moderate
@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_preset_may_take_the_place_of_the_yamls(path: Path) -> None:
    for preset, members in PRESETS.items():
        teacher = ["--teacher", "a/model"] * members.needs_teacher
        _, _, config = parse(GRPO_SETTINGS, "about", path, [*ON_A_CPU, "--preset", preset, *teacher])
        chosen = (config.advantage, config.policy_loss, config.aggregation)
        assert chosen == (members.advantage, members.policy_loss, members.aggregation)


def test_qwen_on_math_has_the_handouts_hyperparameters() -> None:
    task, model, config = parse(GRPO_SETTINGS, "about", ROOT / "recipes" / "grpo_math_qwen2.5_math_1.5b.yaml", ON_A_CPU)
    assert model.model_name_or_path == "Qwen/Qwen2.5-Math-1.5B"
    assert task.dataset == "DigitalLearningGmbH/MATH-lighteval"
    resolved = {
        "max_steps": 200, "learning_rate": 1e-5, "advantage": "group_std",
        "generation_batch_size": 256, "num_generations": 8, "temperature": 1.0, "sampling_min_tokens": 4,
        "max_completion_length": 1024, "num_iterations": 1, "gradient_accumulation_steps": 128,
        "per_device_train_batch_size": 2, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "use_vllm": torch.cuda.is_available(), "vllm_mode": "colocate", "stop": ["</answer>"], "beta": 0.0,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in resolved} == resolved
    assert ADVANTAGES.options("group_std") == {"eps": 1e-6}


def test_command_line_overrides_yaml_and_trainer_flags_work(tmp_path: Path) -> None:
    flags = {
        "output_dir": str(tmp_path),
        "seed": 7,
        "max_steps": 3,
        "report_to": "tensorboard,wandb",
        "learning_rate": 0.5,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    _, _, config = parse(GRPO_SETTINGS, "about", DEFAULT, [*arguments, "--aggregation", "constant", "--push_to_hub"])
    assert {name: getattr(config, name) for name in flags} == flags | {"report_to": ["tensorboard", "wandb"]}
    assert config.push_to_hub
    assert (config.preset, config.policy_loss, config.aggregation) == ("grpo_clip", "ppo_clip", "constant")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "grpo_clp"], ["unknown preset 'grpo_clp'", "Did you mean 'grpo_clip'", "dr_grpo"]),
        (["--aggregation", "token_men"], ["token_men", "Did you mean 'token_mean'", "sequence_mean"]),
        (["--policy_loss_options", "eps_lw=0.1"], ["eps_lw", "eps_low"]),
        (["--kl_estimator", "k4"], ["k4", "k1, k2, k3"]),
        (["--reward", "stric"], ["stric", "Did you mean 'strict'", "compatible"]),
        (["--validation_grader", "lenient"], ["unknown grader 'lenient'", "compatible, countdown, judge, strict"]),
        (["--answer_format", "box"], ["unknown answer format 'box'", "Did you mean 'boxed'"]),
        (["--prompt", "r1_zer"], ["r1_zer", "question_only"]),
        (["--group_size", "7"], ["rollout_batch_size (128)", "group_size (7)"]),
        (["--validate_every", "0"], ["validate_every must be at least 1, got 0"]),
        (
            ["--dataset", "my/data.jsonl"],
            ["'my/data.jsonl' is one file", "data_{split}.jsonl", "data_validation.jsonl"],
        ),
        (["--validation_split", "train"], ["both on the split 'train' of 'mini_math'", "--validation_split"]),
        (["--too_long", "cut"], ["too_long must be one of refuse, drop, got 'cut'"]),
        (["--max_stps", "3"], ["--max_stps", "Did you mean --max_steps?"]),
        (["--G", "8"], ["unknown setting --G. Did you mean --group_size?"]),
        (["--foresee", "false"], ["unknown setting --foresee. Did you mean --check_memory?"]),
        (["--constant_normalizer", "7"], ["Did you mean --aggregation?"]),  # --normalize_constant is of fine-tuning
        (["--max_steps", "three"], ["--max_steps", "three"]),
        (["--max_steps", "0"], ["max_steps is 0, which trains nothing", "recipes/evaluate.py"]),
        (["--learning_rate", "-1"], ["learning_rate must be finite and at least 0, got -1.0"]),
        (["--learning_rate", "-1e-5"], ["learning_rate must be finite and at least 0, got -1e-05"]),
        (["--max_steps", "3", "--config"], ["error: argument --config: expected one argument"]),
        (["--learning_rate", "nan"], ["learning_rate must be finite", "got nan"]),
        (["--learning_rate", "fast"], ["--learning_rate", "fast"]),
        (["--config=recipes/none.yaml"], ["recipes/none.yaml"]),
        (["--config", "recipes/none.yaml"], ["--config recipes/none.yaml: there is no such file"]),
        (["--policy_loss", "recipes/none.py:loss"], ["recipes/none.py"]),
    ],
    ids=lambda value: "_".join(value).strip("-") if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_a_mistake_ends_the_run_while_arguments_are_parsed(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(arguments, capsys)
    assert all(word in said for word in words), said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_the_handouts_words_are_answered_with_settings() -> None:
    recipes = {name: recipe.settings() for name, recipe in RECIPES.items()}
    fields = {name: {f.name for part in parts for f in dataclasses.fields(part)} for name, parts in recipes.items()}
    words = {name: other_words(parts) for name, parts in recipes.items()}
    assert {"gpu_memory_utilization", "n_train_steps_per_rollout_batch", "D_b", "normalize_by_std"} <= set().union(
        *words.values()
    )
    for name, flags in words.items():
        assert all(flag[2:] in fields[name] for flag in flags.values()), name
    for word in set().union(*words.values()):
        assert not all(word in names for names in fields.values()), f"{word} is a setting"
    assert words["grpo"]["reward_fn"] == "--reward"
    assert words["sft"]["reward_fn"] == "--validation_grader"
    assert words["expert_iteration"]["D_b"] == "--questions_per_step"


def test_a_field_that_a_yaml_misspells_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("max_stps: 3\n")
    said = refused([f"--config={path}"], capsys)
    assert f"unknown setting --max_stps in {path}. Did you mean --max_steps?" in said
    path.write_text("max_steps: [3\n")
    assert "line" in refused(["--config", str(path)], capsys)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_written_config_has_every_setting_and_resolves_equal(path: Path, tmp_path: Path) -> None:
    first = parse(GRPO_SETTINGS, "about", path, [*ON_A_CPU, "--hub_token", "hf_secret", "--learning_rate", "3e-7"])
    write_config(tmp_path / "config.yaml", *first)
    text = (tmp_path / "config.yaml").read_text()
    assert "hf_secret" not in text
    assert "learning_rate: 3.0e-07" in text
    mentioned = {line.removeprefix("# ").partition(":")[0] for line in text.splitlines()}
    every = {f.name for part in first for f in dataclasses.fields(part) if f.init}
    assert every - mentioned == {"hub_token"}
    again = parse(GRPO_SETTINGS, "about", tmp_path / "config.yaml", ["--hub_token", "hf_secret"])
    for before, after in zip(first, again, strict=True):
        assert comparable(before) == comparable(after)


def comparable(settings: Any) -> dict[str, Any]:
    """The fields as text, without what a run's own folder or device makes of them."""
    return {f.name: str(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}


def test_answer_format_of_both_graders_follows_the_prompt() -> None:
    assert GRPOTask().answer_format == "r1_zero"
    assert GRPOTask(prompt="question_only").answer_format == "boxed"
    task = GRPOTask(prompt="question_only", answer_format="r1_zero", validation_grader="strict", reward="compatible")
    for function in (task.reward_functions()[0], task.grader()):
        assert function.keywords == {"answer_format": "r1_zero"}
    assert (task.reward_functions()[0].__name__, task.grader().__name__) == ("compatible", "strict")


def test_tolerance_is_for_the_strict_grader_or_is_refused() -> None:
    task = GRPOTask(numeric_tolerance=0.01)
    assert task.reward_functions()[0](["</think> <answer>0.333</answer>"], ["1/3"]) == [1.0]
    assert GRPOTask().reward_functions()[0](["</think> <answer>0.333</answer>"], ["1/3"]) == [0.0]
    strict = GRPOTask(numeric_tolerance=0.01, validation_grader="strict").grader()
    assert [verdict.correct for verdict in strict(["</think> <answer>1001</answer>"] * 2, ["1000", "900"])] == [
        True,
        False,
    ]
    with pytest.raises(
        ValueError, match=r"numeric_tolerance 0\.01 is for the grader strict, .* compatible and compatible"
    ):
        GRPOTask(numeric_tolerance=0.01, reward="compatible")


def test_strict_grader_wants_answers_worked_out_by_default() -> None:
    asked = ["</think> <answer>17+25</answer>", "</think> <answer>42</answer>"]
    defaults = {None: [0.0, 1.0], True: [0.0, 1.0], False: [1.0, 1.0]}
    for worked_out, paid in defaults.items():
        task = GRPOTask(worked_out=worked_out, validation_grader="strict")
        assert task.reward_functions()[0](asked, ["42", "42"]) == paid
        assert [float(grade.correct) for grade in task.grader()(asked, ["42", "42"])] == paid
    reward = GRPOTask().reward_functions()[0]
    for problem, paid in (("Reduce $\\frac{24}{36}$.", 0.0), ("How much of it?", 1.0)):  # as TRL calls it
        assert reward(
            prompts=[problem], completions=[r"</think> <answer> \frac{24}{36} </answer>"], answer=["2/3"]
        ) == [paid]
    theirs = Evaluation(responses="theirs.jsonl", grader="strict")
    assert [grade.correct for grade in theirs.build(GRADERS, "strict")(asked, ["42", "42"])] == [True, True]


def test_training_is_strict_and_validation_compatible_by_default() -> None:
    for path in CONFIGS:
        task, _, _ = parse(GRPO_SETTINGS, "about", path, ON_A_CPU)
        if task.prompt == "chat":  # not the course's
            assert (task.reward, task.validation_grader) == ("strict", "strict")
            continue
        if task.dataset == "countdown_game":  # of which a problem has many solutions
            assert (task.reward, task.validation_grader) == ("countdown", "countdown")
            continue
        reward = "compatible" if "gsm8k" in path.stem else "strict"  # GSM8K's homework trains by the compatible grader
        assert (task.reward, task.validation_grader) == (reward, "compatible")


def test_only_generated_data_has_a_default_number_of_problems() -> None:
    for settings, recipe_name in ((GRPO_SETTINGS, "grpo_math"), (SFT_SETTINGS, "sft_math")):
        default = ROOT / "recipes" / f"{recipe_name}.yaml"
        task, _, _ = parse(settings, "about", default, ON_A_CPU)
        assert task.train_problems == 4096
        flag = "--dataset" if recipe_name == "grpo_math" else "--traces"
        task, _, _ = parse(settings, "about", default, [*ON_A_CPU, flag, "mine_{split}.jsonl"])
        assert task.train_problems is None


def test_a_reward_of_your_own_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(completions, **_):\n    return [-float(len(c)) for c in completions]\n"
    )
    assert GRPOTask(reward=f"{tmp_path / 'mine.py'}:short").reward_functions()[0](["abc"]) == [-3.0]


@pytest.mark.moderate
@needs_vllm
@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"sampling_max_tokens": 126}, "the model's max_position_embeddings"),
        ({"use_vllm": True, "vllm_max_model_length": 20}, "vllm_max_model_length"),
    ],
    ids=["model", "vllm"],
)
def test_grpo_refuses_or_drops_prompts_beyond_the_context(
    settings: dict[str, Any],
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def opened(prepared: Prepared) -> Any:
        given.append(prepared.data)
        with recipe.open_run(prepared):
            raise InputError("far enough")
        yield

    given: list[Any] = []
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    shape = tiny_model().config
    shape.vocab_size = len(tiny_tokenizer())
    type(tiny_model())(shape).save_pretrained(tmp_path / "model")
    problem = {"problem": "a " * 30, "answer": "1"}
    short = [{"problem": f"a {n}", "answer": "1"} for n in range(8)]
    write_splits(tmp_path, [*short[:4], problem], [*short[4:7], {**problem, "problem": "b " * 30}])
    (tmp_path / "bare.prompt").write_text("{question}")
    task = {"dataset": str(tmp_path / "{split}.jsonl"), "prompt": str(tmp_path / "bare.prompt")}
    run = {"output_dir": str(tmp_path / "run"), "model_name_or_path": str(tmp_path / "model"), **task}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, **run, **settings}))
    with pytest.raises(InputError, match=rf"train, line 5 of .*train\.jsonl': its prompt of 30 tokens .*{setting}"):
        run_recipe(*parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(grpo_math, "open_run", opened)
    task_of_run = parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", [*ON_A_CPU, "--too_long", "drop"])
    with pytest.raises(InputError, match="far enough"):
        run_recipe(*task_of_run)
    assert [len(given[0].train), len(given[0].validation)] == [4, 3]
    said = capsys.readouterr().out
    assert "train: 4 problems of 5" in said
    assert "1 too long and left out: line 5" in said
    assert "validation: 3 problems of 4" in said
    assert given[0].sources["validation"].too_long == ["line 4"]
    larger = parse(
        GRPO_SETTINGS, "about", tmp_path / "mine.yaml", [*ON_A_CPU, "--too_long", "drop", "--group_size", "2"]
    )
    with pytest.raises(
        InputError, match=r"a rollout needs 8 different training problems .* there are 4: lower rollout_b"
    ):
        run_recipe(*larger)


def test_a_fork_may_train_on_rows_of_its_own(tmp_path: Path) -> None:
    shape = tiny_model().config
    shape.vocab_size = len(tiny_tokenizer())
    for part in (type(tiny_model())(shape), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    path, asked = tmp_path / "mine.yaml", []
    run = {"output_dir": str(tmp_path / "run"), "model_name_or_path": str(tmp_path / "model"), "seed": 7}
    path.write_text(yaml.safe_dump({**TINY_RUN, **run}))
    task, model, config = parse(GRPO_SETTINGS, "about", path, ON_A_CPU)
    rows = [{"prompt": f"a {n}", "answer": "1"} for n in range(8)]
    prepared = preflight.prepare(task, model, config, lambda seed: asked.append(seed) or Data(rows[:6], rows[5:]))
    with recipe.open_run(prepared) as opened:
        assert opened.data.train == rows[:6]
        assert opened.folder == tmp_path / "run"
        assert (opened.folder / "config.yaml").is_file()
    assert (asked, opened.data.lines(), opened.run.settings["policy"]) == ([7], [], str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("settings", "default"), [(GRPO_SETTINGS, "grpo_math.yaml"), (EXPERT_ITERATION_SETTINGS, "expert_iteration.yaml")]
)
def test_grpo_refuses_unmatchable_reference_answers(settings: Any, default: str, tmp_path: Path) -> None:
    solutions = [{"problem": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}.\n#### {n + 1}"} for n in range(8)]
    write_splits(tmp_path, solutions, solutions[:3])
    tiny_model().save_pretrained(tmp_path / "model")  # no tokenizer: loading it would fail
    run = {
        "output_dir": tmp_path / "run",
        "model_name_or_path": tmp_path / "model",
        "dataset": tmp_path / "{split}.jsonl",
    }
    flags = [text for name, value in run.items() for text in (f"--{name}", str(value))]
    with pytest.raises(InputError, match=r"train: 8 of 8 reference answers .*--answer_source after_hashes 8 of them"):
        run_recipe(*parse(settings, "about", RECIPE.with_name(default), [*ON_A_CPU, *flags]))
    assert not (tmp_path / "run").exists()


@pytest.mark.moderate
def test_base_policy_build_time_is_that_of_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = tiny_model().config
    shape.vocab_size = len(tiny_tokenizer())
    for part in (type(tiny_model())(shape), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    rows = [{"problem": f"a {n}", "answer": "1"} for n in range(5)]
    write_splits(tmp_path, rows[:4], rows[4:])
    (tmp_path / "bare.prompt").write_text("{question}")
    task = {"dataset": str(tmp_path / "{split}.jsonl"), "prompt": str(tmp_path / "bare.prompt")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, **task, "output_dir": str(tmp_path / "run")}))

    def made_slowly(task: Any, config: Any) -> str:
        time.sleep(0.2)
        return str(tmp_path / "model")

    @contextmanager
    def opened(prepared: Prepared) -> Any:
        with recipe.open_run(prepared) as run:
            starts.append(run.run)
            raise InputError("far enough")
        yield

    starts: list[Run] = []
    monkeypatch.setattr(preflight, "_base_policy", made_slowly)
    monkeypatch.setattr(grpo_math, "open_run", opened)
    settings = parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU)
    with pytest.raises(InputError, match="far enough"):
        run_recipe(*settings)
    assert 0.2 <= starts[0].seconds_to_make_policy < starts[0].clock.seconds()

    resumed = Run(tmp_path / "run", {}, validations=[{"step": 0}], seconds_to_make_policy=40.0)
    monkeypatch.setattr(recipe.runs, "open_run", lambda *_: nullcontext(resumed))
    with pytest.raises(InputError, match="far enough"):
        run_recipe(*parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU))
    assert starts[1].seconds_to_make_policy == 40.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"restore_best": True, "save_strategy": "no"},
            "restore_best goes back to a checkpoint, and save_strategy is no",
        ),
        ({"lora_r": 8}, "lora_r=8 needs use_peft: true; it would be ignored without"),
        ({"load_in_4bit": True}, "load_in_4bit=True needs use_peft: true; it would be ignored without"),
        ({"load_in_8bit": True, "use_peft": True}, "load_in_8bit needs bitsandbytes, which is not installed"),
    ],
)
def test_unworkable_settings_are_refused_before_model_load(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_ext.recipes.model_settings.is_bitsandbytes_available", lambda: False)
    run = {"output_dir": str(tmp_path / "run"), "model_name_or_path": str(tmp_path / "not_there")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, **run, **settings}))
    with pytest.raises(InputError, match=message):
        run_recipe(*parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"report_to": ["wandb"]}, r"--report_to wandb: .*pip install wandb.*--report_to none"),
        ({"report_to": ["paper"]}, r"paper is not supported.*tensorboard"),
        ({"model_name_or_path": "{here}/modle"}, r"unknown model folder .*/modle'\. Did you mean '.*/model'"),
        ({"model_name_or_path": "{here}"}, r"has no config\.json, so it holds no model"),
    ],
)
def test_what_can_be_known_is_known_before_the_data_is_read(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.setattr(GRPOTask, "data", None)
    filled = {
        name: value.format(here=tmp_path) if isinstance(value, str) else value for name, value in settings.items()
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, "output_dir": str(tmp_path / "run"), **filled}))
    with pytest.raises(InputError, match=said):
        run_recipe(*parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU))
    assert not (tmp_path / "run").exists()


def test_a_hub_id_is_no_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "no").mkdir()  # a folder of that name is no folder of models
    with pytest.raises(ValueError, match=r"model 'no/such', which is no folder here and was looked for on the Hub: "):
        tokenizer_and_shape(locate("no/such"), local_files_only=True)


@pytest.mark.slow  # loads vLLM
def test_unreachable_vllm_server_is_named_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # nothing listens there once it is closed
    given = {"vllm_server_base_url": f"http://me:secret@127.0.0.1:{port}", "vllm_server_timeout": 0.0}
    own = {"vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_group_port": 51216}
    config = SimpleNamespace(**given, **own, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=f"no vLLM server answers at 127.0.0.1:{port} .waited 0 s") as refused:
        check_server(config)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("users", "launchers"), [(None, True), ("1", False)])
def test_a_users_own_omp_num_threads_is_kept(users: str | None, launchers: bool) -> None:
    asked = "from trl_ext.compat.startup import _launcher_set_threads; print(_launcher_set_threads())"
    launcher = (  # as accelerate/utils/launch.py:prepare_simple_launcher_cmd_env sets them
        "import os, subprocess, sys; "
        "env = os.environ | {'OMP_NUM_THREADS': '1', 'ACCELERATE_MIXED_PRECISION': 'no'}; "
        f"print(subprocess.run([sys.executable, '-c', {asked!r}], env=env, capture_output=True, text=True).stdout)"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"PYTHONPATH": str(ROOT)} | ({"OMP_NUM_THREADS": users} if users else {})
    done = subprocess.run([sys.executable, "-c", launcher], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(launchers)


def test_process_seeing_two_gpus_is_told_how_to_use_both_or_one(tmp_path: Path) -> None:
    run = {"output_dir": str(tmp_path / "run"), "model_name_or_path": str(tmp_path / "not_there")}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, **run}))
    task, model, config = parse(GRPO_SETTINGS, "about", tmp_path / "mine.yaml", ON_A_CPU)
    assert config.n_gpu < 2
    config._n_gpu = 2  # as on a machine that has them
    with pytest.raises(InputError, match=r"2 GPUs are visible .*two_gpus_zero2\.yaml.*CUDA_VISIBLE_DEVICES=0"):
        run_recipe(task, model, config)
    assert not (tmp_path / "run").exists()


def test_input_error_is_one_line_and_ctrl_c_names_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise InputError("row 3 is empty")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["grpo_math.py", "--output_dir", str(tmp_path / "here")])
    with pytest.raises(SystemExit) as stopped:
        start(refuse, GRPO_SETTINGS, "about", DEFAULT)
    assert stopped.value.code == "error: row 3 is empty"
    with pytest.raises(SystemExit) as stopped:
        start(interrupt, GRPO_SETTINGS, "about", DEFAULT)
    assert stopped.value.code == 130
    assert str(tmp_path / "here") in capsys.readouterr().err


ON_ONE_RANK = [sys.executable]
BY_ACCELERATE = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / "one_cpu.yaml"),
]  # fmt: skip
ON_TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def launch(program: list[str], *arguments: str, cwd: Path, timeout: int = 280) -> str:
    """What the recipe printed."""
    done = subprocess.run(
        [*program, str(RECIPE), *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("wall_clock_s", "step_time", "rollout_time", "sync_time", "validation/seconds")
    return [{k: v for k, v in e.items() if k not in timed and not k.startswith("train_")} for e in entries]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings of a small run, in a folder of their own."""
    folder = tmp_path_factory.mktemp("run")
    policy = make_base_policy(0, folder / "cache", SMALL, progress=False)
    (folder / "mine.yaml").write_text(yaml.safe_dump({**TINY_RUN, "model_name_or_path": str(policy)}))
    return folder / "mine.yaml"


@pytest.fixture(scope="module")
def run(small: Path) -> tuple[Path, str]:
    """The folder of that run under `accelerate launch`, and what it printed."""
    return small.parent / "runs" / "mine", launch(BY_ACCELERATE, "--config", small.name, cwd=small.parent)


@pytest.mark.slow
def test_run_prints_validations_and_a_before_and_after_table(run: tuple[Path, str]) -> None:
    _, printed = run
    for words in (
        *(f"validation at step    {step}/4" for step in (0, 3, 4)),
        "training in float32, since this is a CPU", "step 4/4: reward ", "before   after", "level 1", "level 5", "format and answer correct", "format only", "neither",
    ):  # fmt: skip
        assert words in printed, words
    shows_the_run_and_nothing_else(printed.splitlines())
    assert "%|" not in printed  # a log file has no bar


def shows_the_run_and_nothing_else(lines: list[str]) -> None:
    ours = ("rollouts by", "training in", "validation at", "step ", "  level ", "accuracy", "format", "neither")
    others = [line for line in lines if line.strip() and not line.startswith(ours)]
    assert [line.split()[0] for line in others] == ["before", lines[-1].split()[0]], others
    assert "everything is in" in others[1]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_terminal_shows_the_run_and_its_bar_and_nothing_else(run: tuple[Path, str]) -> None:
    """The first command of docs/getting_started.md, ten steps of it, in a terminal of 110 columns."""
    cwd, columns = run[0].parents[1], 110
    page = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    exports, command = re.search(
        r"```bash\npip install[^\n]*\n(.*?)(accelerate launch [^\n]*)\n```", page, re.DOTALL
    ).groups()
    (cwd / "ones.py").write_text("def reward(completions, **_):\n    return [1.0 for _ in completions]\n")
    small = "--config mine.yaml --reward ones.py:reward --max_steps 10 --output_dir runs/terminal"
    small += " --report_to tensorboard --save_strategy steps"
    command = command.replace("accelerate launch", f"{sys.executable} -m accelerate.commands.launch")
    command = command.replace(" accelerate_configs/", f" {ROOT}/accelerate_configs/").replace(
        " recipes/", f" {ROOT}/recipes/"
    )
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "OMP_NUM_THREADS")}
    process = subprocess.Popen(
        ["bash", "-c", f"{exports}{command} {small}"], stdin=inside, stdout=inside, stderr=inside, cwd=cwd,
        env={**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(inside)
    written = everything_in(terminal)
    assert process.wait(60) == 0, written[-3000:]
    lines = [line.rpartition("\r")[2] for line in written.replace("\r\n", "\n").replace("\x1b[A", "").split("\n")]
    drawn = [part for part in re.split(r"[\r\n]+", written) if "%|" in part]
    assert not [part for part in drawn if len(part) > columns]
    assert {int(step) for part in drawn for step in re.findall(r"\| +(\d+)/10 \[", part)} >= {0, 5, 10}, drawn
    assert not [part for part in drawn if not re.search(r"/10 \[", part)], "a bar of something else"
    assert any("█" in part and "reward=" in part for part in drawn)
    (warning,) = (line for line in lines if "all rewards of a group have been equal for 10 logged steps" in line)
    assert warning.startswith("all rewards")  # on a line of its own, not behind the bar
    lines.remove(warning)
    shows_the_run_and_nothing_else([line for line in lines if line.strip() and "%|" not in line])


def everything_in(terminal: int) -> str:
    """What a process writes to a terminal until it ends."""
    written = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    return written.decode(errors="replace")


@pytest.mark.slow
def test_a_run_leaves_its_figures_its_generations_and_its_curve(run: tuple[Path, str]) -> None:
    folder, _ = run
    summary = json.loads((folder / "summary.json").read_text())
    accuracies = [v["accuracy"] for v in summary["validations"]]
    assert [v["step"] for v in summary["validations"]] == [0, 3, 4]
    assert summary["validation_accuracy_before"] == accuracies[0]
    assert summary["validation_accuracy_after"] == accuracies[-1]
    assert summary["best_validation_accuracy"] == max(accuracies)
    assert summary["wall_clock_s"] > summary["validations"][-1]["wall_clock_s"] > 0
    assert summary["versions"]["trl"].startswith("1.16.")
    assert {"command", "commit", "hardware", "seed", "preset"} <= set(summary)

    metrics = rows(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics if "loss" in m] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "clip_ratio/region_mean", "reward", "rewards/format_reward", "rewards/answer_reward",
            "completions/mean_length", "completions/mean_length_incorrect", "frac_reward_zero_std"
            } <= set(metrics[1])  # fmt: skip
    assert metrics[1]["frac_reward_zero_std"] == 1  # nothing is correct and no row trains: no entropy, no such length
    assert not {"entropy", "completions/mean_length_correct"} & set(metrics[1])

    generations = rows(folder / "generations.jsonl")
    assert sorted({g["step"] for g in generations}) == [1, 2, 4]
    assert {"prompt", "response", "ground_truth", "reward", "format_reward", "answer_reward", "token_entropy",
            "tokens", "correct", "extracted"} <= set(generations[0])  # fmt: skip
    with Image.open(folder / "curve.png") as curve:
        assert curve.format == "PNG"
        assert curve.width > curve.height > 300


@pytest.mark.slow
def test_the_model_of_a_run_loads_with_its_tokenizer_and_writes(run: tuple[Path, str]) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run[0]), AutoTokenizer.from_pretrained(run[0])
    assert model.generation_config.stop_strings == ["</answer>"]
    inputs = tokenizer("What is $2 + 3$?", return_tensors="pt")
    output = model.generate(**inputs, tokenizer=tokenizer, max_new_tokens=3)
    assert output.shape[1] > 3


@pytest.mark.slow
def test_written_config_repeats_the_run_bit_identically(run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    monkeypatch.chdir(folder.parents[1])
    written = folder / "config.yaml"
    run_recipe(*parse(GRPO_SETTINGS, "about", written, ["--config", str(written)]))  # without a launcher
    again = folder.with_name("mine-2")
    assert without_times(rows(again / "metrics.jsonl")) == without_times(rows(folder / "metrics.jsonl"))
    first, second = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    settings = [yaml.safe_load((f / "config.yaml").read_text()) for f in (folder, again)]
    assert settings[0].pop("output_dir") + "-2" == settings[1].pop("output_dir")
    assert settings[0] == settings[1]


@pytest.mark.distributed
def test_two_ranks_share_one_run_and_write_it_once(small: Path) -> None:
    top = small.parent
    printed = launch(ON_TWO_RANKS, "--config", small.name, "--output_dir", "runs/two", cwd=top)
    two = top / "runs" / "two"
    assert printed.count("format and answer correct") == 1
    assert [m["step"] for m in rows(two / "metrics.jsonl") if "loss" in m] == [1, 2, 3, 4]
    assert yaml.safe_load((two / "config.yaml").read_text())["train_batch_size"] == TINY_RUN["train_batch_size"]
    summary = json.loads((two / "summary.json").read_text())
    assert summary["hardware"]["processes"] == 2
    assert summary["validation_problems"] == TINY_RUN["validation_problems"]
    assert not (top / "runs" / "two-2").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_main_job_learns_in_a_third_of_its_steps(tmp_path: Path) -> None:
    """From a policy that has read half as much, which takes half as long to make: 0.26 becomes 0.56."""
    policy = make_base_policy(0, tmp_path / "cache", BasePolicyConfig(steps=400), progress=False)
    launch(ON_ONE_RANK, "--model_name_or_path", str(policy), "--max_steps", "40", cwd=tmp_path, timeout=560)
    summary = json.loads((tmp_path / "runs" / "grpo_math" / "summary.json").read_text())
    assert summary["validation_accuracy_before"] <= 0.4
    assert summary["validation_accuracy_after"] >= summary["validation_accuracy_before"] + 0.15


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_main_job_learns(tmp_path: Path, policy_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXT_CACHE", str(policy_cache))
    launch(ON_ONE_RANK, cwd=tmp_path, timeout=880)
    summary = json.loads((tmp_path / "runs" / "grpo_math" / "summary.json").read_text())
    assert summary["validation_problems"] >= 512
    assert summary["validation_accuracy_before"] <= 0.5
    assert summary["validation_accuracy_after"] >= 0.85
