"""Per-token estimators of KL(pi || pi_ref) from tokens sampled by pi, after Schulman, "Approximating KL Divergence"
(2020, joschu.net/blog/kl-approx.html). With log r = ref_logp - logp, all shapes (B, T).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trl_ext.registry import Registry


def _fault(estimator: Callable[[Tensor, Tensor], Tensor], rows: int) -> str | None:
    estimate = estimator(torch.full((rows, 3), -1.0), torch.full((rows, 3), -2.0))
    fits = isinstance(estimate, Tensor) and estimate.shape == (rows, 3)
    return None if fits else "must return a tensor with one value per token, (B, T)"


BY_GRADIENT = frozenset({"k2"})  # estimators whose gradient, not whose value, estimates the KL's gradient
KL_ESTIMATORS = Registry("KL estimator", _fault)


@KL_ESTIMATORS.register
def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """-log r: unbiased, high variance, can be negative. Its gradient as a loss has expectation zero on-policy."""
    return logp - ref_logp


@KL_ESTIMATORS.register
def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, low variance; its gradient as a loss is unbiased for the gradient of the KL.

    Tang and Munos, arXiv:2506.09477, section 3.
    """
    return (ref_logp - logp).square() / 2


@KL_ESTIMATORS.register
def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The ratio's r - 1 - log r: unbiased and never negative. GRPO (DeepSeekMath, arXiv:2402.03300, eq. 4), and TRL."""
    log_ratio = ref_logp - logp
    return torch.expm1(log_ratio) - log_ratio
