"""Prompts and completions with tokenizers of every kind that checkpoints bring along: the same figures, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from trl import ModelConfig

from tests.recipes.test_evaluate import samples, settings
from tests.recipes.test_grpo import TINY_RUN, write_splits
from tests.recipes.test_sft_and_pipeline import SMALL_SFT
from tests.support.recipe import run_recipe
from tests.support.tiny import fraction_of_ones, make_trainer
from tests.support.tokenizers import BOS, EVERYTHING, KINDS, TEXT, TURN, Kind, answering_model, save, tokenizer_of
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.errors import InputError
from trl_ext.functional import log_generations, tokenize_prompt_and_output
from trl_ext.generation.completion import Sampling
from trl_ext.generation.hf import eos_ids_of, hf_generate, is_finished
from trl_ext.generation.prompts import format_prompt
from trl_ext.generation.samplers import HFSampler
from trl_ext.generation.tokens import completion_texts, prompt_ids, special_ids_with_text
from trl_ext.grpo.rollout import with_special_tokens
from trl_ext.imitation.sft import ExtSFTConfig, tokenized
from trl_ext.io import read_json, read_jsonl, write_jsonl
from trl_ext.mini.policy import EOS, PAD, PROMPT_PARTS, TAGS
from trl_ext.recipes.evaluate import run_evaluation
from trl_ext.recipes.grpo import GRPOTask
from trl_ext.recipes.preflight import check_vocabulary
from trl_ext.recipes.sft import SFTTask
from trl_ext.rewards import r1_zero_reward_fn

STOP = ["</answer>"]
LENGTH = 12  # most tokens of a completion; the right ones have less
ROWS = [{"problem": f"What is ${i} + {i}$?", "answer": str(5 if i % 2 else 6), "level": 1} for i in range(16)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_answers_as_the_ordinary_one(name: str) -> None:
    kind = KINDS[name]
    tokenizer = kind.tokenizer()
    model = kind.model(tokenizer)
    if kind.refused:
        with pytest.raises(ValueError, match=kind.refused):
            check_vocabulary(tokenizer, model.config, "a/model")
        return
    check_vocabulary(tokenizer, model.config, "a/model")
    ends = eos_ids_of(
        GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(list(kind.ends))), tokenizer.eos_token_id
    )
    pad = tokenizer.pad_token_id or tokenizer.eos_token_id
    config = GenerationConfig(max_new_tokens=LENGTH, eos_token_id=ends or None, pad_token_id=pad)
    asked = prompt_ids(tokenizer, [format_prompt(kind.prompt, question) for question in ("1 + 1?", "What is it?")])
    last = tokenizer.convert_tokens_to_ids(PROMPT_PARTS[1])
    assert {ids[-1] for ids in asked} == {last}
    begins = tokenizer.bos_token_id is not None
    assert all(ids[:3].count(tokenizer.bos_token_id) == begins for ids in asked)
    rows = hf_generate(model, tokenizer, asked, config, STOP)
    assert completion_texts(tokenizer, rows, ends) == [kind.text] * 2
    assert is_finished(rows, tokenizer, eos_ids_of(config), STOP).all()
    assert {len(ids) for ids in rows} <= {4, 5}, "a row ends with its stop string or its end token"


def test_prompt_keeps_what_it_has_of_its_own() -> None:
    added = tokenizer_of(special=(BOS,), adds=f"{BOS} $A {EOS}", bos_token=BOS)
    bos, eos, letter = added.bos_token_id, added.eos_token_id, added.convert_tokens_to_ids("a")
    texts = ["a", f"{BOS}a", f"a{EOS}", f"{BOS}", "", f"{EOS}a"]
    expected = [[bos, letter], [bos, letter], [bos, letter, eos], [bos], [bos], [bos, eos, letter]]
    assert prompt_ids(added, texts) == expected
    assert prompt_ids(added, []) == []
    plain = tokenizer_of(special=(BOS,), bos_token=BOS)
    assert prompt_ids(plain, ["a", f"{BOS}a", f"a{EOS}"]) == [[letter], [bos, letter], [letter, eos]]


def test_only_special_tokens_without_a_role_are_text() -> None:
    tokenizer = tokenizer_of(special=(*TAGS, BOS, TURN), bos_token=BOS, unk_token=TURN)
    ids = tokenizer.convert_tokens_to_ids
    tags = {ids(tag) for tag in TAGS}
    assert special_ids_with_text(tokenizer) == tags
    assert special_ids_with_text(tokenizer, [ids(TAGS[2])], tags_only=True) == tags
    row = [ids(token) for token in (BOS, TAGS[0], TURN, "5", PAD, TAGS[2], EOS, PAD)]
    assert completion_texts(tokenizer, [row, [], [400, ids("x")]]) == [f"{TAGS[0]}5{TAGS[2]}", "", "x"]
    other = tokenizer_of(special=(TURN,))
    assert special_ids_with_text(other) == {ids(TURN)}
    assert special_ids_with_text(other, tags_only=True) == special_ids_with_text(other, [ids(TURN)]) == set()
    assert completion_texts(other, [[ids(TURN)], [ids("x")]], [ids(TURN), ids("x")]) == ["", "x"]


def test_texts_of_trl_get_back_their_special_tokens() -> None:
    tokenizer = tokenizer_of(special=(*TAGS, TURN))
    ids = tokenizer.convert_tokens_to_ids
    rows = [[ids("x"), ids(TAGS[2])], [ids("x"), ids(TURN)], [ids("x")]]
    texts = ["x", "x", "from a function"]
    assert with_special_tokens(texts, rows, tokenizer, [], False) == [f"x{TAGS[2]}", f"x{TURN}", "from a function"]
    assert with_special_tokens(texts, rows, tokenizer, [], True) == [f"x{TAGS[2]}", "x", "from a function"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert with_special_tokens(messages, rows, tokenizer, [], True)[0][0] == {
        "role": "assistant",
        "content": f"x{TAGS[2]}",
    }
    of_tools = [[{"role": "assistant", "content": "x", "tool_calls": []}], *messages[1:]]
    assert with_special_tokens(of_tools, rows, tokenizer, [], True) == of_tools
    tokenizer.response_schema = {}
    assert with_special_tokens(messages, rows, tokenizer, [], False) == messages


def test_functions_of_the_handout_take_every_kind() -> None:
    bos = tokenizer_of(special=(*TAGS, BOS), adds=f"{BOS} $A", bos_token=BOS, pad_token=None)
    batch = tokenize_prompt_and_output([f"{BOS}a", "ab"], ["c", TAGS[2]], bos)
    assert batch["input_ids"][:, 0].tolist() == [bos.bos_token_id] * 2
    assert batch["response_mask"].sum(dim=1).tolist() == [1, 1]
    assert (batch["labels"] == bos.bos_token_id).sum() == 0
    nothing_to_pad_with = tokenizer_of(pad_token=None, eos_token=None)
    assert tokenize_prompt_and_output(["a", "ab"], ["c", "c"], nothing_to_pad_with)["input_ids"].shape == (2, 2)
    prompts = ["".join((PROMPT_PARTS[0], question, PROMPT_PARTS[1])) for question in ("1 + 1?", "2?")]
    model, sampling = answering_model(bos), {"max_new_tokens": LENGTH, "stop_strings": STOP, "do_sample": False}
    logged, _ = log_generations(
        prompts, None, ["5"] * 2, r1_zero_reward_fn, model=model, tokenizer=bos, sampling=sampling
    )
    assert [(row["response"], row["length"], row["reward"]) for row in logged] == [(TEXT, 4, 1.0)] * 2


def test_a_trace_ends_with_one_eos() -> None:
    tokenizer = tokenizer_of(special=(BOS,), adds=f"{BOS} $A {EOS}", bos_token=BOS)
    rows, _ = tokenized([{"prompt": "a", "response": text} for text in ("b", f"b{EOS}")], tokenizer)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert rows[0] == rows[1]
    assert rows[0]["input_ids"] == [tokenizer.bos_token_id, a, b, tokenizer.eos_token_id]
    assert rows[0]["completion_mask"] == [0, 0, 1, 1]


def test_sampler_of_a_saved_model_shows_special_tags(tmp_path: Path) -> None:
    sampler = HFSampler(save(tmp_path, KINDS["tags_special"]), Sampling(max_tokens=LENGTH), 2)
    found = sampler([format_prompt(Kind.prompt, "1 + 1?")] * 3, [0, 1, 2])
    assert [(one.text, one.tokens, one.finished) for one in found] == [(TEXT, 4, True)] * 3


@pytest.mark.parametrize("stop", [STOP, None], ids=["with_stop", "as_in_trl"])
def test_rewards_of_a_program_see_special_tokens(stop: list[str] | None, tmp_path: Path) -> None:
    kind = KINDS["other_special_token"]
    tokenizer = kind.tokenizer()
    given = {"model": kind.model(tokenizer), "processing_class": tokenizer, "stop": stop}
    trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **given)
    texts = trainer._generate([format_prompt(kind.prompt, "1 + 1?")] * 4)[3]
    assert [text.count(TURN) for text in texts] == [1 if stop else 0] * 4  # TRL's semantics at its own settings
    assert [text.startswith(kind.text) for text in texts] == [bool(stop)] * 4


# The recipes, from a folder to their figures.

IN_RECIPES = (
    "tags_special", "bos_added_and_in_prompt", "tag_is_eos", "no_pad", "no_eos", "unknown_id_sampled", "tokens_beyond_embeddings",
)  # fmt: skip


def write_problems(folder: Path) -> str:
    write_splits(folder, ROWS, [{**row, "problem": f"Now: {row['problem']}"} for row in ROWS])
    return str(folder / "{split}.jsonl")


def task_settings(folder: Path, model: str, **more: Any) -> dict[str, Any]:
    given = {"dataset": write_problems(folder), "prompt": f"{model}/own.prompt", "answer_format": "r1_zero"}
    return {**given, "train_problems": None, "validation_problems": None, "validate_every": 1, **more}


def config_of(base: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    of_task = ("train_problems", "validation_problems", "validate_every", "log_generations_every")
    config = {name: value for name, value in base.items() if name not in of_task}
    length = {"sampling_max_tokens": LENGTH, "max_steps": 1, "disable_tqdm": True, "use_cpu": True}
    return {**config, **length, "output_dir": str(folder), **more}


def evaluated(folder: Path, model: str, **more: Any) -> Path:
    given = {"dataset": write_problems(folder), "problems": None, "prompt": f"{model}/own.prompt", "max_tokens": LENGTH}
    run_evaluation(settings(model, folder / "evaluation", answer_format="r1_zero", **given, **more))
    return folder / "evaluation"


def trained_by_grpo(folder: Path, model: str, **more: Any) -> Path:
    """The folder of a run of one step on all problems."""
    task = GRPOTask(**task_settings(folder, model, reward="compatible", log_generations_every=1))
    config = ExtGRPOConfig(**config_of(TINY_RUN, folder / "grpo", **more))
    run_recipe(task, ModelConfig(model_name_or_path=model), config)
    return folder / "grpo"


def trained_by_sft(folder: Path, model: str) -> Path:
    """The folder of a run of one step on traces with the text of the model's own completions."""
    write_jsonl(folder / "traces.jsonl", [{"prompt": row["problem"], "response": TEXT} for row in ROWS])
    task = SFTTask(**task_settings(folder, model, traces=str(folder / "traces.jsonl")))
    config = ExtSFTConfig(**config_of(SMALL_SFT, folder / "sft"))
    run_recipe(task, ModelConfig(model_name_or_path=model), config)
    return folder / "sft"


def check_samples(folder: Path, kind: Kind) -> None:
    rows = samples(folder)
    assert {(row["response"], row["finish_reason"]) for row in rows} == {(kind.text, "stop")}
    assert sum(row["answer_reward"] for row in rows) == (8 if kind.text == TEXT else 0)


def check_rollouts(run: Path, kind: Kind) -> None:
    (figures,) = [row for row in read_jsonl(run / "metrics.jsonl") if "reward" in row]
    assert (figures["reward"], figures["completions/clipped_ratio"]) == (0.5 if kind.text == TEXT else 0, 0)
    assert {row["response"] for row in read_jsonl(run / "generations.jsonl")} == {kind.text}


def check_validations(run: Path) -> None:
    assert [entry["accuracy"] for entry in read_json(run / "summary.json")["validations"]] == [0.5] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_RECIPES)
def test_recipes_measure_the_same_with_every_kind(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    model = save(tmp_path / "model", kind)
    if kind.refused:
        for recipe in (evaluated, trained_by_grpo, trained_by_sft):
            with pytest.raises(InputError, match=kind.refused):
                recipe(tmp_path, model)
        return
    check_samples(evaluated(tmp_path, model), kind)
    run = trained_by_grpo(tmp_path, model)
    check_rollouts(run, kind)
    check_validations(run)
    check_validations(trained_by_sft(tmp_path, model))


@pytest.mark.vllm
@pytest.mark.timeout(900)  # several engines are started, 10 to 20 s each
def test_vllm_takes_every_kind(tmp_path: Path) -> None:
    model = save(tmp_path / "model", EVERYTHING)
    vllm = {"use_vllm": "true", "vllm_max_model_length": 128, "vllm_enforce_eager": True}
    folder = evaluated(tmp_path, model, dtype="float32", **vllm)
    check_samples(folder, EVERYTHING)
    assert {row["tokens"] for row in samples(folder)} == {6}
    check_rollouts(
        trained_by_grpo(tmp_path, model, vllm_dtype="float32", vllm_gpu_memory_utilization=0.1, **vllm), EVERYTHING
    )
