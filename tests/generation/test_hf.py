"""Where a completion ends, from token ids and from a model whose next token is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import GenerationConfig, Qwen3ForCausalLM

from tests.support.tiny import (
    WORDS,
    chain_model,
    fraction_of_ones,
    make_trainer,
    piece_tokenizer,
    tiny_model,
    tiny_tokenizer,
)
from trl_ext import ExtGRPOConfig, ExtGRPOTrainer
from trl_ext.generation.hf import (
    TokenLogProbs,
    _can_shrink,
    cut_completion,
    eos_ids_of,
    hf_generate,
    is_finished,
    is_partitioned,
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


def test_stop_string_within_min_tokens_does_not_end_completion() -> None:
    # vLLM's rule for min_tokens, so that both engines end a completion at the same place
    model = chain_model(TOKENIZER, ["0", "1", *CLOSE, "a", "b", "c", "<eos>"])
    assert generate(model, [["0"]], STOP, min_new_tokens=3) == [["1", *CLOSE]]
    assert generate(model, [["0"]], STOP, min_new_tokens=5) == [["1", *CLOSE, "a", "b", "c", "<eos>"]]


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
    assert extra == {"stop": STOP, "include_stop_str_in_output": True, "min_tokens": 4}
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


# A prompt that several rows have in common.

LONG = [3 + i % 14 for i in range(30)]
PROMPTS = [LONG, [5, 8], LONG, LONG, [9], [5, 8]]


def sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], logps: TokenLogProbs | None = None, **settings: Any
) -> tuple[list[list[int]], list[int]]:
    """Completions, and the tokens that went through the first layer, forward pass by forward pass."""
    sizes: list[int] = []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, out: sizes.append(args[0].shape[:2].numel()))
    torch.manual_seed(3)
    config = GenerationConfig(**{"max_new_tokens": 12, "eos_token_id": [1], "pad_token_id": 0, "top_k": 0, **settings})
    found = hf_generate(model, tiny_tokenizer(), prompts, config, logps=logps)
    hook.remove()
    return found, sizes


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"do_sample": False}], ids=["sampled", "greedy"])
def test_shared_prompt_is_computed_once_for_the_same_completions(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model().double()
    logps, plain_logps = TokenLogProbs(len(PROMPTS)), TokenLogProbs(len(PROMPTS))
    found, sizes = sample(model, PROMPTS, logps, **settings)
    assert sizes[:2] == [3 * 29, 6]  # three prompts but for their last tokens; then the last tokens of all rows
    monkeypatch.setattr("trl_ext.generation.hf._prompts_once", lambda *_: None)
    plain, every_prompt = sample(model, PROMPTS, plain_logps, **settings)
    assert every_prompt[0] == 6 * 30
    assert found == plain
    assert {len(row) for row in logps.rows()} == {max(map(len, found))}  # the last token's as well
    # the processor takes log-probabilities in float32
    assert torch.tensor(logps.rows()).sub(torch.tensor(plain_logps.rows())).abs().max() < 1e-6
    assert len({tuple(row) for row in found}) > 2


@pytest.mark.parametrize("settings", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_prompts_are_not_shared_with_other_kinds_of_cache(settings: dict[str, Any]) -> None:
    model = tiny_model()
    assert (
        sample(model, PROMPTS, do_sample=False, disable_compile=True, **settings)[0]
        == sample(model, PROMPTS, do_sample=False)[0]
    )


def test_no_rank_runs_an_unmatched_forward_pass_when_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    repeated, differing = [PROMPTS[0]] * 4, [PROMPTS[0], *([i, *PROMPTS[0][1:]] for i in (4, 5, 6))]
    settings: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}

    def passes(prompts: list[list[int]]) -> int:
        return len(sample(model, prompts, **settings)[1])

    assert passes(repeated) == passes(differing) + 1 == 4  # whole weights on every rank
    # as ZeRO-3 has it without gathering for generation: each forward pass is a collective operation
    monkeypatch.setattr("trl_ext.generation.hf.is_partitioned", lambda param: True)
    assert passes(repeated) == passes(differing) == 3
    monkeypatch.setattr("trl_ext.generation.hf.is_partitioned", lambda param: False)
    monkeypatch.setattr("trl_ext.generation.hf.is_fsdp_managed_module", lambda model: True)
    assert passes(repeated) == passes(differing) == 3


def test_partitioned_means_a_zero3_parameter_not_gathered() -> None:
    parts, whole = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(3))
    assert not is_partitioned(parts)  # it has no elements on any rank
    parts.ds_numel = whole.ds_numel = 3  # type: ignore[attr-defined]
    assert is_partitioned(parts)
    assert not is_partitioned(whole)


def test_distinct_or_one_token_prompts_are_not_shared() -> None:
    assert sample(tiny_model(), PROMPTS[:2])[1][0] == 2 * 30
    assert sample(tiny_model(), [[4], [4]])[1][0] == 2


# Rows that have ended leave the batch.

ENDS = [1, 3, 4, 6]  # tokens that all end a completion
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize("stop", [None, ["yz"]], ids=["eos", "stop string"])
def test_finished_rows_leave_the_batch_and_others_are_unchanged(stop: list[str] | None) -> None:
    model = chain_model(TOKENIZER, [*LETTERS, "<eos>"])
    prompts = [ids([*LETTERS[:i]]) for i in (3, 25, 9, 14, 21, 20, 19, 24, 8, 23, 22, 1)]
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=[1], pad_token_id=0)
    logps, sizes = TokenLogProbs(len(prompts)), []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, out: sizes.append(args[0].shape[0]))
    found = hf_generate(model, TOKENIZER, prompts, config, stop, logps)
    hook.remove()
    assert sorted(set(sizes), reverse=True) == [12, 6]  # six is too few to leave again
    assert sizes == sorted(sizes, reverse=True)
    for row, prompt in enumerate(prompts):
        rest = [
            *LETTERS[len(prompt) :],
            *([] if stop and len(prompt) < 25 else ["<eos>"]),
        ]  # the stop is not in a prompt
        assert found[row] == ids(rest)[:24]
        alone = TokenLogProbs(1)
        assert hf_generate(model, TOKENIZER, [prompt], config, stop, alone) == [found[row]]
        length = len(found[row])
        torch.testing.assert_close(torch.tensor(logps.rows()[row][:length]), torch.tensor(alone.rows()[0][:length]))


def test_shrunken_batch_keeps_prompts_and_minimum_lengths() -> None:
    model = tiny_model(seed=2).double()  # attends to its prompt and itself, unlike a chain
    prompts = [[3 + (i * j) % 14 for j in range(1, 2 + i % 5)] for i in range(40)]
    settings = {
        "max_new_tokens": 30,
        "min_new_tokens": 6,
        "repetition_penalty": 1.5,
        "eos_token_id": [*ENDS, 9, 12, 16],
    }
    found, sizes = sample(model, prompts, do_sample=False, **settings)
    assert len({size for size in sizes if size <= len(prompts)}) > 2  # it shrank more than once
    assert found == [sample(model, [prompt], do_sample=False, **settings)[0][0] for prompt in prompts]
    assert min(map(len, found)) >= 6
    assert len({tuple(row) for row in found}) > 10


def test_sampled_completions_do_not_depend_on_which_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a distribution: the share of each token at each place, over many rows of one prompt."""
    model = tiny_model()
    settings = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": ENDS}

    def shares(found: list[list[int]]) -> torch.Tensor:
        counts = torch.zeros(12, len(WORDS))
        for row in found:
            for place, token in enumerate(row):
                counts[place, token] += 1 / len(found)
        return counts

    found, sizes = sample(model, [[5, 8]] * 4000, **settings)
    monkeypatch.setattr("trl_ext.generation.hf._can_shrink", lambda *_: False)
    torch.manual_seed(4)
    plain, plain_sizes = sample(model, [[5, 8]] * 4000, **settings)
    assert sum(sizes) < sum(plain_sizes)
    # a fraction of 4,000 draws has a standard error of at most 0.008; two of them, 12 x 18 times compared
    assert (shares(found) - shares(plain)).abs().max() < 0.045
    early = [len(row) for row in found if len(row) < 12]
    assert abs(len(early) - sum(len(row) < 12 for row in plain)) < 0.045 * 4000


def test_batch_does_not_shrink_under_zero3_or_other_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tiny_model(), GenerationConfig(max_new_tokens=4)
    assert _can_shrink(model, plain)
    assert not _can_shrink(model, GenerationConfig(max_new_tokens=4, num_beams=2))
    assert not _can_shrink(model, GenerationConfig(max_new_tokens=4, cache_implementation="static"))
    assert not _can_shrink(model, GenerationConfig(max_new_tokens=4, use_cache=False))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert _can_shrink(model, plain)
    monkeypatch.setattr("trl_ext.generation.hf.is_deepspeed_zero3_enabled", lambda: True)
    assert not _can_shrink(model, plain)
