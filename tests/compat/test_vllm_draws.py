"""A token that is drawn by one random number has the probability that the model gives it."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from trl_ext.compat import vllm_draws
from trl_ext.compat.vllm_draws import draw_by_cumulative_sums, inverse_of_cumulative

ROWS, WORDS = 64, 3000  # some blocks, of which the last one is not full


def probabilities(*, zeros: float) -> torch.Tensor:
    """(ROWS, WORDS), of which a share is 0, at both ends too."""
    drawn = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, WORDS, generator=drawn)
    out = torch.rand(ROWS, WORDS, generator=drawn) < zeros
    out[:, :5] = out[:, -5:] = bool(zeros)
    return logits.masked_fill(out, -torch.inf).softmax(-1)


@pytest.mark.parametrize("zeros", [0.0, 0.99])
def test_it_is_the_inverse_of_the_cumulative_sum(zeros: float) -> None:
    weights = probabilities(zeros=zeros)
    cumulative = weights.double().cumsum(-1)
    for uniform in torch.rand(20, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        found = inverse_of_cumulative(weights, uniform)
        limit = uniform * cumulative[:, -1]
        above = cumulative.gather(1, found[:, None])[:, 0]
        before = above - weights.double().gather(1, found[:, None])[:, 0]
        # a block's sum and the sum over all words before differ by rounding
        assert torch.all((before - 1e-12 <= limit) & (limit <= above + 1e-12))


def test_the_ends_of_the_interval_draw_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = probabilities(zeros=0.99)
    possible = [row.nonzero()[:, 0] for row in weights]
    least, most = torch.zeros(ROWS, dtype=torch.float64), torch.full((ROWS,), 1 - 2**-53, dtype=torch.float64)
    assert inverse_of_cumulative(weights, least).tolist() == [int(words[0]) for words in possible]
    assert inverse_of_cumulative(weights, most).tolist() == [int(words[-1]) for words in possible]
    # of this range the two sums of a block differ by rounding, and the limit may be the sum itself
    one_block = (12 * torch.randn(2000, 1000, generator=torch.Generator().manual_seed(3))).exp()
    assert inverse_of_cumulative(one_block, most[:1].expand(2000)).max() < 1000
    monkeypatch.setattr(vllm_draws, "_BLOCK", 8)
    assert inverse_of_cumulative(weights, most).tolist() == [int(words[-1]) for words in possible]


@pytest.mark.slow
def test_frequencies_are_the_probabilities() -> None:
    weights = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.0625, 0.0625])
    drawn = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    counts = inverse_of_cumulative(weights.expand(len(drawn), -1), drawn).bincount(minlength=6)
    assert counts[2] == 0
    possible = weights > 0
    assert chisquare(counts[possible], len(drawn) * weights[possible]).pvalue > 1e-3  # of a fixed seed


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_a_request_draws_the_same_next_to_any_others() -> None:
    draw_by_cumulative_sums()
    draw_by_cumulative_sums()  # a second engine of the process
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler = TopKTopPSampler("processed_logprobs")
    logits = probabilities(zeros=0.0).log()

    def drawn(rows: slice, **limits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        seeds = range(ROWS)[rows]
        made = {i: torch.Generator().manual_seed(seed) for i, seed in enumerate(seeds)}
        limits = {name: limits.get(name) for name in "kp"}
        words, shown = sampler.forward_cpu(logits[rows].clone(), made, **limits)
        return words.tolist(), shown

    words, shown = drawn(slice(None))
    torch.testing.assert_close(shown.exp(), probabilities(zeros=0.0))
    assert len(set(words)) > ROWS / 2
    assert drawn(slice(7, 9))[0] == words[7:9]
    k = torch.full((ROWS,), 1, dtype=torch.int32)
    assert drawn(slice(None), k=k)[0] == logits.argmax(-1).tolist()
    assert len(sampler.forward_cpu(logits.clone(), {}, None, None)[0]) == ROWS  # vLLM's own, without seeds
