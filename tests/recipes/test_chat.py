"""Every program asks an instruct model by its own chat template, reads the box, and ends where its turn ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trl import ModelConfig

from tests.generation.test_tokens import config_of, write_problems
from tests.recipes.test_evaluate import samples, settings
from tests.recipes.test_grpo import TINY_RUN
from tests.recipes.test_sft_and_pipeline import SMALL_EI, SMALL_SFT
from tests.support.recipe import run_recipe
from tests.support.tokenizers import END, TURN, answering_model, tokenizer_of
from trl_ext import ExtGRPOConfig
from trl_ext.errors import InputError
from trl_ext.generation.prompts import PLACEHOLDER, Asking
from trl_ext.imitation.expert_iteration import ExpertIterationConfig
from trl_ext.imitation.sft import ExtSFTConfig
from trl_ext.io import read_json, read_jsonl, write_jsonl
from trl_ext.recipes.best_of_n import BestOfN, run_best_of_n
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.expert_iteration import ExpertIterationTask
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.sft import SFTTask

BOXED = r"\boxed{5}"
LENGTH = 14  # most tokens of a response; the right one has ten with its end
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ note | default('') }}<|turn|>{% endif %}"
)
ASKED = Asking.named("chat").prompt(PLACEHOLDER)[0]["content"]  # type: ignore[index]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model that says a box with 5 in it and ends its turn, by a token that nothing but its template names."""
    tokenizer = tokenizer_of(special=(TURN, END))
    tokenizer.chat_template = TEMPLATE
    answering_model(tokenizer, (*BOXED, END, "a", "c"), after=TURN).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def check_prompts(prompts: set[str], note: str = "", system: str = "") -> None:
    before = f"system: {system}<|im_end|>\n" if system else ""
    for prompt in prompts:
        assert prompt.startswith(f"{before}user: ")
        assert prompt.endswith(f"{ASKED.removeprefix(PLACEHOLDER)}<|im_end|>\nassistant: {note}<|turn|>")
        assert prompt.count("What is $") == 1


def check_responses(rows: list[dict[str, Any]]) -> None:
    assert {row["response"].removesuffix(END) for row in rows} == {BOXED}
    assert {row["finish_reason"] for row in rows} == {"stop"}


@pytest.mark.slow
def test_evaluations_ask_by_the_template(model: str, tmp_path: Path) -> None:
    given = {"dataset": write_problems(tmp_path), "problems": None, "prompt": "chat", "max_tokens": LENGTH}
    said = {"chat_template_kwargs": "note=now ", "system_prompt": "Be brief."}
    run_evaluation(settings(model, tmp_path / "evaluation", **given, **said))
    rows = samples(tmp_path / "evaluation")
    check_prompts({row["prompt"] for row in rows}, "now", "Be brief.")
    check_responses(rows)
    assert sum(row["answer_reward"] for row in rows) == 8
    run_best_of_n(settings(model, tmp_path / "best", BestOfN, samples=2, at=[1, 2], **given))
    check_responses(samples(tmp_path / "best"))
    check_prompts({row["prompt"] for row in samples(tmp_path / "best")})
    run_evaluation(settings(model, tmp_path / "evaluation", export=str(tmp_path / "tasks"), **given))
    check_prompts({row["prompt"] for row in read_jsonl(next((tmp_path / "tasks" / "data").glob("*.jsonl")))})


def task_settings(folder: Path, **more: Any) -> dict[str, Any]:
    sizes = dict.fromkeys(("train_problems", "validation_problems"))
    return {"dataset": write_problems(folder), "prompt": "chat", "validate_every": 1, **sizes, **more}


def trained_by_grpo(folder: Path, model: str, **more: Any) -> Path:
    task = GRPOTask(**task_settings(folder, reward="compatible", log_generations_every=1))
    config = ExtGRPOConfig(**config_of(TINY_RUN, folder / "grpo", sampling_max_tokens=LENGTH, **more))
    run_recipe(task, ModelConfig(model_name_or_path=model), config)
    return folder / "grpo"


def check_run(run: Path) -> None:
    rows = read_jsonl(run / "generations.jsonl")
    check_prompts({row["prompt"] for row in rows})
    assert {row["response"].removesuffix(END) for row in rows} == {BOXED}
    assert [entry["accuracy"] for entry in read_json(run / "summary.json")["validations"]] == [0.5] * 2


@pytest.mark.slow
def test_grpo_asks_by_the_template(model: str, tmp_path: Path) -> None:
    run = trained_by_grpo(tmp_path, model)
    check_run(run)
    (figures,) = [row for row in read_jsonl(run / "metrics.jsonl") if "reward" in row]
    assert (figures["reward"], figures["completions/clipped_ratio"]) == (0.5, 0)


@pytest.mark.slow
def test_fine_tuning_ends_a_trace_as_the_template_does(model: str, tmp_path: Path) -> None:
    rows = [{"problem": f"What is ${i} + {i}$?", "solution": BOXED} for i in range(16)]
    write_jsonl(tmp_path / "traces.jsonl", rows)
    task = SFTTask(**task_settings(tmp_path, traces=str(tmp_path / "traces.jsonl")))
    config = ExtSFTConfig(**config_of(SMALL_SFT, tmp_path / "sft", sampling_max_tokens=LENGTH))
    run_recipe(task, ModelConfig(model_name_or_path=model), config)
    check_run(tmp_path / "sft")
    (figures,) = [row for row in read_jsonl(tmp_path / "sft" / "metrics.jsonl") if "mean_token_accuracy" in row]
    assert figures["mean_token_accuracy"] == 1, "the model ends its turn as the traces do"


@pytest.mark.slow
def test_expert_iteration_asks_by_the_template(model: str, tmp_path: Path) -> None:
    of_task = {"validation_grader": "compatible"}
    given = {k: v for k, v in SMALL_EI.items() if k not in ("validation_grader", "train_problems")}
    config = config_of({**given, "n_ei_steps": 1, "questions_per_step": 8}, tmp_path / "ei", sampling_max_tokens=LENGTH)
    del config["max_steps"]
    task = {name: value for name, value in task_settings(tmp_path, **of_task).items() if name != "validate_every"}
    run_recipe(ExpertIterationTask(**task), ModelConfig(model_name_or_path=model), ExpertIterationConfig(**config))
    kept = read_jsonl(tmp_path / "ei" / "expert_iteration" / "step_1" / "kept.jsonl")
    check_prompts({row["prompt"] for row in kept})
    assert {row["response"].removesuffix(END) for row in kept} == {BOXED}


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_asks_by_the_template(model: str, tmp_path: Path) -> None:
    vllm = {"use_vllm": "true", "vllm_max_model_length": 256, "vllm_enforce_eager": True, "vllm_dtype": "float32"}
    check_run(trained_by_grpo(tmp_path, model, vllm_gpu_memory_utilization=0.1, **vllm))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"prompt": "chat"},
            "prompt 'chat' is put into a chat template, and the base policy that is made here has none",
        ),
        ({"chat_template_kwargs": "thinks=false"}, "chat_template_kwargs is for conversations, and prompt 'r1_zero'"),
        (
            {"system_prompt": "Be brief."},
            "system_prompt is a message of a conversation, and prompt 'r1_zero' is a text",
        ),
    ],
)
def test_what_has_no_conversation_is_refused_first(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        run_evaluation(settings(None, tmp_path / "evaluation", **given))  # type: ignore[arg-type]
    of_config = {name: given.pop(name) for name in list(given) if name == "chat_template_kwargs"}
    of_config |= {"output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": "none"}
    recipe = partial(run_recipe, model=ModelConfig(), config=ExtGRPOConfig(**of_config))
    with pytest.raises((InputError, ValueError), match=words):
        recipe(GRPOTask(**given))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_model_without_a_template_is_refused_by_name(model: str, tmp_path: Path) -> None:
    (Path(model) / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        trained_by_grpo(tmp_path, model)
    given = {"dataset": write_problems(tmp_path), "problems": None, "prompt": "chat"}
    with pytest.raises(InputError, match="has no chat template"):
        run_evaluation(settings(model, tmp_path / "evaluation", **given))
