"""What a teacher says of the student's own tokens -> an advantage per token, or a divergence per token.

Members of the first kind get log-probabilities of the sampled tokens, (B, T) each, and return (B, T) advantages. Those
of the second (`of_distribution`) get log-probabilities of E events at every token, (B, T, E) each: the teacher's k most
probable tokens, and all others together (E = k + 1), or every token of the vocabulary (E = k). They return (B, T)
divergences, whose gradient is the student's. Events that are put together only lower a divergence, so with fewer than
all tokens it is a lower bound.

Both leave out how the tokens a student samples next depend on those before (but for `reverse_kl` with a discount).

Letters: B rows of a micro-batch, T completion tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trl_ext.registry import Registry


@dataclass(frozen=True)
class Scores:
    """What one teacher says of a micro-batch's tokens, with k of them or none."""

    logp: Tensor  # (B, T)
    agrees: Tensor  # (B, T), 1 where the token is the most probable one
    ids: Tensor | None = None  # (B, T, k), the most probable tokens
    events: Tensor | None = None  # (B, T, E), their log-probabilities and those of all others together


def _fault(member: Callable[..., Tensor], rows: int) -> str | None:
    if is_divergence(member):
        value = member(torch.full((rows, 3, 2), -math.log(2)), torch.tensor([0.25, 0.75]).log().expand(rows, 3, 2))
    else:
        of_tokens = torch.full((rows, 3), -1.0), torch.full((rows, 3), -2.0)
        value = member(*of_tokens, torch.ones(rows, 3, dtype=torch.bool))
    fits = isinstance(value, Tensor) and value.shape == (rows, 3)
    return None if fits else "must return a tensor with one value per token, (B, T)"


DISTILLATIONS = Registry("distillation", _fault, properties=["of_distribution", "of_response"])


@DISTILLATIONS.register
def reverse_kl(
    teacher_logp: Tensor, logp: Tensor, mask: Tensor, *, discount: float = 0.0, clip: float | None = None
) -> Tensor:
    """A_t = sum over s >= t of discount^(s - t) d_s, d_t = log pi_T - log pi_S of the sampled token.

    Without a discount its expected update is the gradient of -KL(pi_S || pi_T) of each next token by itself (Lu et al.,
    "On-Policy Distillation", Thinking Machines Lab, 2025); with discount 1, of whole responses (MiniLLM,
    arXiv:2306.08543, eq. 2).

    Args:
        clip: the most that |d_t| counts.
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"reverse_kl: discount must be between 0 and 1, got {discount:g}")
    difference = _difference(teacher_logp, logp, mask, clip)
    if not discount:
        return difference
    left = torch.zeros_like(difference[:, 0])
    advantages = torch.empty_like(difference)
    for t in range(difference.shape[1] - 1, -1, -1):
        left = difference[:, t] + discount * left
        advantages[:, t] = left
    return advantages


@DISTILLATIONS.register(of_response=True)
def reverse_kl_mean(teacher_logp: Tensor, logp: Tensor, mask: Tensor, *, clip: float | None = None) -> Tensor:
    """A_t = mean over the response of d_s, the same for all of its tokens: `reverse_kl` as a reward of the response.

    Args:
        clip: the most that |d_s| counts.
    """
    difference = _difference(teacher_logp, logp, mask, clip)
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.expand_as(difference)


def _difference(teacher_logp: Tensor, logp: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """(B, T) log pi_T - log pi_S without a gradient, 0 where `mask` is False."""
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be positive, got {clip:g}")
    difference = (teacher_logp - logp.detach()).masked_fill(~mask, 0.0)
    return difference if clip is None else difference.clamp(-clip, clip)


@DISTILLATIONS.register(of_distribution=True)
def full_reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(pi_S || pi_T) of the next token. GKD (arXiv:2306.13649, section 2), there with beta = 1."""
    return _kl(student, teacher)


@DISTILLATIONS.register(of_distribution=True)
def full_forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(pi_T || pi_S) of the next token (Hinton et al., arXiv:1503.02531), on the student's samples."""
    return _kl(teacher, student)


@DISTILLATIONS.register(of_distribution=True)
def jensen_shannon(teacher: Tensor, student: Tensor, *, beta: float = 0.5) -> Tensor:
    """Beta KL(pi_T || m) + (1 - beta) KL(pi_S || m), m = beta pi_T + (1 - beta) pi_S. GKD (arXiv:2306.13649, eq. 1)."""
    if not 0 < beta < 1:
        raise ValueError(f"jensen_shannon: beta must be above 0 and below 1, got {beta:g}")
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(logp: Tensor, other: Tensor) -> Tensor:
    """Sum over events of p (log p - log q): (B, T, E), (B, T, E) -> (B, T)."""
    possible = logp > -torch.inf
    logp, other = logp.masked_fill(~possible, 0.0), other.masked_fill(~possible, 0.0)
    return (torch.where(possible, logp.exp(), 0.0) * (logp - other)).sum(dim=-1)


def event_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """(N, E) log-probabilities of k tokens and of all others together, which are left out if there are none.

    Args:
        logits: (N, V)
        ids: (N, k), different ones in each row.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, ids) - total
    if ids.shape[-1] == logits.shape[-1]:
        return chosen
    others = logits.scatter(-1, ids, -torch.inf).logsumexp(dim=-1, keepdim=True) - total
    return torch.cat([chosen, others], dim=-1)


def is_divergence(member: Callable[..., Tensor]) -> bool:
    """Whether a member of `DISTILLATIONS` is of probabilities of several tokens at each place."""
    return bool(getattr(member, "of_distribution", False))


@dataclass(frozen=True)
class Distillation:
    """A member of `DISTILLATIONS`, and how much it counts next to the rewards' advantages.

    Letters as above, and M teachers.
    """

    member: Callable[..., Tensor]
    coef: float
    coef_end: float  # at the end of the run, linearly

    @property
    def of_distribution(self) -> bool:
        """Whether the member is a divergence."""
        return is_divergence(self.member)

    def coefficient(self, done: float) -> float:
        """When this fraction of the run's optimizer steps is done."""
        return self.coef + (self.coef_end - self.coef) * min(max(done, 0.0), 1.0)

    def advantages(self, teacher_logp: Tensor, weight: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        """(B, T) advantages, 0 of a divergence.

        Args:
            teacher_logp: (B, T, M)
            weight: (B, 1, M) of each teacher in a row; one of weight 0 does not count, whatever its values are.
            logp, mask: (B, T)
        """
        if self.of_distribution:
            return torch.zeros_like(logp)
        of_each = [self.member(teacher, logp, mask) for teacher in teacher_logp.unbind(-1)]
        return _weighted(of_each, weight)

    def divergences(self, teacher: Tensor, student: Tensor, weight: Tensor) -> Tensor:
        """(B, T), with the student's gradient: of (B, T, M, E) events' log-probabilities, and (B, 1, M) weights."""
        of_each = [self.member(*pair) for pair in zip(teacher.unbind(2), student.unbind(2), strict=True)]
        return _weighted(of_each, weight)


def _weighted(of_each: Sequence[Tensor], weight: Tensor) -> Tensor:
    pairs = zip(of_each, weight.unbind(-1), strict=True)
    return torch.stack([torch.where(w != 0, w * value, 0.0) for value, w in pairs]).sum(dim=0)
