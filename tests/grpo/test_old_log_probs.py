"""What the ratio is to: the gradient's expectation over samples of an older policy, and what a step computes.

The expectation is exact: every pair of responses of two tokens (a group), weighted by its probability under the policy
that sampled, goes through the loss of a real configuration.

Letters: V tokens, T tokens of a response, N responses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.testing import assert_close
from trl import GRPOTrainer

from tests.grpo.test_trainer import ON_POLICY, Engine, logs, record
from tests.support.tiny import fraction_of_ones, scripted, tiny_model, weight_difference
from tests.support.versions import needs_vllm
from trl_ext import ExtGRPOConfig
from trl_ext.grpo.forward_pass import ForwardPass
from trl_ext.grpo.step_loss import Call, StepLoss
from trl_ext.step import MicroBatch, Rows

VLLM: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"}
REWARD = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.double)  # of the responses 00, 01, 10, 11
RESPONSES = torch.tensor(list(itertools.product(range(2), repeat=2)))  # (N, T)
NOW = torch.tensor([[0.3, -0.4], [0.9, 0.1], [-0.6, 0.5]], dtype=torch.double)  # logits: first, after 0, after 1
BEFORE = torch.tensor([[-0.2, 0.3], [0.1, 0.8], [0.7, -0.3]], dtype=torch.double)


def log_probs(logits: Tensor, responses: Tensor = RESPONSES) -> Tensor:
    """(N, T) of the responses' tokens."""
    of_token = logits.log_softmax(dim=1)
    first, second = responses.unbind(dim=1)
    return torch.stack([of_token[0, first], of_token[1 + first, second]], dim=1)


def gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
    """(3, V) at the policy of now."""
    logits = NOW.clone().requires_grad_()
    return torch.autograd.grad(value(logits), logits)[0]


def expected_gradient(sampler: Tensor, tokens: int = 2, **settings: Any) -> Tensor:
    """The trainer's gradient, its expectation over groups of two responses of `sampler`; `tokens` are trained on."""
    config = ExtGRPOConfig(
        output_dir="unused", use_cpu=True, report_to="none", max_completion_length=2, num_generations=2,
        generation_batch_size=2, per_device_train_batch_size=2, **VLLM, **settings,
    )  # fmt: skip
    loss: Any = StepLoss(config, Accelerator(cpu=True), lambda: True, 0.0, None)  # type: ignore[arg-type]
    advantage = config.advantage_fn()
    mask = (torch.arange(2) < tokens).expand(2, 2)

    def value(logits: Tensor) -> Tensor:
        total = logits.new_zeros(())
        for pair in itertools.product(range(len(RESPONSES)), repeat=2):
            group = torch.tensor(pair)
            ids, sampled = RESPONSES[group], log_probs(sampler, RESPONSES[group])
            rows = Rows(
                ids[:, :1], mask[:, :1].long(), ids, mask.long(), mask,
                advantage(REWARD[group][None]).view(2, 1), sampled_logp=sampled,
            )  # fmt: skip
            logp = log_probs(logits, ids)
            found, _ = loss(MicroBatch(rows), logp, -logp.detach(), Call(0, 0, ()), None, None)
            total = total + sampled.sum().exp() * found
        return total

    return -gradient(value)


def policy_gradient(logits: Tensor) -> Tensor:
    return (log_probs(logits).sum(dim=1).exp() * REWARD).sum()


def surrogate(weight: Callable[[Tensor], Tensor]) -> Tensor:
    """Of REINFORCE on samples of the policy before, each token weighted by a function of the (N, T) log ratios."""
    sampled = log_probs(BEFORE)
    known = weight(log_probs(NOW) - sampled) * REWARD[:, None] * sampled.sum(dim=1, keepdim=True).exp()
    return gradient(lambda logits: (known * log_probs(logits)).sum())


UNTRUNCATED: dict[str, Any] = {"sampler_weight_options": {"clip_max": None}, "sampler_rejection": "keep_all"}
SEQUENCE: dict[str, Any] = {"sampler_weight": "sequence", **UNTRUNCATED}
TOKEN: dict[str, Any] = {"sampler_weight": "token", **UNTRUNCATED}
UNWEIGHTED: dict[str, Any] = {"sampler_weight": "unweighted", "sampler_rejection": "keep_all"}
TO_SAMPLER: dict[str, Any] = {"policy_loss": "importance_ratio", "old_log_probs": "sampler"}
CORRECTIONS = {"sequence": SEQUENCE, "token": TOKEN, "none": UNWEIGHTED, "ratio to the sampler": TO_SAMPLER}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"preset": "rloo"}, 1.0),
        ({"preset": "no_baseline"}, 0.5),  # a mean over two tokens
        ({"preset": "rloo", "policy_loss": "importance_ratio"}, 1.0),  # whose ratio is 1: old is before the step
        ({"preset": "rloo", "policy_loss": "ppo_clip"}, 1.0),
        ({"preset": "rloo", "advantage": "group_mean"}, 0.5),  # of two rewards, one the response's own
    ],
    ids=["rloo", "no_baseline", "importance_ratio", "ppo_clip", "group_mean"],
)
def test_with_sequence_weights_stale_samples_are_unbiased(settings: dict[str, Any], scale: float) -> None:
    wanted = scale * gradient(policy_gradient)
    assert_close(expected_gradient(BEFORE, **settings, **SEQUENCE), wanted, rtol=0, atol=1e-12)
    assert_close(expected_gradient(NOW, **settings, **UNWEIGHTED), wanted, rtol=0, atol=1e-12)
    assert (expected_gradient(BEFORE, **settings, **UNWEIGHTED) - wanted).abs().max() > 0.01


def test_a_divided_advantage_keeps_the_samplers_group() -> None:
    found = expected_gradient(BEFORE, preset="reinforce_with_baseline", advantage_options={"eps": 1e-6}, **SEQUENCE)
    of_sampler, probs = (log_probs(logits).sum(dim=1).exp() for logits in (BEFORE, NOW))
    distance = REWARD[:, None] - REWARD[None]
    advantage = distance / 2 / (distance.abs() / 2**0.5 + 1e-6)  # from the mean of two rewards, over their std
    known = probs * (advantage * of_sampler[None]).sum(dim=1)  # itself of now, the others as sampled
    wanted = gradient(lambda logits: (known * log_probs(logits).mean(dim=1)).sum())
    assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        (TOKEN, torch.exp),
        (TO_SAMPLER, torch.exp),  # the same expectation: the ratio is the weight
        ({**TOKEN, "sampler_weight_options": {"clip_max": 1.1}}, lambda r: r.exp().clamp(max=1.1)),
        (
            {**SEQUENCE, "sampler_weight_options": {"clip_max": 1.1}},
            lambda r: r.sum(dim=1, keepdim=True).exp().clamp(max=1.1),
        ),
        ({**SEQUENCE, "sampler_rejection": "sequence_ratio", "sampler_rejection_options": {"high": 1.1}},
         lambda r: (s := r.sum(dim=1, keepdim=True).exp()) * (s <= 1.1)),
    ],
    ids=["token", "ratio to the sampler", "truncated token", "truncated sequence", "rejected sequence"],
)  # fmt: skip
def test_bias_of_other_weights_is_the_one_written_out(
    settings: dict[str, Any], weight: Callable[[Tensor], Tensor]
) -> None:
    raw = {"preset": "rloo", "advantage": "raw"}
    found, truth = expected_gradient(BEFORE, **raw, **settings), gradient(policy_gradient)
    # sum over responses of mu R sum over tokens of (w - product of ratios) grad log pi
    bias = surrogate(lambda r: weight(r) - r.sum(dim=1, keepdim=True).exp())
    assert_close(found, truth + bias, rtol=0, atol=1e-12)
    assert bias.abs().max() > 0.01
    assert_close(expected_gradient(NOW, **raw, **settings), truth, rtol=0, atol=1e-12)  # none without staleness


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_response_of_one_token_is_unbiased_by_each_ratio(correction: str) -> None:
    found = expected_gradient(BEFORE, tokens=1, preset="rloo", advantage="raw", **CORRECTIONS[correction])
    # The reward is then of the first token and of what the sampler wrote after it.
    of_first = (log_probs(BEFORE)[:, 1].exp() * REWARD).view(2, 2).sum(dim=1)
    wanted = gradient(lambda logits: (logits[0].softmax(dim=0) * of_first).sum())
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12) == (correction != "none")


def test_clipping_is_to_the_sampler_where_asked() -> None:
    clipped = {"preset": "rloo", "policy_loss": "ppo_clip", "policy_loss_options": {"eps_low": 0.05, "eps_high": 0.05}}
    to_sampler = expected_gradient(BEFORE, **clipped, old_log_probs="sampler")
    unclipped = expected_gradient(BEFORE, preset="rloo", **TO_SAMPLER)
    assert (to_sampler - unclipped).abs().max() > 0.01
    assert_close(expected_gradient(BEFORE, **clipped, **TOKEN), unclipped, rtol=0, atol=1e-12)  # its ratio is 1


# What a step computes, with an engine whose log-probabilities are a bit off.


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    monkeypatch.setattr("trl_ext.generation.vllm.ColocatedEngine", Engine)


SAVED: dict[str, Any] = {
    "skip_zero_advantage_rows": True, "dynamic_micro_batches": True, "share_prompt_prefix": True,
}  # fmt: skip
TWO_EPOCHS: dict[str, Any] = {"num_iterations": 2, "max_steps": 4}


def assert_to_sampler(trainer: Any) -> None:
    for _, x, others in trainer.seen:
        sampled, unknown = others["sampled_logp"], others["sampled_logp"].isnan()
        assert torch.equal(x.old_logp[~unknown], sampled[~unknown])
        assert torch.equal(x.old_logp[unknown], x.logp.detach()[unknown])
        assert others["sampler_weight"] is None
        if others["step"] is not None:
            assert torch.equal(others["step"].of_micro_batch(others["step"].old_logp)[x.mask], x.old_logp[x.mask])


@pytest.mark.moderate
@needs_vllm
@pytest.mark.parametrize("steps", [ON_POLICY, TWO_EPOCHS], ids=["on-policy", "two epochs"])
def test_the_ratio_is_to_the_sampler_with_every_saving(steps: Any, engine: None, tmp_path: Path) -> None:
    settings = {**VLLM, **steps, "old_log_probs": "sampler"}
    plain = record(tmp_path / "a", fraction_of_ones, **settings, reuse_log_probs=False)
    assert_to_sampler(plain)
    assert any(others["sampled_logp"].isnan().any() for _, _, others in plain.seen)
    assert weight_difference(plain.model, tiny_model()) > 1e-3
    saved = record(tmp_path / "b", fraction_of_ones, **settings, **SAVED)
    assert_to_sampler(saved)
    assert weight_difference(plain.model, saved.model) < 1e-6  # float32 rounding
    first = logs(saved)[0]
    assert first["clip_ratio/region_mean"] > 0  # on-policy too
    assert first["sampling/sampling_logp_difference/mean"] > 0.1
    assert "sampling/weight_mean" not in first
    policy = record(tmp_path / "c", fraction_of_ones, **{**settings, "old_log_probs": "policy"}, **SAVED)
    assert weight_difference(policy.model, saved.model) > 1e-3


@pytest.mark.moderate
@needs_vllm
@pytest.mark.parametrize("settings", [{}, SAVED, {"reuse_log_probs": False}], ids=["plain", "saved", "not reused"])
def test_no_pass_is_made_for_log_probs_of_the_sampler(
    settings: dict[str, Any], engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Counter[bool]()  # by whether there is a graph

    def count(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            passes[torch.is_grad_enabled()] += 1
            return method(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(GRPOTrainer, "_get_per_token_logps_and_entropies")
    count(ForwardPass, "__call__")
    record(tmp_path / "a", fraction_of_ones, **VLLM, **TWO_EPOCHS, **settings, old_log_probs="sampler")
    assert passes[True] > 0
    assert passes[False] == 0
    record(tmp_path / "b", fraction_of_ones, **VLLM, **TWO_EPOCHS, **settings)
    assert passes[False] > 0


@pytest.mark.moderate
@needs_vllm
def test_a_loss_of_a_whole_step_sees_the_samplers_ratio(engine: None, tmp_path: Path) -> None:
    axes = {"policy_loss": "bapo", "old_log_probs": "sampler", "max_steps": 1}
    trainer = record(tmp_path, fraction_of_ones, **VLLM, **axes, **SAVED)
    assert all(others["step"] is not None for _, _, others in trainer.seen)
    assert_to_sampler(trainer)


@pytest.mark.moderate
@needs_vllm
def test_a_rollout_without_its_log_probs_is_refused(engine: None, tmp_path: Path) -> None:
    settings = {**VLLM, "old_log_probs": "sampler", "max_steps": 1, "rollout_func": scripted(lambda row, step: [4, 1])}
    with pytest.raises(ValueError, match="return logprobs from rollout_func, or set old_log_probs: policy"):
        record(tmp_path, fraction_of_ones, **settings)
