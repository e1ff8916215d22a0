"""The decoding loop of our own against that of transformers: the same completions in less work."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch.distributed.tensor import distribute_tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig, Qwen3ForCausalLM

from tests.support.tiny import WORDS, chain_model, piece_tokenizer, tiny_model, tiny_tokenizer
from trl_ext.generation.decoding import (
    Decoding,
    draw,
    gathers_weights,
    is_partitioned,
    own_loop_unsupported,
)
from trl_ext.generation.hf import hf_generate
from trl_ext.generation.kv_sharing import BufferedLayer, Sequences, _select_rows_of
from trl_ext.generation.token_logprobs import TokenLogProbs

TOKENIZER = piece_tokenizer()


def draw_as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    multinomial = lambda scores, of_row: torch.multinomial(scores.softmax(-1)[of_row], 1)  # noqa: E731
    monkeypatch.setattr("trl_ext.generation.decoding.draw", multinomial)


def ids(pieces: list[str]) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids(pieces)


def use_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate with the loop of transformers; its random numbers are those of `draw_as_transformers`."""
    monkeypatch.setattr("trl_ext.generation.hf.own_loop_unsupported", lambda *_: "asked for by a test")


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


def assert_same_logps(ours: TokenLogProbs, theirs: TokenLogProbs, completions: list[list[int]]) -> None:
    for mine, other, row in zip(ours.rows(), theirs.rows(), completions, strict=True):
        torch.testing.assert_close(torch.tensor(mine[: len(row)]), torch.tensor(other[: len(row)]))


def test_mask_that_generate_leaves_out_is_one_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts, decode = tiny_model(), [LONG, LONG[::-1]], Decoding.__call__
    expected = sample(model, prompts, do_sample=False)
    newer = lambda self, *given, **more: decode(self, *given, **more | {"attention_mask": None})  # noqa: E731
    monkeypatch.setattr(Decoding, "__call__", newer)
    assert sample(model, prompts, do_sample=False) == expected


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"do_sample": False}], ids=["sampled", "greedy"])
def test_what_rows_share_is_computed_once_for_the_same_tokens(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model().double()
    logps, plain_logps = TokenLogProbs(len(PROMPTS)), TokenLogProbs(len(PROMPTS))
    draw_as_transformers(monkeypatch)
    found, sizes = sample(model, PROMPTS, logps, **settings)
    so_far = [{(*prompt, -1, *row[:n]) for prompt, row in zip(PROMPTS, found, strict=True)} for n in range(1, 12)]
    assert sizes == [3 * 30, *map(len, so_far)]  # three prompts, then what differs after each token
    assert sizes[-1] == (6 if settings["do_sample"] else 3)
    use_transformers(monkeypatch)
    plain, every_prompt = sample(model, PROMPTS, plain_logps, **settings)
    assert every_prompt[0] == 6 * 30
    assert found == plain
    assert {len(row) for row in logps.rows()} == {max(map(len, found))}  # the last token's as well
    assert_same_logps(logps, plain_logps, found)
    assert len({tuple(row) for row in found}) > 2


def test_rows_part_where_they_draw_different_tokens() -> None:
    ids = torch.tensor([[0, 7], [8, 9], [0, 7], [8, 9], [8, 9]])
    penalty = SimpleNamespace(prompt_ignore_length=torch.tensor([1, 2, 1, 2, 2]))
    processors: Any = [penalty]
    batch = Sequences(ids, (ids > 0).long(), processors)
    layer = BufferedLayer()
    batch.cache.layers.append(layer)
    prompts = torch.arange(8.0).view(2, 1, 2, 2)  # (sequences, heads, tokens, size)
    layer.update(prompts, -prompts)
    assert batch.ids.tolist() == [[0, 7], [8, 9]]
    batch.append(torch.tensor([5, 6, 5, 4, 6]))
    assert batch.ids[batch.of_row].tolist() == [[0, 7, 5], [8, 9, 6], [0, 7, 5], [8, 9, 4], [8, 9, 6]]
    assert batch.mask[batch.of_row].tolist() == [[0, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert len(batch.ids) == 3
    torch.testing.assert_close(layer.keys[batch.of_row], prompts[[0, 1, 0, 1, 1]])
    torch.testing.assert_close(layer.values[batch.of_row], -prompts[[0, 1, 0, 1, 1]])
    assert penalty.prompt_ignore_length[batch.of_row].tolist() == [1, 2, 1, 2, 2]
    batch.ended[batch.of_row[0]] = True
    batch.append(torch.tensor([3, 3, 4, 3, 3]))  # what rows draw that have ended does not matter
    assert len(batch.ids) == 3
    assert list(batch.completions(batch.ended[batch.of_row], 2)) == [(0, [5]), (2, [5])]
    batch.keep(torch.tensor([4, 3]))
    assert batch.ids[batch.of_row].tolist() == [[8, 9, 6, 3], [8, 9, 4, 3]]
    assert layer.keys.tolist() == prompts[[1, 1]].tolist()


def test_rows_generate_on_their_own_unless_weights_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = tiny_model(), GenerationConfig(max_new_tokens=4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert own_loop_unsupported(model, config) is None  # whole weights on every rank
    # as ZeRO-3 has it without gathering for generation: each forward pass is a collective operation
    monkeypatch.setattr("trl_ext.generation.decoding.is_partitioned", lambda param: True)
    assert "sharded" in str(own_loop_unsupported(model, config))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert own_loop_unsupported(model, config) is None
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr("trl_ext.generation.decoding.is_partitioned", lambda param: False)
    monkeypatch.setattr("trl_ext.generation.decoding.is_fsdp_managed_module", lambda model: True)
    assert "sharded" in str(own_loop_unsupported(model, config))


@pytest.mark.parametrize("whole", [True, False])
def test_ranks_step_together_only_if_weights_are_gathered(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    model = tiny_model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr("trl_ext.generation.decoding.is_partitioned", lambda param: not whole)
    monkeypatch.setattr(model, "generate", lambda **kwargs: given.update(kwargs) or [[3]])
    if whole:
        sample(model, [[5]])
    else:
        with pytest.raises(TypeError):  # what transformers' loop would have returned is a tensor
            sample(model, [[5]])
    assert given["synced_gpus"] is not whole


def test_weights_of_fsdp2_are_gathered() -> None:
    model = tiny_model()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert not gathers_weights(model)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model.lm_head.weight = torch.nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
        assert gathers_weights(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("device", "deterministic"), [("mps", False), ("cuda", True)])
def test_devices_without_the_running_sums_take_the_other_loop(
    device: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = tiny_model(), GenerationConfig(max_new_tokens=4)
    monkeypatch.setattr(type(model), "device", torch.device(device))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert f"which {device} lacks" in str(own_loop_unsupported(model, config))
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    assert own_loop_unsupported(model, config) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "greedy"])
def test_scores_that_are_not_finite_end_the_rollout(value: float, tokens: int, drawn: bool) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[:, 0] = value
    with pytest.raises(FloatingPointError, match=r"NaN or infinite in 2 of 2 rows.*the policy has diverged"):
        sample(model, [[5], [8, 9]], do_sample=drawn, max_new_tokens=tokens)


def test_a_value_per_row_of_a_processor_follows_its_row() -> None:
    penalty = SimpleNamespace(prompt_ignore_length=torch.tensor([4, 5, 6]))
    processors: Any = [penalty, SimpleNamespace(prompt_ignore_length=None)]
    _select_rows_of(processors, torch.tensor([2, 0]))
    assert penalty.prompt_ignore_length.tolist() == [6, 4]


def test_partitioned_means_a_zero3_parameter_not_gathered() -> None:
    parts, whole = torch.nn.Parameter(torch.empty(0)), torch.nn.Parameter(torch.empty(3))
    assert not is_partitioned(parts)  # it has no elements on any rank
    parts.ds_numel = whole.ds_numel = 3  # type: ignore[attr-defined]
    assert is_partitioned(parts)
    assert not is_partitioned(whole)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"do_sample": True}, {"do_sample": False}, {"top_p": 0.7, "do_sample": True},
    {"min_p": 0.1, "temperature": 0.7, "repetition_penalty": 1.4, "min_new_tokens": 5, "do_sample": True}],
    ids=["sampled", "greedy", "top_p", "processors"])  # fmt: skip
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_loops_draw_the_same_tokens_and_logps(
    settings: dict[str, Any], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model().to(torch.float64 if attention == "sdpa" else torch.float32)  # eager has no padding in float64
    model.set_attn_implementation(attention)
    prompts = [[3 + (i * j) % 14 for j in range(1, 2 + i % 5)] for i in range(7)]  # too few to leave the batch
    logps, plain_logps = TokenLogProbs(7), TokenLogProbs(7)
    draw_as_transformers(monkeypatch)
    found, _ = sample(model, prompts, logps, max_new_tokens=50, **settings)
    use_transformers(monkeypatch)
    assert found == sample(model, prompts, plain_logps, max_new_tokens=50, **settings)[0]
    assert_same_logps(logps, plain_logps, found)
    assert max(map(len, found)) > 40  # longer than the first buffers


def test_a_padded_prompt_is_not_taken_for_one_with_the_pad_token() -> None:
    model, greedy = tiny_model().double(), {"do_sample": False}
    prompts = [[0, 5, 8], [5, 8], [5, 8]]
    assert sample(model, prompts, **greedy)[0] == [sample(model, [p], **greedy)[0][0] for p in prompts]
    assert sample(model, prompts, **greedy)[1][0] == 2 * 3


def test_an_adapter_generates_with_its_own_weights() -> None:
    plain = tiny_model()
    without, _ = sample(plain, PROMPTS, do_sample=False)
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert own_loop_unsupported(model, GenerationConfig()) is None
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[1], pad_token_id=0, do_sample=False)
    found = hf_generate(model, tiny_tokenizer(), PROMPTS, config)
    assert found != without
    assert found == hf_generate(model.merge_and_unload(), tiny_tokenizer(), PROMPTS, config)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beam_search"),
    ({"cache_implementation": "static"}, "cache"),
    ({"use_cache": False}, "cache"),
    ({"guidance_scale": 2.0}, "guidance_scale"),
]


@pytest.mark.parametrize(("settings", "reason"), UNSUPPORTED)
def test_what_the_own_loop_cannot_do_is_left_to_transformers(settings: dict[str, Any], reason: str) -> None:
    assert reason in str(own_loop_unsupported(tiny_model(), GenerationConfig(max_new_tokens=4, **settings)))


def test_other_models_and_adapters_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GenerationConfig(max_new_tokens=4)
    prefix = get_peft_model(tiny_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "adapter" in str(own_loop_unsupported(prefix, config))
    assert "full attention" in str(own_loop_unsupported(sliding_model(), config))
    model = tiny_model()
    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", lambda *_: None, raising=False)
    assert "prepares its inputs" in str(own_loop_unsupported(model, config))


def sliding_model() -> Gemma3ForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=len(WORDS), num_attention_heads=2, sliding_window=4, **sizes))


def test_fallback_says_why_and_ends_rows_where_they_end(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = tiny_model(), [PROMPTS[0], PROMPTS[1]]
    with caplog.at_level("INFO", "trl_ext"):
        found, _ = sample(model, prompts, do_sample=False, use_cache=False)
    assert found == sample(model, prompts, do_sample=False)[0]
    assert "it was asked for another cache" in caplog.text


# Rows that have ended leave the batch.

ENDS = [1, 3, 4, 6]  # tokens that all end a completion
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, ["yz"]], ids=["eos", "stop string"])
def test_finished_rows_leave_the_batch_and_others_are_unchanged(stop: list[str] | None) -> None:
    model = chain_model(TOKENIZER, [*LETTERS, "<eos>"])
    prompts = [ids([*LETTERS[:i]]) for i in (3, 25, 9, 14, 21, 20, 19, 24, 8, 23, 22, 1)]
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=[1], pad_token_id=0)
    logps, sizes = TokenLogProbs(len(prompts)), []
    hook = model.model.layers[0].register_forward_hook(lambda _, args, out: sizes.append(args[0].shape[0]))
    found = hf_generate(model, TOKENIZER, prompts, config, stop, logps)
    hook.remove()
    assert sorted(set(sizes), reverse=True) == [12, 8, 5]  # five are too few to leave again
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    use_transformers(monkeypatch)
    torch.manual_seed(4)
    plain, plain_sizes = sample(model, [[5, 8]] * 4000, **settings)
    assert sum(sizes) < sum(plain_sizes)
    # a fraction of 4,000 draws has a standard error of at most 0.008; two of them, 12 x 18 times compared
    assert (shares(found) - shares(plain)).abs().max() < 0.045
    early = [len(row) for row in found if len(row) < 12]
    assert abs(len(early) - sum(len(row) < 12 for row in plain)) < 0.045 * 4000


# One token.


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.4999, 3), (0.5, 4), (1 - 2**-53, 4)]
)
def test_a_token_is_drawn_where_the_uniform_number_falls(
    uniform: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]]).log()  # three of probability 0
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, uniform))
    assert draw(scores, torch.tensor([0])).tolist() == [[token]]


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_their_softmax_says() -> None:
    torch.manual_seed(1)
    scores = torch.tensor([[0.0, 1.0, -2.0, 3.0], [2.0, 2.0, -torch.inf, 0.0]])
    drawn = torch.cat([draw(scores, torch.arange(2)) for _ in range(20_000)], dim=1)
    shares = torch.stack([(drawn == token).float().mean(dim=1) for token in range(4)], dim=1)
    assert (shares - scores.softmax(-1)).abs().max() < 0.0125  # 3.5 standard errors of one share


@pytest.mark.parametrize("token", [1, 2, 777, 149_998, 149_999])
def test_rare_tokens_are_told_apart_in_a_large_vocabulary(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.full((1, 150_000), -24.0)  # 4e-11 each: of float32 numbers near 1, one for 1,600 of them
    scores[:, 0] = 0
    rare = math.exp(-24)
    middle = (1 + (token - 0.5) * rare) / (1 + 149_999 * rare)
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, middle))
    assert draw(scores, torch.tensor([0])).tolist() == [[token]]
