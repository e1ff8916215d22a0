"""Shared prompts give the gradient of whole sequences, whatever the layers, with and without checkpointing them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_ext.generation.kv_sharing import unsupported_checkpointing, unsupported_in_a_step
from trl_ext.step import prompt_sharing
from trl_ext.step.prompt_sharing import Completions, SharedPrompts, completion_log_probs

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "olmo2", "granite", "glm4", "phi3", "gemma", "qwen3_moe")
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12], [0, 3, 4, 5, 6]])  # 0 is padding
GROUPS = [3, 4, 9]
MICRO_BATCHES = ([4, 3, 3], [9, 4], [9, 9, 3])  # the rows' groups


def model_of(family: str, lora: str | None = None) -> Any:
    """Two layers of random weights, in float64, that train with dropout 0."""
    torch.manual_seed(0)
    size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in family else {}
    config = AutoConfig.for_model(family, **size, **heads, **experts, sliding_window=None)
    experts_in_float64 = {"experts_implementation": "eager"} if experts else {}
    model: Any = AutoModelForCausalLM.from_config(config, **experts_in_float64).double()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        adapter = peft.LoraConfig(r=2, target_modules=lora, init_lora_weights="gaussian", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter).double()
    return model.train()


def completions(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, 4) ids and mask of completions of 1 to 4 tokens."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (rows, 1), generator=random)
    mask = (torch.arange(4) < lengths).long()
    return torch.randint(1, 32, (rows, 4), generator=random) * mask, mask


def gradient_of_whole_sequences(model: Any) -> dict[str, Tensor]:
    """Every row's sequence in one pass, prompt included."""
    for number, groups in enumerate(MICRO_BATCHES):
        ids, mask = completions(len(groups), number)
        prompts = PROMPTS[[GROUPS.index(group) for group in groups]]
        labels = torch.cat([torch.full_like(prompts, -100), ids.masked_fill(mask == 0, -100)], dim=1)
        attended = torch.cat([(prompts != 0).long(), mask], dim=1)
        outputs = model(torch.cat([prompts, ids], dim=1), attended, labels=labels, fused_lm_head=True)
        loss_of(outputs.log_probs[:, -4:]).backward()
    return taken_from(model)


def gradient_on_shared_prompts(model: Any, apart: bool = False) -> dict[str, Tensor]:
    """The same rows on one set of prompts."""
    shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, len(MICRO_BATCHES), apart)
    decoder = (model.get_base_model() if isinstance(model, peft.PeftModel) else model).base_model
    for number, groups in enumerate(MICRO_BATCHES):
        prompts = PROMPTS[[GROUPS.index(group) for group in groups]]
        ids, mask = completions(len(groups), number)
        rows = Completions(groups, mask.sum(dim=1).tolist())
        logp, _ = completion_log_probs(model, shared.cache(decoder, rows), prompts, ids, mask, rows)
        loss_of(logp).backward()
        shared.backward()
    return taken_from(model)


def loss_of(logp: Tensor) -> Tensor:
    """A function whose gradient differs from token to token."""
    return (logp * torch.arange(1, logp.numel() + 1).view(logp.shape)).sum()


def taken_from(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys() != set()
    largest = max(gradient.abs().max() for gradient in plain.values())
    assert largest > 1
    for name in plain:  # norms compute in float32
        assert (ours[name] - plain[name]).abs().max() < 1e-6 * largest, name


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_is_that_of_whole_sequences(family: str, checkpointed: bool, apart: bool) -> None:
    model = model_of(family)
    plain = gradient_of_whole_sequences(model)
    if checkpointed:
        model.gradient_checkpointing_enable()
    assert unsupported_in_a_step(model) is None
    assert unsupported_checkpointing(model, reentrant=False) is None
    assert_same(gradient_on_shared_prompts(model, apart), plain)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_are_kept_twice_only_where_the_passes_are_one(apart: bool) -> None:
    """The prompts' embeddings get a gradient in the backward pass that the completions' have theirs in, or after it."""
    model = model_of("qwen3")
    shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, 1, apart)
    ids, mask = completions(3, 0)
    rows = Completions(GROUPS, mask.sum(dim=1).tolist())
    logp, _ = completion_log_probs(model, shared.cache(model.base_model, rows), PROMPTS, ids, mask, rows)
    loss_of(logp).backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    of_completions = weight.grad.clone()
    shared.backward()
    assert torch.equal(weight.grad, of_completions) != apart
    shared.backward()  # does nothing more
    assert shared._parts == []


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("layers", ["all-linear", r".*(q|o)_proj", r".*1\.mlp\.up_proj"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradient_of_an_adapter_is_that_of_whole_sequences(checkpointed: bool, layers: str, apart: bool) -> None:
    """Where it has no part in a layer's keys and values, or in none of them, these have no gradient."""
    model = model_of("qwen2", lora=layers)
    plain = gradient_of_whole_sequences(model)
    if checkpointed:
        model.gradient_checkpointing_enable()  # which has the embeddings require a gradient
        assert model.get_input_embeddings()(PROMPTS).requires_grad
    ours = gradient_on_shared_prompts(model, apart)
    assert all("lora" in name for name in ours)
    assert_same(ours, plain)


def test_checkpointed_layers_compute_prompts_twice_per_set() -> None:
    """Once forward and once again in the backward pass, as the completions of each micro-batch."""
    model, widths = model_of("qwen3"), []
    model.gradient_checkpointing_enable()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape[:2])))
    gradient_on_shared_prompts(model)
    prompts = len(PROMPTS), PROMPTS.shape[1] - 1
    rows = [(1, int(completions(len(groups), i)[1].sum())) for i, groups in enumerate(MICRO_BATCHES)]  # no padding
    assert sorted(widths) == sorted(2 * [prompts, *rows])


def test_log_probabilities_do_not_depend_on_the_order_of_rows() -> None:
    model = model_of("qwen3")
    found = []
    with torch.no_grad():
        for _ in range(2):  # a set that is used up is computed again
            shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, 2, separate_backward=True)
            for groups in ([3, 9], [9, 3]):
                ids, mask, rows = torch.full((2, 2), 7), torch.ones(2, 2, dtype=torch.long), Completions(groups, [2, 2])
                prompts = PROMPTS[[GROUPS.index(group) for group in groups]]
                logp, _ = completion_log_probs(model, shared.cache(model.base_model, rows), prompts, ids, mask, rows)
                found.append(logp if groups[0] == 3 else logp.flip(0))
            assert shared._parts == []
    assert all(torch.allclose(found[0], other, atol=1e-7) for other in found[1:])
    assert not torch.allclose(found[0][0], found[0][1])


def test_gradients_of_half_precision_add_up_in_float32() -> None:
    """Autograd would add up the bfloat16 gradients of a prompt's micro-batches in bfloat16."""
    model = model_of("qwen2").to(torch.bfloat16)
    shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, 2)
    ids, mask = completions(1, 0)
    rows = Completions([3], mask.sum(dim=1).tolist())
    cache = shared.cache(model.base_model, rows)
    completion_log_probs(model, cache, PROMPTS[:1], ids, mask, rows)[0].sum().backward()
    sums = [part.gradient for parts in shared._parts for part in parts]
    assert {total.dtype for total in sums if total is not None} == {torch.float32}
    assert len(sums) == 4


def test_layers_that_ignore_the_cache_are_an_error() -> None:
    model = model_of("qwen3")
    shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, 1)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match="1 of 2 layers of Qwen3Model do not use the cache"):
        shared.cache(model.base_model, Completions(GROUPS, [1, 1, 1]))


def test_attention_that_does_not_take_rows_apart_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    monkeypatch.setattr(prompt_sharing, "keys_with", lambda lengths, keys: keys)  # as if a model changed them
    shared = SharedPrompts(PROMPTS, (PROMPTS != 0).long(), GROUPS, 1)
    ids, mask = completions(3, 0)
    rows = Completions(GROUPS, mask.sum(dim=1).tolist())
    cache = shared.cache(model.base_model, rows)
    with pytest.raises(ValueError, match="2 of 2 layers do not call transformers' sdpa attention"):
        completion_log_probs(model, cache, PROMPTS, ids, mask, rows)
    model.set_attn_implementation("eager")
    assert "'sdpa' does" in str(unsupported_in_a_step(model))


def test_reentrant_checkpointing_is_refused() -> None:
    assert "use_reentrant: false" in str(unsupported_checkpointing(model_of("qwen3"), reentrant=True))


def test_layers_that_drop_the_cache_are_refused() -> None:
    assert "drop the cache" in str(unsupported_checkpointing(torch.nn.Linear(2, 2), reentrant=False))
