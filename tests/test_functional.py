"""The course handout's functions: names, conventions and numbers."""

from __future__ import annotations

import inspect
import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch import Tensor
from torch.testing import assert_close

from tests.support.tiny import tiny_model, tiny_tokenizer
from trl_ext import functional
from trl_ext.functional import (
    LOSS_TYPES,
    compute_entropy,
    compute_group_normalized_rewards,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    get_response_log_probs,
    grpo_microbatch_train_step,
    log_generations,
    masked_mean,
    masked_normalize,
    sft_microbatch_train_step,
    tokenize_prompt_and_output,
)
from trl_ext.registry import UnknownName

NEEDED = "needed"
STEP = {"policy_log_probs": NEEDED, "response_mask": NEEDED, "gradient_accumulation_steps": NEEDED}
LOSS_ARGUMENTS = {"raw_rewards": None, "advantages": None, "old_log_probs": None, "cliprange": None}
SIGNATURES: dict[str, dict[str, Any]] = {
    "tokenize_prompt_and_output": {"prompt_strs": NEEDED, "output_strs": NEEDED, "tokenizer": NEEDED},
    "compute_entropy": {"logits": NEEDED},
    "get_response_log_probs": {
        "model": NEEDED, "input_ids": NEEDED, "labels": NEEDED, "return_token_entropy": False,
    },
    "masked_normalize": {"tensor": NEEDED, "mask": NEEDED, "normalize_constant": NEEDED, "dim": None},
    "masked_mean": {"tensor": NEEDED, "mask": NEEDED, "dim": None},
    "sft_microbatch_train_step": {**STEP, "normalize_constant": 1.0},
    "compute_group_normalized_rewards": {
        "reward_fn": NEEDED, "rollout_responses": NEEDED, "repeated_ground_truths": NEEDED, "group_size": NEEDED,
        "advantage_eps": NEEDED, "normalize_by_std": NEEDED,
    },
    "compute_naive_policy_gradient_loss": {"raw_rewards_or_advantages": NEEDED, "policy_log_probs": NEEDED},
    "compute_grpo_clip_loss": {
        "advantages": NEEDED, "policy_log_probs": NEEDED, "old_log_probs": NEEDED, "cliprange": NEEDED,
    },
    "compute_policy_gradient_loss": {"policy_log_probs": NEEDED, "loss_type": NEEDED, **LOSS_ARGUMENTS},
    "grpo_microbatch_train_step": {**STEP, "loss_type": NEEDED, **LOSS_ARGUMENTS},
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_handouts(name: str) -> None:
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    assert {p.name: NEEDED if p.default is p.empty else p.default for p in parameters} == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_course_finds_functions_and_tests_by_its_names(name: str) -> None:
    """Its `tests/adapters.py` calls `run_...`, and its handout says `pytest -k test_...`."""
    adapters = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "adapters.py"))
    assert adapters[f"run_{name}"] is getattr(functional, name)
    assert any(test.startswith(f"test_{name}_") for test in globals())


# Tokens. Ids of the tiny tokenizer: <pad> 0, <eos> 1, <unk> 2, a 3, b 4, c 5, stop 6, + 7, = 8.


def test_tokenize_prompt_and_output_joins_pads_and_shifts() -> None:
    batch = tokenize_prompt_and_output(["a", "a b c"], ["+ = +", "="], tiny_tokenizer())
    assert batch["input_ids"].tolist() == [[3, 7, 8], [3, 4, 5]]
    assert batch["labels"].tolist() == [[7, 8, 7], [4, 5, 8]]
    assert batch["response_mask"].tolist() == [[True, True, True], [False, False, True]]
    batch = tokenize_prompt_and_output(["a b", "a"], ["c stop =", "b"], tiny_tokenizer())
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6], [3, 4, 0, 0]]
    assert batch["labels"].tolist() == [[4, 5, 6, 8], [4, 0, 0, 0]]
    assert batch["response_mask"].tolist() == [[False, True, True, True], [True, False, False, False]]
    assert (batch["labels"].dtype, batch["response_mask"].dtype) == (torch.long, torch.bool)


def test_prompt_and_output_are_tokenized_apart() -> None:
    tokenizer = tiny_tokenizer(["<pad>", "<eos>", "<unk>", "ab", "a", "b"])
    batch = tokenize_prompt_and_output(["a"], ["b"], tokenizer)  # joined as text it would be the one token `ab`
    assert (batch["input_ids"].tolist(), batch["labels"].tolist()) == ([[4]], [[5]])


def test_special_tokens_come_before_the_prompt_and_not_inside() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    batch = tokenize_prompt_and_output(["a"], ["b c"], tokenizer)
    assert batch["input_ids"].tolist() == [[1, 3, 4]]
    assert batch["labels"].tolist() == [[3, 4, 5]]
    assert batch["response_mask"].tolist() == [[False, True, True]]


def test_without_a_pad_token_eos_pads() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    batch = tokenize_prompt_and_output(["a", "a b"], ["b", "c stop"], tokenizer)
    assert batch["labels"].tolist() == [[4, 1, 1], [4, 5, 6]]


def test_an_empty_output_has_an_empty_mask() -> None:
    batch = tokenize_prompt_and_output(["a b", "a b"], ["", "c"], tiny_tokenizer())
    assert batch["response_mask"].tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(("prompts", "outputs"), [(["a"], []), ([], []), (["a"], ["b", "c"])])
def test_as_many_outputs_as_prompts_are_needed(prompts: list[str], outputs: list[str]) -> None:
    with pytest.raises(ValueError, match=f"got {len(prompts)} prompts and {len(outputs)} outputs"):
        tokenize_prompt_and_output(prompts, outputs, tiny_tokenizer())


# Entropy and log-probabilities.


def test_compute_entropy_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -1e4, -1e4]]])
    half = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert compute_entropy(logits)[0].tolist() == pytest.approx([math.log(4), half], abs=1e-6)


def test_entropy_and_its_gradient_ignore_zero_probability_tokens() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    entropy = compute_entropy(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6  # at its maximum over the two tokens that remain


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_entropy_of_large_logits_is_finite_and_right_to_float32(scale: float) -> None:
    logits = torch.linspace(-1, 1, 60).sin().view(2, 3, 10) * scale
    p = torch.softmax(logits.double(), dim=-1)
    wanted = -torch.where(p > 0, p * p.log(), 0.0).sum(dim=-1)
    assert_close(compute_entropy(logits).double(), wanted, rtol=0, atol=1e-6)


def test_get_response_log_probs_are_those_of_the_labels() -> None:
    model = tiny_model()
    batch = tokenize_prompt_and_output(["a b", "c + 1"], ["= 2 3", "="], tiny_tokenizer())
    result = get_response_log_probs(model, batch["input_ids"], batch["labels"])
    assert set(result) == {"log_probs"}
    logits = model(batch["input_ids"]).logits.double()
    wanted = [[logits[b, s].log_softmax(-1)[batch["labels"][b, s]].item() for s in range(4)] for b in range(2)]
    assert_close(result["log_probs"].double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)
    result["log_probs"].sum().backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


def test_the_entropy_comes_with_the_log_probs_if_asked_for() -> None:
    model, ids = tiny_model(), torch.tensor([[3, 4, 5]])
    result = get_response_log_probs(model=model, input_ids=ids, labels=ids, return_token_entropy=True)
    assert set(result) == {"log_probs", "token_entropy"}
    assert_close(result["token_entropy"], compute_entropy(model(ids).logits), rtol=0, atol=1e-6)


# Masked sums.

VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 0]])


POISONED = VALUES.masked_fill(MASK == 0, math.nan)  # what is masked never matters, not even NaN


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize(("dim", "total"), [(None, 8.0), (0, [1.0, 7.0, 0.0]), (1, [3.0, 5.0]), (-1, [3.0, 5.0])])
def test_masked_normalize_along_a_dimension(dim: int | None, total: Any, kind: torch.dtype) -> None:
    found = masked_normalize(POISONED, MASK.to(kind), 4.0, dim)
    assert found.tolist() == pytest.approx((torch.tensor(total) / 4).tolist())


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize(("dim", "mean"), [(None, 8 / 3), (0, [1.0, 3.5, math.nan]), (1, [1.5, 5.0]), (-1, [1.5, 5.0])])
def test_masked_mean_along_a_dimension(dim: int | None, mean: Any, kind: torch.dtype) -> None:
    assert masked_mean(POISONED, MASK.to(kind), dim).tolist() == pytest.approx(mean, nan_ok=True)


def test_of_nothing_the_mean_is_nan_and_the_normalized_sum_zero() -> None:
    nothing = torch.zeros_like(MASK)
    assert masked_mean(VALUES, nothing).isnan()
    assert masked_mean(VALUES, nothing, dim=1).isnan().all()
    assert masked_normalize(VALUES, nothing, 4.0) == 0
    assert masked_normalize(VALUES, nothing, 4.0, dim=0).tolist() == [0, 0, 0]


# Rewards.


def graded(response: str, truth: str) -> dict[str, float]:
    return {"reward": float(response), "format_reward": 1.0, "answer_reward": float(response == truth)}


def test_compute_group_normalized_rewards_by_bessel_std() -> None:
    responses, truths = ["1", "0", "3", "1", "2", "2"], ["1", "1", "0", "0", "0", "0"]
    arguments = {"advantage_eps": 0.5, "group_size": 2}
    plain, raw, metadata = compute_group_normalized_rewards(
        graded, responses, truths, normalize_by_std=False, **arguments
    )
    assert (plain.tolist(), raw.tolist()) == ([0.5, -0.5, 1.0, -1.0, 0.0, 0.0], [1.0, 0.0, 3.0, 1.0, 2.0, 2.0])
    scaled, _, _ = compute_group_normalized_rewards(graded, responses, truths, normalize_by_std=True, **arguments)
    std = 1 / math.sqrt(2), math.sqrt(2)
    wanted = [0.5 / (std[0] + 0.5), -0.5 / (std[0] + 0.5), 1 / (std[1] + 0.5), -1 / (std[1] + 0.5), 0.0, 0.0]
    assert scaled.tolist() == pytest.approx(wanted, abs=1e-6)
    assert metadata == pytest.approx({
        "reward_mean": 1.5, "reward_std": math.sqrt(5.5 / 5), "reward_min": 0.0, "reward_max": 3.0,
        "format_reward_mean": 1.0, "answer_reward_mean": 1 / 6,
    }, abs=1e-6)  # fmt: skip


def test_group_rewards_refuse_lists_of_mismatched_length() -> None:
    with pytest.raises(ValueError, match="3 responses, but 2 ground truths"):
        compute_group_normalized_rewards(graded, ["1"] * 3, ["1"] * 2, 1, 1e-6, False)
    with pytest.raises(ValueError, match="5 responses do not divide into groups of 2"):
        compute_group_normalized_rewards(graded, ["1"] * 5, ["1"] * 5, 2, 1e-6, False)


# Losses per token.

LOGP = [[-1.0, -0.5, -3.0], [-0.2, -2.0, -1.0]]
OLD = [[-1.5, -0.5, -2.0], [0.0, -3.0, 0.0]]
ADVANTAGE = [[2.0], [-1.0]]
REWARD = [[1.0], [0.5]]
RATIO = [[math.exp(n - o) for n, o in zip(*rows, strict=True)] for rows in zip(LOGP, OLD, strict=True)]
RESPONSE = [[1, 1, 0], [0, 1, 0]]


def clip(ratio: float, a: float) -> float:
    return -min(ratio * a, min(max(ratio, 0.9), 1.1) * a)


# Per token, in plain Python.
TOKEN_LOSS = {
    "no_baseline": [[-r[0] * x for x in row] for r, row in zip(REWARD, LOGP, strict=True)],
    "reinforce_with_baseline": [[-a[0] * x for x in row] for a, row in zip(ADVANTAGE, LOGP, strict=True)],
    "grpo_no_clip": [[-a[0] * x for x in row] for a, row in zip(ADVANTAGE, RATIO, strict=True)],
    "grpo_clip": [[clip(x, a[0]) for x in row] for a, row in zip(ADVANTAGE, RATIO, strict=True)],
}
NEEDS = {
    "no_baseline": ["raw_rewards"],
    "reinforce_with_baseline": ["advantages"],
    "grpo_no_clip": ["advantages", "old_log_probs"],
    "grpo_clip": ["advantages", "old_log_probs", "cliprange"],
}


def arguments(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    tensors = {"raw_rewards": REWARD, "advantages": ADVANTAGE, "old_log_probs": OLD}
    return {**{name: torch.tensor(value, dtype=dtype) for name, value in tensors.items()}, "cliprange": 0.1}


def policy(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(LOGP, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_compute_policy_gradient_loss_is_its_formula(loss_type: str, dtype: torch.dtype) -> None:
    given = arguments(dtype)
    loss, metadata = compute_policy_gradient_loss(
        policy(dtype), loss_type, **{name: given[name] for name in NEEDS[loss_type]}
    )
    atol = 1e-6 if dtype == torch.float32 else 1e-12
    assert_close(loss.double(), torch.tensor(TOKEN_LOSS[loss_type], dtype=torch.float64), rtol=0, atol=atol)
    assert isinstance(metadata, dict)
    everything, _ = compute_policy_gradient_loss(policy(dtype), loss_type, **given)  # what it needs not, it ignores
    assert_close(everything, loss, rtol=0, atol=0)


def test_compute_naive_policy_gradient_loss_has_its_own_name() -> None:
    naive = compute_naive_policy_gradient_loss(arguments()["advantages"], policy())
    assert_close(naive, torch.tensor(TOKEN_LOSS["reinforce_with_baseline"], dtype=torch.float64), rtol=0, atol=1e-12)


def test_compute_grpo_clip_loss_says_where_it_clipped() -> None:
    given = arguments()
    loss, metadata = compute_grpo_clip_loss(given["advantages"], policy(), given["old_log_probs"], 0.1)
    assert_close(loss, torch.tensor(TOKEN_LOSS["grpo_clip"], dtype=torch.float64), rtol=0, atol=1e-12)
    # A > 0: clipped where the ratio exceeds 1.1; A < 0: where it is below 0.9
    assert metadata["clip_fraction"].tolist() == [[1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("loss_type", "absent"), [(t, n) for t in NEEDS for k in range(1, 4) for n in itertools.combinations(NEEDS[t], k)]
)
def test_missing_arguments_are_refused_by_name(loss_type: str, absent: tuple[str, ...]) -> None:
    given = {name: value for name, value in arguments().items() if name not in absent}
    with pytest.raises(ValueError, match=f"'{loss_type}' needs {' and '.join(absent)}$"):
        compute_policy_gradient_loss(policy(), loss_type, **given)


def test_another_loss_type_is_answered_with_the_choices() -> None:
    with pytest.raises(
        UnknownName, match=f"'grpo_clp'. Did you mean 'grpo_clip'. Known: {', '.join(sorted(LOSS_TYPES))}"
    ):
        compute_policy_gradient_loss(policy(), "grpo_clp")


# Train steps.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_microbatch_train_step_averages_and_accumulates(loss_type: str, dtype: torch.dtype) -> None:
    logp, mask = policy(dtype), torch.tensor(RESPONSE)
    row = TOKEN_LOSS[loss_type]
    wanted = ((row[0][0] + row[0][1]) / 2 + row[1][1]) / 2 / 4
    loss, metadata = grpo_microbatch_train_step(logp, mask, 4, loss_type, **arguments(dtype))
    assert loss.item() == pytest.approx(wanted, abs=1e-6 if dtype == torch.float32 else 1e-12)
    assert logp.grad is not None
    first = logp.grad.clone()
    assert_close(first, expected_gradient(loss_type).to(dtype), rtol=0, atol=1e-6)
    grpo_microbatch_train_step(logp, mask, 4, loss_type, **arguments(dtype))
    assert_close(logp.grad, 2 * first, rtol=0, atol=0)
    assert all(not value.requires_grad and value.ndim == 0 for value in metadata.values())
    if loss_type == "grpo_clip":  # one of the three response tokens
        assert metadata["clip_fraction"].item() == pytest.approx(1 / 3)


def expected_gradient(loss_type: str) -> Tensor:
    """Of the three response tokens: weights 1/4, 1/4 and 1/2, over 4 accumulation steps."""
    slope = {
        "no_baseline": [-1.0, -1.0, -0.5],
        "reinforce_with_baseline": [-2.0, -2.0, 1.0],
        "grpo_no_clip": [-2 * RATIO[0][0], -2.0, RATIO[1][1]],
        "grpo_clip": [0.0, -2.0, RATIO[1][1]],  # the first is clipped
    }[loss_type]
    a, b, c = (s * w / 4 for s, w in zip(slope, (0.25, 0.25, 0.5), strict=True))
    return torch.tensor([[a, b, 0.0], [0.0, c, 0.0]], dtype=torch.float64)


def test_row_without_response_tokens_adds_zero_but_is_counted() -> None:
    logp, mask = policy(), torch.tensor([[1, 1, 0], [0, 0, 0]])
    loss, _ = grpo_microbatch_train_step(logp, mask, 1, "reinforce_with_baseline", **arguments())
    assert loss.item() == pytest.approx((2.0 + 1.0) / 2 / 2)
    assert logp.grad is not None
    assert not logp.grad[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sft_microbatch_train_step_sums_then_averages(dtype: torch.dtype) -> None:
    logp, mask = policy(dtype), torch.tensor(RESPONSE)
    loss, metadata = sft_microbatch_train_step(logp, mask, 4, normalize_constant=3.0)
    assert loss.item() == pytest.approx((1.5 + 2.0) / 3 / 2 / 4, abs=1e-6)
    assert_close(logp.grad, -mask.to(dtype) / 24, rtol=0, atol=1e-6)
    sft_microbatch_train_step(logp, mask, 4)  # the constant is 1 unless given
    assert_close(logp.grad, -mask.to(dtype) / 24 - mask.to(dtype) / 8, rtol=0, atol=1e-6)
    assert metadata["response_tokens"] == 3
    assert metadata["nll_per_token"].item() == pytest.approx(3.5 / 3, abs=1e-6)
    assert not metadata["nll_per_token"].requires_grad


def test_no_step_lets_a_masked_nan_into_the_gradient() -> None:
    logp = policy().detach().masked_fill(torch.tensor(RESPONSE) == 0, math.nan).requires_grad_()
    loss, _ = sft_microbatch_train_step(logp, torch.tensor(RESPONSE), 1)
    assert loss.isfinite()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e3])  # the exponential of the last one is infinite
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_grpo_step_lets_a_masked_value_into_loss_or_gradient(loss_type: str, poison: float) -> None:
    logp, mask = policy().detach(), torch.tensor(RESPONSE)
    steps = []
    for masked in (0.0, poison):
        given = logp.masked_fill(mask == 0, masked).requires_grad_()
        loss, _ = grpo_microbatch_train_step(given, mask, 1, loss_type, **arguments())
        steps.append((loss.detach(), given.grad))
    assert_close(steps[1], steps[0], rtol=0, atol=0)
    assert steps[0][1] is not None
    assert steps[0][1].any()


# The log of generations.


def test_logged_generations_have_handout_fields_and_averages() -> None:
    entropy = torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0], [4.0, 4.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    rows, averages = log_generations(["p", "q", "s"], ["1", "3", "2"], ["1", "1", "2"], graded, entropy, mask)
    assert rows[0] == {
        "prompt": "p", "response": "1", "ground_truth": "1", "reward": 1.0, "format_reward": 1.0,
        "answer_reward": 1.0, "token_entropy": 2.0, "length": 2,
    }  # fmt: skip
    assert [row["token_entropy"] for row in rows] == [2.0, 2.0, 3.0]
    assert averages == pytest.approx({
        "length": 2.0, "length_correct": 2.5, "length_incorrect": 1.0, "accuracy": 2 / 3, "reward": 2.0,
        "format_reward": 1.0, "answer_reward": 2 / 3,
    })  # fmt: skip


def test_lengths_default_to_word_counts_and_empty_average_is_nan() -> None:
    rows, averages = log_generations(["p"], ["4"], ["1"], graded, response_lengths=[7])
    assert (rows[0]["length"], rows[0]["token_entropy"]) == (7, None)
    assert averages["length_incorrect"] == 7
    assert math.isnan(averages["length_correct"])
    rows, _ = log_generations(["p"], ["two words"], ["1"], lambda r, t: graded("1", t))
    assert rows[0]["length"] == 2


def test_generations_are_made_when_no_responses_are_given() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model()
    prompts = ["1 + 1 =", "2 + 2 + 2 ="]
    rows, averages = log_generations(
        prompts, None, ["2", "6"], lambda *_: graded("1", "2"), model=model, tokenizer=tokenizer,
        sampling={"max_new_tokens": 6, "min_new_tokens": 3, "do_sample": False},
    )  # fmt: skip
    alone = tokenizer(prompts[1], return_tensors="pt")
    ids = model.generate(**alone, max_new_tokens=6, min_new_tokens=3, do_sample=False)
    assert rows[1]["response"] == tokenizer.decode(ids[0, alone["input_ids"].shape[1] :], skip_special_tokens=True)
    batch = tokenize_prompt_and_output(prompts[1:], [rows[1]["response"]], tokenizer)
    scored = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    entropy = masked_mean(scored["token_entropy"], batch["response_mask"])
    assert rows[1]["token_entropy"] == pytest.approx(entropy.item(), rel=1e-5)
    assert averages["length"] == sum(row["length"] for row in rows) / 2 > 0
