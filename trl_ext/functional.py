"""The course handout's functions with their exact names and keyword arguments, thin wrappers of the axes.

Letters: B rows, S prompt and output tokens minus one, V vocabulary. A mask is 1 for tokens that count and aligned with
`labels`: position t holds the log-probability of labels[t].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import sequence_mean
from trl_ext.algorithms.masking import masked_mean as masked_mean
from trl_ext.algorithms.masking import masked_normalize as masked_normalize
from trl_ext.algorithms.masking import masked_sum
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import LOSS_TYPES, PRESETS
from trl_ext.algorithms.types import LossInputs, StepTotals, TokenLoss
from trl_ext.generation.tokens import completion_texts, prompt_ids
from trl_ext.registry import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RewardFn = Callable[[str, Any], dict[str, float]]


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Tokenize prompts and outputs separately, concatenate, pad on the right, and shift by one.

    Returns:
        `input_ids`, `labels`: (B, S) long; `response_mask`: (B, S) bool, True where the label is an output token.

    Raises:
        ValueError: the lists are empty or differ in length.
    """
    if len(prompt_strs) != len(output_strs) or not prompt_strs:
        raise ValueError(f"got {len(prompt_strs)} prompts and {len(output_strs)} outputs; need as many, and some")
    prompts = prompt_ids(tokenizer, prompt_strs)
    outputs = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in output_strs]
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    pad = _pad_id(tokenizer)
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    is_output = torch.zeros((len(prompts), width), dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        end = len(prompt) + len(output)
        ids[row, :end] = torch.tensor([*prompt, *output], dtype=torch.long)
        is_output[row, len(prompt) : end] = True
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": is_output[:, 1:]}


def compute_entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution in nats: (B, S, V) logits -> (B, S)."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp.masked_fill(logp.isneginf(), 0.0)).sum(dim=-1)  # p log p is 0 at p = 0


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """`log_probs` (B, S) of `labels` (B, S) under a causal model, and `token_entropy` (B, S) if asked for."""
    logits = model(input_ids).logits  # (B, S, V)
    logp = torch.log_softmax(logits, dim=-1)
    result = {"log_probs": logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)}
    if return_token_entropy:
        result["token_entropy"] = compute_entropy(logits)
    return result


def sft_microbatch_train_step(
    policy_log_probs: Tensor, response_mask: Tensor, gradient_accumulation_steps: int, normalize_constant: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the response tokens, backward included.

    Sum over unmasked tokens / normalize_constant, mean over the B rows, / gradient_accumulation_steps.

    Returns:
        The scaled loss (scalar, not detached) and a metadata dict.
    """
    per_row = masked_normalize(-policy_log_probs, response_mask, normalize_constant, dim=-1)  # (B,)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    tokens = response_mask.sum()
    return loss, {
        "response_tokens": tokens,
        "nll_per_token": -masked_sum(policy_log_probs, response_mask).detach() / tokens,
    }


def compute_group_normalized_rewards(
    reward_fn: RewardFn,
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[Any],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Grade responses and normalize the rewards in groups of `group_size` consecutive ones.

    (r - mean) / (std + advantage_eps) with Bessel's correction, or r - mean.

    Returns:
        advantages (N,), raw rewards (N,), and the mean, std, min and max of the rewards with each component's mean.

    Raises:
        ValueError: the lists differ in length, or N is not a multiple of `group_size`.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        raise ValueError(f"{len(rollout_responses)} responses, but {len(repeated_ground_truths)} ground truths")
    if len(rollout_responses) % group_size:
        raise ValueError(f"{len(rollout_responses)} responses do not divide into groups of {group_size}")
    graded = [reward_fn(r, t) for r, t in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw = torch.tensor([float(g["reward"]) for g in graded], dtype=torch.float32)
    name, options = ("group_std", {"eps": advantage_eps}) if normalize_by_std else ("group_mean", {})
    advantages = ADVANTAGES.build(name, **options)(raw.view(-1, group_size)).flatten()
    metadata = {f"reward_{name}": getattr(raw, name)() for name in ("mean", "std", "min", "max")}
    for key in ("format_reward", "answer_reward"):
        if all(key in g for g in graded):
            metadata[f"{key}_mean"] = torch.tensor([float(g[key]) for g in graded]).mean()
    return advantages, raw, {key: value.item() for key, value in metadata.items()}


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """-A log pi per token: (B, 1) advantages and (B, S) log-probabilities -> (B, S)."""
    return _token_loss("reinforce", raw_rewards_or_advantages, policy_log_probs, None, {}).loss


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - cliprange, 1 + cliprange) A) per token, (B, S), and which tokens were clipped."""
    options = {"eps_low": cliprange, "eps_high": cliprange}
    result = _token_loss("ppo_clip", advantages, policy_log_probs, old_log_probs, options)
    return result.loss, {"clip_fraction": result.metrics["clip_ratio/region_mean"]}


def _token_loss(
    name: str, advantages: Tensor, logp: Tensor, old_logp: Tensor | None, options: dict[str, Any]
) -> TokenLoss:
    old = logp if old_logp is None else old_logp
    mask = torch.ones_like(logp, dtype=torch.bool)
    return POLICY_LOSSES.build(name, **options)(LossInputs(logp, old.detach(), advantages, mask))


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The per-token loss (B, S) called `loss_type`, one of the handout's four names, and its metadata.

    Raises:
        UnknownName: another `loss_type`.
        ValueError: an argument that this loss needs is missing; the message names it.
    """
    if loss_type not in LOSS_TYPES:
        raise unknown("loss_type", loss_type, LOSS_TYPES)
    needed: dict[str, Any] = {"raw_rewards": raw_rewards} if loss_type == "no_baseline" else {"advantages": advantages}
    if loss_type in ("grpo_clip", "grpo_no_clip"):
        needed["old_log_probs"] = old_log_probs
    if loss_type == "grpo_clip":
        needed["cliprange"] = cliprange
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"loss_type {loss_type!r} needs {' and '.join(missing)}")
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)  # type: ignore[arg-type]
    weight = raw_rewards if loss_type == "no_baseline" else advantages
    result = _token_loss(PRESETS[loss_type].policy_loss, weight, policy_log_probs, old_log_probs, {})  # type: ignore[arg-type]
    return result.loss, dict(result.metrics)


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of a micro-batch, backward included.

    Mean over the unmasked tokens of each row, mean over the B rows, / gradient_accumulation_steps.

    Returns:
        The scaled loss (scalar) and a metadata dict with means over unmasked tokens.

    Raises:
        UnknownName, ValueError: as `compute_policy_gradient_loss`.
    """
    mask = response_mask.bool()
    trained = torch.where(mask, policy_log_probs, policy_log_probs.detach())  # a masked token has no gradient, not NaN
    per_token, metadata = compute_policy_gradient_loss(
        trained, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    rows = policy_log_probs.shape[0] * gradient_accumulation_steps
    totals = StepTotals(sequences=rows, tokens=float("nan"), max_tokens=float("nan"))
    loss = sequence_mean(per_token, mask, totals)
    loss.backward()
    return loss, {name: masked_mean(value, response_mask).detach() for name, value in metadata.items()}


def log_generations(
    prompts: Sequence[str],
    responses: Sequence[str] | None,
    ground_truths: Sequence[Any],
    reward_fn: RewardFn,
    token_entropy: Tensor | None = None,
    response_mask: Tensor | None = None,
    response_lengths: Sequence[int] | None = None,
    *,
    model: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sampling: Any = None,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Grade N generations for a log; without responses, generate them first.

    Args:
        responses: None to have `model` generate them: a `vllm.LLM`, with `vllm.SamplingParams` in `sampling`, or a
            causal model of transformers, with its `tokenizer` and arguments of `generate` in `sampling`, such as
            `{"max_new_tokens": 1024, "do_sample": True}`; the latter gives each response's entropy as well. Neither
            takes penalties or cuts from the model's own generation config.
        reward_fn: (response, ground truth) -> dict with reward, format_reward and answer_reward.
        token_entropy, response_mask: (N, S) each, for the mean entropy of a response's tokens.
        response_lengths: tokens per response, by default those of `response_mask`, or else its words.

    Returns:
        One row per generation (prompt, response, ground_truth, rewards, token_entropy, length), and means: the length
        of all, of correct and of incorrect responses, the accuracy, and the three rewards.
    """
    if responses is None and tokenizer is None:
        from trl_ext.generation.samplers import vllm_sample

        outputs = vllm_sample(model, prompts, sampling or model.get_default_sampling_params())
        responses, response_lengths = [o.text for o in outputs], [o.tokens for o in outputs]
    elif responses is None:
        responses, token_entropy, response_mask = _generate(prompts, model, tokenizer, sampling or {})
    if response_mask is not None:
        response_lengths = [int(n) for n in response_mask.sum(dim=-1)]
    lengths = [len(r.split()) for r in responses] if response_lengths is None else response_lengths
    entropy: list[float | None] = [None] * len(responses)
    if token_entropy is not None and response_mask is not None:
        entropy = masked_mean(token_entropy, response_mask, dim=-1).tolist()
    rows = [
        {"prompt": p, "response": r, "ground_truth": t, **reward_fn(r, t), "token_entropy": e, "length": n}
        for p, r, t, e, n in zip(prompts, responses, ground_truths, entropy, lengths, strict=True)
    ]
    return rows, _averages(rows)


def _averages(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    correct = [row for row in rows if row["answer_reward"] > 0]
    incorrect = [row for row in rows if not row["answer_reward"] > 0]
    rewards = ("reward", "format_reward", "answer_reward")
    return {
        "length": _mean([row["length"] for row in rows]),
        "length_correct": _mean([row["length"] for row in correct]),
        "length_incorrect": _mean([row["length"] for row in incorrect]),
        "accuracy": _mean([row["answer_reward"] > 0 for row in rows]),
        **{name: _mean([row[name] for row in rows]) for name in rewards},
    }


def _generate(
    prompts: Sequence[str], model: Any, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> tuple[list[str], Tensor, Tensor]:
    """N responses, their tokens' entropy and their mask, (N, S) each."""
    from trl_ext.generation.policy import overridden
    from trl_ext.generation.sampling import sampling_config, without_adapter

    fields = {name: value for name, value in arguments.items() if hasattr(model.generation_config, name)}
    others = {name: value for name, value in arguments.items() if name not in fields}
    config = sampling_config(model.generation_config, fields)
    rows = [torch.tensor(ids) for ids in prompt_ids(tokenizer, prompts)]
    given, mask = (
        pad_sequence(padded, batch_first=True, padding_value=value, padding_side="left").to(model.device)
        for padded, value in ((rows, _pad_id(tokenizer)), ([torch.ones_like(row) for row in rows], 0))
    )
    with torch.no_grad():
        with overridden(
            without_adapter(model), {"generation_config": config}
        ):  # of which `generate` fills what is None
            more = {"tokenizer": tokenizer, "generation_config": config, **others}
            ids = model.generate(given, attention_mask=mask, **more)
        ends = _as_list(others.get("generation_config", config).eos_token_id)
        responses = completion_texts(tokenizer, ids[:, given.shape[1] :].tolist(), ends)
        batch = tokenize_prompt_and_output(prompts, responses, tokenizer)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        scored = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    return responses, scored["token_entropy"], batch["response_mask"]


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows, which a mask covers: pad, or EOS, or any."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def _as_list(eos: int | Sequence[int] | None) -> list[int]:
    """The end tokens of a generation config, which may be one, several or none."""
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
