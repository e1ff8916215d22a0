"""Where a completion ends, from token ids and from a model whose next token is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.support.tiny import (
    chain_model,
    fraction_of_ones,
    make_trainer,
    piece_tokenizer,
    tiny_model,
    tiny_tokenizer,
)
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.hf import (
    cut_completion,
    eos_ids_of,
    hf_generate,
    is_finished,
)

STOP = ["</answer>"]
CLOSE = ["</", "answer", ">"]
TOKENIZER = piece_tokenizer()


def ids(pieces: list[str]) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(pieces)


def generate(
    model: Qwen3ForCausalLM, prompts: list[list[str]], stop: list[str] | None, **settings: Any
) -> list[list[str]]:
    config = GenerationConfig(**{"max_new_tokens": 12, "eos_token_id": [1], "pad_token_id": 0, **settings})
    completions = hf_generate(model, TOKENIZER, [ids(p) for p in prompts], config, stop)
    return [TOKENIZER.convert_ids_to_tokens(row) for row in completions]


@pytest.mark.parametrize(
    ("pieces", "stop", "kept"),
    [
        pytest.param(["1", "<eos>", "<pad>", "<pad>"], None, 2, id="eos_stays_and_padding_goes"),
        pytest.param(["<eos>", "<pad>"], None, 1, id="nothing_but_eos"),
        pytest.param(["1", "2", "3"], None, 3, id="no_end"),
        pytest.param(["1", *CLOSE, "a", "b"], STOP, 4, id="a_stop_string_of_three_tokens_stays"),
        pytest.param(["1", "</", "answer", ">b", "a"], STOP, 4, id="the_token_that_completes_it_stays_whole"),
        pytest.param(["1", *"</answer>", "a"], STOP, 10, id="the_same_string_in_characters"),
        pytest.param(["1", "</", "answer", "<pad>"], STOP, 4, id="half_a_stop_string_is_none"),
        pytest.param(["1", *CLOSE, "2", *CLOSE], STOP, 4, id="the_first_of_two"),
        pytest.param(["1", "<eos>", *CLOSE], STOP, 2, id="eos_before_the_stop_string"),
        pytest.param(["a", "b", "c", "d"], ["c", "b"], 2, id="whichever_of_two_strings_comes_first"),
        pytest.param([], STOP, 0, id="empty"),
    ],
)
def test_a_completion_ends_after_its_first_eos_or_stop_string(
    pieces: list[str], stop: list[str] | None, kept: int
) -> None:
    assert cut_completion(ids(pieces), TOKENIZER, {1}, stop) == ids(pieces)[:kept]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["1", "<eos>"], None, True),
        (["1", "<pad>"], None, True),  # where padding and end are one token, the tokenizer names it pad
        (["1", "2"], None, False),
        (["1", *CLOSE], STOP, True),
        (["1", *"</answer>"], STOP, True),
        (["1", *CLOSE], None, False),
        (["1", "</", "answer"], STOP, False),
        (["1", *CLOSE, "2", "3"], STOP, False),  # a later turn, cut by the length limit
        (["1", *CLOSE, "2", "</", "answer", ">b"], STOP, True),
        ([], STOP, False),
    ],
)
def test_a_completion_is_finished_when_it_ended_by_itself(
    pieces: list[str], stop: list[str] | None, expected: bool
) -> None:
    finished = is_finished([ids(pieces), ids(["a", "<eos>"])], TOKENIZER, [1], stop)
    assert finished.dtype == torch.bool
    assert finished.tolist() == [expected, True]


def test_rows_finish_in_any_vocabulary() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "w": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    assert is_finished([[2, 1], [2, 2]], tokenizer, [1], STOP).tolist() == [True, False]


@pytest.mark.parametrize("end", [CLOSE, ["</", "answer", ">b"], [*"</answer>"]], ids=["spread", "inside", "characters"])
def test_generation_stops_at_a_stop_string_in_any_tokenization(end: list[str]) -> None:
    model = chain_model(TOKENIZER, ["0", "1", "2", *end, "x", "y"])
    assert generate(model, [["0"]], STOP) == [["1", "2", *end]]
    assert generate(model, [["0"]], None, max_new_tokens=len(end) + 4) == [["1", "2", *end, "x", "y"]]


@pytest.mark.parametrize(
    ("of_config", "of_tokenizer", "found"),
    [(1, 1, [1]), ([1, 2], 2, [2, 1]), (None, 1, [1]), (None, None, []), ([1], None, [1])],
)
def test_eos_is_a_list_without_what_a_tokenizer_lacks(of_config: Any, of_tokenizer: Any, found: list[int]) -> None:
    assert eos_ids_of(GenerationConfig(eos_token_id=of_config), of_tokenizer) == found


def test_rows_of_one_batch_end_each_where_it_would_alone() -> None:
    model = chain_model(
        TOKENIZER, ["0", *CLOSE], ["3", "4", "5", "6", *CLOSE], ["7", "8", "9", "<eos>"], ["x", "y", "x"]
    )
    prompts = [["0"], ["4", "3"], ["7", "7", "7"], ["x"]]
    completions = generate(model, prompts, STOP, max_new_tokens=9)
    assert completions == [CLOSE, ["4", "5", "6", *CLOSE], ["8", "9", "<eos>"], ["y", "x"] * 4 + ["y"]]
    assert completions == [generate(model, [p], STOP, max_new_tokens=9)[0] for p in prompts]


def test_completion_is_independent_of_other_prompt_lengths() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model()  # attends to its prompt, unlike a chain
    prompts = [[9], [9, 10, 7, 11, 8], [12, 13, 14]]
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=[1], pad_token_id=0)
    together = hf_generate(model, tokenizer, prompts, config)
    assert together == [hf_generate(model, tokenizer, [p], config)[0] for p in prompts]
    assert len({tuple(row) for row in together}) == len(prompts)


@pytest.mark.parametrize("minimum", [1, 4])
def test_a_completion_may_end_with_eos_only_after_the_minimum(minimum: int) -> None:
    model = chain_model(TOKENIZER, ["0", "<eos>"], ["a", "a"])
    (completion,) = generate(model, [["0"]], None, min_new_tokens=minimum, max_new_tokens=6)
    assert completion[0] != "<eos>"
    assert completion.index("<eos>") >= minimum if "<eos>" in completion else len(completion) == 6


def test_no_prompt_has_no_completion() -> None:
    assert generate(chain_model(TOKENIZER, ["0", "1"]), [], STOP) == []


def test_a_stop_string_begun_by_the_prompt_does_not_end_it() -> None:
    model = chain_model(TOKENIZER, ["0", *CLOSE, "a", "b", "<eos>"])
    assert generate(model, [["0", *CLOSE[:2]]], STOP) == [[">", "a", "b", "<eos>"]]
    assert generate(model, [["0"]], STOP, min_new_tokens=4) == [[*CLOSE, "a", "b", "<eos>"]], "prompts do not count"


def test_stop_string_within_min_tokens_does_not_end_completion() -> None:
    # vLLM's rule for min_tokens, so that both engines end a completion at the same place
    model = chain_model(TOKENIZER, ["0", "1", *CLOSE, "a", "b", "c", "<eos>"])
    assert generate(model, [["0"]], STOP, min_new_tokens=3) == [["1", *CLOSE]]
    assert generate(model, [["0"]], STOP, min_new_tokens=5) == [["1", *CLOSE, "a", "b", "c", "<eos>"]]
    assert is_finished([ids(["a"] * 3)], TOKENIZER, [1], ["aa"], minimum=2).item(), "occurrences may overlap"
    assert [is_finished([ids(CLOSE)], TOKENIZER, [1], STOP, minimum).item() for minimum in (2, 3)] == [True, False]


# One setting, two engines.

SETTINGS: dict[str, Any] = {
    "stop": STOP,
    "sampling_min_tokens": 4,
    "sampling_temperature": 0.7,
    "max_completion_length": 9,
    "top_p": 0.9,
    "top_k": 11,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}


@pytest.fixture
def vllm_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What TRL hands to its vLLM side; the engine itself, which takes half a minute to start, stays out."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "trl_ext.generation.vllm.ColocatedEngine", lambda **arguments: (given.update(arguments), Mock())[1]
    )
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **SETTINGS, **vllm)
    return given


@pytest.mark.slow
def test_both_engines_get_the_same_sampling_settings(vllm_arguments: dict[str, Any], tmp_path: Path) -> None:
    hf = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **SETTINGS)
    extra = vllm_arguments["generation_kwargs"]
    of_stop = {"stop": STOP, "include_stop_str_in_output": True}
    assert extra == {**of_stop, "skip_special_tokens": False, "spaces_between_special_tokens": False, "min_tokens": 4}
    assert hf.args.stop == STOP  # hf_generate takes it from there
    assert hf.args.generation_kwargs == {"min_new_tokens": hf.generation_config.min_new_tokens} == {"min_new_tokens": 4}
    assert vllm_arguments["max_completion_length"] == hf.generation_config.max_new_tokens == 9
    for name, value in {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }.items():
        assert vllm_arguments[name] == getattr(hf.generation_config, name) == value


@pytest.mark.vllm
def test_vllm_accepts_the_sampling_settings(vllm_arguments: dict[str, Any]) -> None:
    from vllm import SamplingParams

    extra = vllm_arguments["generation_kwargs"]
    parameters = SamplingParams(max_tokens=vllm_arguments["max_completion_length"], **extra)
    assert (parameters.stop, parameters.include_stop_str_in_output, parameters.min_tokens) == (STOP, True, 4)


@pytest.mark.parametrize("use_vllm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_settings_of_the_user_are_kept_next_to_ours(
    use_vllm: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "generation_kwargs", {"seed": 3} if use_vllm else {"num_beams": 1})
    if use_vllm:
        assert request.getfixturevalue("vllm_arguments")["generation_kwargs"]["seed"] == 3
        assert request.getfixturevalue("vllm_arguments")["generation_kwargs"]["stop"] == STOP
    else:
        trainer = make_trainer(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, fraction_of_ones, **SETTINGS)
        assert trainer.generation_config.num_beams == 1
        assert trainer.generation_config.min_new_tokens == 4
