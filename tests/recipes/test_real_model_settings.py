"""The settings that ship for real models, with prompts as long as those of the datasets that they name."""

from __future__ import annotations

import functools
import os
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from datasets import Dataset
from transformers import Qwen2Config, Qwen2Tokenizer

from tests.recipes.test_grpo import ON_A_CPU, ROOT
from trl_ext.data.files import READERS
from trl_ext.data.lengths import Room, rows_that_fit
from trl_ext.data.load import read_table
from trl_ext.data.source import Source
from trl_ext.generation.prompts import format_prompt, load_prompt, load_template
from trl_ext.io import as_flags
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.preflight import rows_in_context
from trl_ext.recipes.settings import Data
from trl_ext.runs.recipes import RECIPES
from trl_ext.tools.experiments.lab.questions import COMMON, cells_of, read_lab, read_question
from trl_ext.tools.experiments.pipeline.settings import read_pipeline
from trl_ext.tools.experiments.speedrun import read_entry, run_of

CONTEXTS = {
    "Qwen/Qwen2.5-Math-1.5B": 4096,
    "Qwen/Qwen3-0.6B": 40960,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": 32768,
    "Qwen/Qwen2.5-0.5B-Instruct": 32768,
    "Qwen/Qwen2.5-1.5B-Instruct": 32768,
    "Qwen/Qwen2.5-7B-Instruct": 32768,
}
# Tokens of the longest prompts in r1_zero, counted with Qwen's own merges.
LONGEST = {"DigitalLearningGmbH/MATH-lighteval": 1747, "gsm8k": 304}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
REAL_ROWS = "TRL_EXT_REAL_ROWS"
FILES = {"DigitalLearningGmbH/MATH-lighteval": "math", "gsm8k": "gsm8k"}  # what their names begin with there
SPLITS = ("train", "test")


class Run(NamedTuple):
    """A process that a shipped YAML file starts: a recipe's name, its default YAML file and its arguments."""

    recipe: str
    config: Path
    arguments: tuple[str, ...] = ()


def runs_of(path: Path) -> dict[str, Run]:
    """Every run that a YAML file starts, by name: itself, an idea's, a pipeline's stages, or a question's cells."""
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "try":
        config = (path.parent / content["config"]).resolve()
        return {f"try/{path.stem}": Run("grpo", config, tuple(as_flags(content["settings"])))}
    default = {recipe: (ROOT / "recipes" / of.script).with_suffix(".yaml") for recipe, of in RECIPES.items()}
    if "cells" in content:
        lab, question = read_lab(path.parent), read_question(path.parent, path.stem)
        cells = cells_of(lab, path.parent, question, {name: {} for name in question.after}).values()
        return {
            f"{path.parent.name}/{cell.run_name(0)}": Run(cell.recipe, default[cell.recipe], (*cell.arguments(),))
            for cell in cells
        }
    if "stages" in content:
        stages = {f"{path.stem}-{number}": stage for number, stage in enumerate(read_pipeline(path).stages, start=1)}
        given = as_flags({k: content[k] for k in ("model_name_or_path", "time_budget") if k in content})
        return {n: Run(s.recipe, default[s.recipe], (*s.arguments(), *given)) for n, s in stages.items()}
    if "recipe" in content:  # an entry of the speedrun
        entry = run_of(read_entry(path, ROOT / "recipes"), ROOT / "recipes")
        return {path.stem: Run(entry.recipe, default[entry.recipe], (*entry.arguments(),))}
    recipe = next(name for name in (*RECIPES, "evaluate", "best_of_n", "lab") if path.name.startswith(name))
    return {} if path.name == COMMON else {path.stem: Run(recipe, path)}


@functools.cache  # there are 600 arguments and 60 files
def model_of(path: Path) -> str:
    """The model that a YAML file sets, or nothing."""
    return yaml.safe_load(path.read_text()).get("model_name_or_path") or ""


def has_a_real_model(run: Run) -> bool:
    """Whether the run's own YAML file, or one that its arguments name, has a model of the Hub."""
    texts = [run.config, *(word for word in run.arguments if word.endswith(".yaml"))]
    return any("/" in model_of(ROOT / text) for text in texts)


SHIPPED = sorted((ROOT / "recipes").rglob("*.yaml"))
RUNS = {name: run for path in SHIPPED for name, run in runs_of(path).items() if has_a_real_model(run)}
ABOUT_LENGTH = ("--config", "--prompt", "--dataset", "--sampling_max_tokens", "--vllm_max_model_length", "--max_length")


def what_decides(run: Run) -> tuple[object, ...]:
    """What the room for a response follows from: most cells of a lab are alike in it."""
    pairs = zip(run.arguments, run.arguments[1:], strict=False)
    return run.recipe, run.config, tuple(sorted(pair for pair in pairs if pair[0] in ABOUT_LENGTH))


DIFFERENT = {what_decides(run): name for name, run in reversed(RUNS.items())}.values()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Qwen2's tokenizer, in which every digit is a token, its merges learned from the prompt."""
    return tokenizer_of(tmp_path_factory.mktemp("qwen"), [load_prompt("r1_zero")] * 9, 400)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a pipeline's file names its stages' from there


def tokenizer_of(folder: Path, texts: list[str], size: int) -> Path:
    """A folder with a tokenizer that splits texts as Qwen's does, of `size` tokens learned from `texts`."""
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(texts, size, show_progress=False)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def text_of(template: str) -> str:
    """A template as the model reads it, a conversation by Qwen's chat template."""
    loaded = load_template(template)
    if isinstance(loaded, str):
        return loaded
    said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in loaded)
    return f"{said}<|im_start|>assistant\n"


def prompt_of(tokens: int, tokenizer: Qwen2Tokenizer, template: str) -> str:
    """A prompt of so many tokens or a few more, most of it a figure in Asymptote as MATH's longest problems have."""
    problem = "In the figure, what is the area of the shaded region?\n[asy]\n"
    for n in count():
        problem += f"draw(({n},{n + 3})--(12,{7 * n})--cycle); label($\\frac{{{n}}}{{9}}$, ({n},-1), S);\n"
        prompt = format_prompt(text_of(template), problem)
        if len(tokenizer(prompt)["input_ids"]) >= tokens:
            return prompt
    raise AssertionError


def parsed(run: Run) -> tuple[Any, str, Any]:
    """The dataset's settings, the model and those that have the context; with vLLM, as on the machine it is for."""
    if run.recipe in RECIPES:
        task, model, config = parse(RECIPES[run.recipe].settings(), "about", run.config, [*run.arguments, *ON_A_CPU])
        config.use_vllm = True
        return task, model, config
    kind = BestOfN if run.recipe == "best_of_n" else Evaluation
    (settings,) = parse((kind,), "about", run.config, [*run.arguments])
    return settings, settings, settings


def left_out(run: Run, prompts: dict[str, list[str]], tokenizer: Path) -> dict[str, int]:
    """How many of the prompts for training and validation the run leaves out, as its recipe decides it."""
    task, model, config = parsed(run)
    context = CONTEXTS[model.model_name_or_path]
    assert (config.vllm_max_model_length or 0) <= context
    rows = {
        role: Dataset.from_list([{"prompt": p, "row": n} for n, p in enumerate(of)]) for role, of in prompts.items()
    }
    sources = {role: Source(task.dataset, role, len(of), len(of), "stored") for role, of in prompts.items()}
    if run.recipe in RECIPES:
        Qwen2Config(vocab_size=151936, max_position_embeddings=context).save_pretrained(tokenizer)
        (tokenizer / "model.safetensors").touch()
        kept = vars(rows_in_context(Data(**rows, sources=sources), task, str(tokenizer), model, config))
    else:
        room = Room(config.vllm_max_model_length or context, "vllm_max_model_length", config.max_tokens, "max_tokens")
        loaded = Qwen2Tokenizer.from_pretrained(tokenizer)
        kept = {r: rows_that_fit(rows[r], r, sources[r], loaded, room, config.too_long) for r in rows}
    return {role: len(rows[role]) - len(kept[role]) for role in rows}


def test_every_yaml_file_with_a_real_model_is_among_the_runs() -> None:
    named = {path for path in SHIPPED if "Qwen/" in path.read_text()}
    assert len(named) >= 7
    begun = {run.config for run in RUNS.values()} | {ROOT / word for run in RUNS.values() for word in run.arguments}
    alone = {path for path in named if any(run in RUNS.values() for run in runs_of(path).values())}
    assert named <= begun | alone
    assert {run.recipe for run in RUNS.values()} == {"grpo", "sft", "expert_iteration", "evaluate", "best_of_n"}


@pytest.mark.moderate
@pytest.mark.parametrize("name", DIFFERENT)
def test_longest_prompts_fit_with_the_longest_response(name: str, qwen: Path) -> None:
    task, *_ = parsed(RUNS[name])
    longest = prompt_of(LONGEST[task.dataset], Qwen2Tokenizer.from_pretrained(qwen), task.prompt)
    assert left_out(RUNS[name], {"train": [longest], "validation": [longest]}, qwen) == {"train": 0, "validation": 0}


@pytest.mark.slow
def test_no_row_of_the_real_datasets_is_left_out(tmp_path: Path) -> None:
    """In a tokenizer that splits as Qwen's does, with merges learned from these rows.

    It has 1,300 tokens where Qwen's has 151,643, so the longest prompts are 4 % (MATH) to 64 % (GSM8K) longer than in
    Qwen's: what fits here fits there.
    """
    folder = Path(os.environ.get(REAL_ROWS, ""))
    if REAL_ROWS not in os.environ:
        pytest.skip(
            f"{REAL_ROWS} names no folder with math_train*, math_test*, gsm8k_train* and gsm8k_test* (.jsonl, ...)"
        )
    problems = {(dataset, split): real_problems(folder, dataset, split) for dataset in FILES for split in SPLITS}
    texts = [text for some in problems.values() for text in some] + [load_prompt("r1_zero")] * 99
    tokenizer = tokenizer_of(tmp_path / "qwen", texts, 1300)
    loaded, found = Qwen2Tokenizer.from_pretrained(tokenizer), {}
    for name, run in RUNS.items():
        task, _, config = parsed(run)
        length = (config.max_tokens,) if task is config else (config.max_completion_length, task.validation_max_tokens)
        what = (run.recipe in RECIPES, task.dataset, task.prompt, task.too_long, config.vllm_max_model_length, *length)
        if what not in found:  # most cells of a lab are alike in all that decides it
            template = text_of(task.prompt)
            prompts = [[format_prompt(template, p) for p in problems[task.dataset, split]] for split in SPLITS]
            found[what] = left_out(run, dict(zip(("train", "validation"), prompts, strict=True)), tokenizer)
            longest = [max(len(ids) for ids in loaded(text=of, verbose=False)["input_ids"]) for of in prompts]
            print(f"{name}: {task.dataset}, {task.prompt}: longest prompts {longest} tokens, left out {found[what]}")
            if task.prompt == "r1_zero":
                assert 1 < max(longest) / LONGEST[task.dataset] < 1.75, "the tokenizer, or what is known of the rows"
        assert found[what] == {"train": 0, "validation": 0}, name


def real_problems(folder: Path, dataset: str, split: str) -> list[str]:
    """The problems of a split, whatever its file's format."""
    names = [p for p in sorted(folder.glob(f"{FILES[dataset]}_{split}*")) if p.suffix in READERS]
    assert names, f"{folder} has no {FILES[dataset]}_{split}*"
    rows = read_table(str(names[0]), split, None)
    return [row.get("problem") or row["question"] for row in rows]


COLOCATED = [path for path in SHIPPED if "\nvllm_gpu_memory_utilization:" in path.read_text()]


@pytest.mark.parametrize("path", COLOCATED, ids=lambda path: path.stem)
def test_a_server_in_place_of_a_colocated_engine(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = runs_of(path).values()
    server = ["--use_vllm", "true", "--vllm_mode", "server", *ON_A_CPU]
    *_, config = parse(RECIPES[run.recipe].settings(), "about", run.config, server)
    assert config.vllm_mode == "server"
    said = capsys.readouterr().out
    assert "vllm_gpu_memory_utilization" in said
    assert f"of {path.name} left out: a vLLM server's own command line sets this" in said
    with pytest.raises(SystemExit):
        parse(RECIPES[run.recipe].settings(), "about", run.config, [*server, "--vllm_gpu_memory_utilization", "0.5"])
    assert "vllm_gpu_memory_utilization with vllm_mode: server" in capsys.readouterr().err
