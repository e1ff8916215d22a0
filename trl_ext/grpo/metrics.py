"""Counts, metrics and tokens of an optimizer step over all ranks, from its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl_ext.algorithms.types import StepTokens, StepTotals
from trl_ext.generation.floats import widest_float
from trl_ext.step import MicroBatch, Rows, TRLBatch, loss_mask

if TYPE_CHECKING:
    from accelerate import Accelerator


# Metrics that are no mean over tokens, from the means that are accumulated under their names. The effective sample size
# is a fraction of the tokens, Kong 1992; chi-square is the divergence of the trainer's tokens from the sampler's.
_OF_MEANS: dict[str, Callable[[dict[str, float]], float]] = {
    "sampling/perplexity_trainer": lambda means: math.exp(means["sampling/perplexity_trainer"]),
    "sampling/perplexity_sampler": lambda means: math.exp(means["sampling/perplexity_sampler"]),
    "sampling/chi_square": lambda means: means["sampling/chi_square"] - 1,
    "sampling/effective_sample_size": lambda means: (
        means["sampling/weight_mean"] ** 2 / max(means["sampling/effective_sample_size"], 1e-30)
    ),
}


_LONGEST = 2**32  # more tokens than a completion has


class StepCounts:
    """The totals of the optimizer step that a micro-batch belongs to, counted once per step.

    Args:
        slices, accumulation: TRL's micro-batches per rollout and per optimizer step.
        max_tokens: of a completion.
        is_exact: no step begins in one rollout and ends in another.
    """

    def __init__(self, slices: int, accumulation: int, max_tokens: int, is_exact: bool) -> None:
        self.slices, self.accumulation, self.max_tokens, self.is_exact = slices, accumulation, max_tokens, is_exact
        self._latest: tuple[int, StepTotals] | None = None  # a step's, by its number

    def step_totals(
        self, accelerator: Accelerator, rows: Rows, call: int, accumulation: int, rollout: Sequence[TRLBatch]
    ) -> StepTotals:
        """Counts over all ranks; of a step that spans two rollouts a rollout's average, as in TRL.

        The tokens of such a step cannot be counted in advance.

        Args:
            rows: of the micro-batch.
            call: number of the `training_step` call in the run.
            accumulation: TRL's micro-batches of this step, or 0 in an evaluation, whose totals are the rows'.
            rollout: TRL's slices.
        """
        mask, ranks = rows.trained, accelerator.num_processes
        if not accumulation:
            return StepTotals(len(mask) * ranks, mask.sum().item() * ranks, self.max_tokens)
        if not self.is_exact:
            assert rows.tokens_of_rollout is not None
            tokens = float(rows.tokens_of_rollout) * accumulation / self.slices
            return StepTotals(len(mask) * ranks * accumulation, tokens, self.max_tokens)
        step, first = call // self.accumulation, call % self.slices
        if self._latest is None or self._latest[0] != step:
            first -= first % self.accumulation
            masks = [loss_mask(batch) for batch in rollout[first : first + accumulation]]
            dtype = widest_float(accelerator.device)
            counts = torch.tensor([[len(mask), int(mask.sum())] for mask in masks], dtype=dtype).sum(dim=0)
            sequences, tokens = accelerator.reduce(counts.to(accelerator.device), reduction="sum").tolist()
            self._latest = step, StepTotals(sequences, tokens, self.max_tokens)
        return self._latest[1]


class StepMetrics:
    """Sums and maxima, accumulated over the micro-batches of a step and reduced over the ranks once at its end."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> (sum, count)
        self._maxima: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], mask: Tensor) -> None:
        """Accumulate the unmasked entries of (B, T) quantities."""
        dtype = widest_float(mask.device)
        count = mask.sum().to(dtype)
        for name, value in values.items():
            pair = torch.stack([value.to(dtype).masked_fill(~mask, 0).sum(), count])
            self._sums[name] = self._sums.get(name, 0) + pair

    @torch.no_grad()
    def add_logp_difference(self, old_logp: Tensor, sampled: Tensor, mask: Tensor) -> None:
        """Accumulate the distance of the engine's log-probabilities from the trainer's, and how many are the same."""
        difference, known = (old_logp - sampled).abs(), mask & ~sampled.isnan()
        same = (old_logp == sampled).to(difference.dtype)
        self.add({"sampling/sampling_logp_difference/mean": difference, "sampling/identical_fraction": same}, known)
        self.add_max("sampling/sampling_logp_difference/max", difference.masked_fill(~known, -torch.inf))

    @torch.no_grad()
    def add_mismatch(self, old_logp: Tensor, sampled: Tensor, mask: Tensor, weight: Tensor, max_tokens: int) -> None:
        """Accumulate how far the engine is from the trainer, and what the correction leaves of the tokens.

        Args:
            weight: (B, T) of the policy loss, 0 where a token is left out.
            max_tokens: the maximum completion length, in whose quarters the tokens left out are counted.
        """
        known, ratio = mask & ~sampled.isnan(), (old_logp - sampled).to(widest_float(mask.device)).exp()
        per_token = {"perplexity_trainer": -old_logp, "perplexity_sampler": -sampled, "chi_square": ratio.square()}
        self.add({f"sampling/{name}": value for name, value in per_token.items()}, known)
        self.add({"sampling/weight_mean": weight, "sampling/effective_sample_size": weight.square()}, mask)
        length = mask.sum(dim=1, keepdim=True)
        for quarter in range(4):
            inside = (4 * (length - 1) // max_tokens).clamp(0, 3) == quarter
            self.add({f"sampling/masked_frac_length_{quarter + 1}": (weight == 0).float()}, mask & inside)

    @torch.no_grad()
    def add_teachers(self, names: Sequence[str], rows: Rows, old_logp: Tensor) -> None:
        """Accumulate the divergence from each teacher, as sampled, and how often a token is a teacher's first choice.

        Args:
            names: of the M teachers.
            old_logp: (B, T)
        """
        if rows.teacher_logp is None or rows.teacher_agrees is None or rows.teacher_weight is None:
            return
        taught = rows.trained[..., None] & (rows.teacher_weight != 0)  # (B, T, M)
        kl = old_logp[..., None] - rows.teacher_logp
        self.add({"distillation/reverse_kl": kl, "distillation/agreement": rows.teacher_agrees}, taught)
        for number, name in enumerate(names if len(names) > 1 else ()):
            self.add({f"distillation/reverse_kl_{name}": kl[..., number]}, taught[..., number])
        correct = rows.teacher_weight.new_full((len(taught),), torch.nan) if rows.correct is None else rows.correct
        for outcome, value in {"correct": 1, "incorrect": 0}.items():
            those = taught & torch.eq(correct, value)[:, None, None]
            self.add({f"distillation/agreement_{outcome}": rows.teacher_agrees}, those)

    @torch.no_grad()
    def add_max(self, name: str, values: Tensor) -> None:
        """Accumulate the maximum of values."""
        largest = values.max() if values.numel() else values.new_full((), -torch.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)

    def finish(self, accelerator: Accelerator, counts: dict[str, float]) -> dict[str, float]:
        """Means and maxima over all ranks, which must have the same names; then reset for the next step.

        A quantity without any unmasked token is left out.

        Args:
            counts: divisors by name in place of the number of accumulated tokens, such as the tokens of the whole step.
        """
        figures: dict[str, float] = {}
        if self._sums:
            totals = accelerator.reduce(torch.stack(list(self._sums.values())), reduction="sum").tolist()
            for name, (total, count) in zip(self._sums, totals, strict=True):
                if counts.get(name, count):
                    figures[name] = total / counts.get(name, count)
        figures |= {name: of_mean(figures) for name, of_mean in _OF_MEANS.items() if name in figures}
        if self._maxima:
            largest = accelerator.gather(torch.stack(list(self._maxima.values()))[None]).amax(dim=0).tolist()
            figures |= {name: value for name, value in zip(self._maxima, largest, strict=True) if value > -torch.inf}
        self._sums, self._maxima = {}, {}
        return figures


@torch.no_grad()
def tokens_of_step(
    batches: Sequence[MicroBatch],
    log_probs: Callable[[MicroBatch], Tensor],
    old_log_probs: Callable[[Rows, Tensor], Tensor],
    advantages: Callable[[Rows, Tensor], Tensor],
    accelerator: Accelerator,
) -> list[StepTokens]:
    """The step as each of this rank's micro-batches sees it, in their order. A collective operation.

    Args:
        batches: this rank's micro-batches of the step, as many as on any rank.
        log_probs: computes a micro-batch's (B, T) log-probabilities under the current policy.
        old_log_probs: finds those that the ratio is to, given the current ones.
        advantages: computes those of rows, (B, 1) or (B, T), given the old log-probabilities.
    """
    masks, parts, keys = [batch.rows.trained for batch in batches], [], []
    for batch, mask in zip(batches, masks, strict=True):
        logp, rows = log_probs(batch), batch.rows
        old_logp = old_log_probs(rows, logp)
        values = (logp, old_logp, advantages(rows, old_logp).expand_as(mask))
        parts.append(torch.stack([value[mask].to(logp.dtype) for value in values], dim=1))
        row = torch.zeros(len(mask), dtype=torch.long, device=mask.device) if rows.row is None else rows.row
        keys.append((row[:, None] * _LONGEST + torch.arange(mask.shape[1], device=mask.device))[mask])
    order = torch.cat(keys).argsort()  # by row of the rollout
    own = torch.cat(parts)[order]  # (tokens of this rank, 3)
    counts = accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
    padded = accelerator.gather(torch.nn.functional.pad(own, (0, 0, 0, max(counts) - len(own))))
    every = torch.cat([rows[:n] for rows, n in zip(padded.split(max(*counts, 1)), counts, strict=False)])
    logp, old_logp, advantage = every.unbind(dim=1)
    places, views = order.argsort() + sum(counts[: accelerator.process_index]), []
    for mask, own_places in zip(masks, places.split([len(part) for part in parts]), strict=True):
        place = torch.full(mask.shape, -1, device=mask.device)
        place[mask] = own_places
        views.append(StepTokens(logp, old_logp, advantage, place))
    return views
