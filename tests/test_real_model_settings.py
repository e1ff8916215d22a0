"""The settings that ship for real models, with prompts as long as those of the datasets that they name."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from transformers import Qwen2Config, Qwen2Tokenizer

from tests.test_recipe import ON_A_CPU, ROOT
from trl_ext.data.lengths import Room, too_long
from trl_ext.data.source import Source
from trl_ext.experiments.preflight import SETTINGS
from trl_ext.prompts import format_prompt, load_prompt
from trl_ext.recipes.checks import rows_in_context
from trl_ext.recipes.cli import parse
from trl_ext.recipes.evaluate import Evaluation

CONTEXTS = {"Qwen/Qwen2.5-Math-1.5B": 4096, "Qwen/Qwen3-0.6B-Base": 32768}
# Tokens of the longest prompts in r1_zero, counted with Qwen's own merges.
LONGEST = {"DigitalLearningGmbH/MATH-lighteval": 1747, "openai/gsm8k": 304}
YAMLS = {p: yaml.safe_load(p.read_text()) for p in sorted((ROOT / "recipes").glob("*.yaml"))}
REAL = [p for p, given in YAMLS.items() if "Qwen" in given.get("model_name_or_path", "")]
RUNS = [p for p in REAL if "stages" not in YAMLS[p] and not p.name.startswith("evaluate")]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Qwen2's tokenizer, in which every digit is a token, its merges learned from the prompt."""
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2Tokenizer().train_new_from_iterator([load_prompt("r1_zero")] * 9, 400, show_progress=False).save_pretrained(
        folder
    )
    return folder


def prompt_of(tokens: int, tokenizer: Qwen2Tokenizer, template: str) -> str:
    """A prompt of so many tokens or a few more, most of it a figure in Asymptote as MATH's longest problems have."""
    problem = "In the figure, what is the area of the shaded region?\n[asy]\n"
    for n in count():
        problem += f"draw(({n},{n + 3})--(12,{7 * n})--cycle); label($\\frac{{{n}}}{{9}}$, ({n},-1), S);\n"
        prompt = format_prompt(load_prompt(template), problem)
        if len(tokenizer(prompt)["input_ids"]) >= tokens:
            return prompt
    raise AssertionError


@pytest.mark.parametrize("path", RUNS, ids=[p.stem for p in RUNS])
def test_the_longest_prompts_of_its_dataset_fit_with_the_longest_response(path: Path, qwen: Path) -> None:
    recipe = next(name for name in SETTINGS if path.name.startswith(name))
    task, model, config = parse(SETTINGS[recipe], "about", path, ON_A_CPU)
    longest = prompt_of(LONGEST[task.dataset], Qwen2Tokenizer.from_pretrained(qwen), task.prompt)
    config.use_vllm = True  # as on the machine that the settings are for
    context = CONTEXTS[model.model_name_or_path]
    assert config.vllm_max_model_length <= context
    Qwen2Config(vocab_size=151936, max_position_embeddings=context).save_pretrained(qwen)
    rows = Dataset.from_list([{"prompt": longest, "row": 0}])
    task.sources = {role: Source(task.dataset, role, 1, 1, "stored") for role in ("train", "validation")}
    data = {"train": rows, "validation": rows}
    assert rows_in_context(data, task, str(qwen), model, config) == data


def test_they_fit_in_an_evaluation_too(qwen: Path) -> None:
    (settings,) = parse((Evaluation,), "about", ROOT / "recipes" / "evaluate_math.yaml", [])
    tokenizer = Qwen2Tokenizer.from_pretrained(qwen)
    assert settings.vllm_max_model_length <= CONTEXTS[settings.model_name_or_path]
    room = Room(settings.vllm_max_model_length, "vllm_max_model_length", settings.max_tokens, "max_tokens")
    longest = prompt_of(LONGEST[settings.dataset], tokenizer, settings.prompt)
    assert not too_long([longest], tokenizer, room)
