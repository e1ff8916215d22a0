"""`StepLoss`: the loss of a micro-batch by the axes, with what the whole optimizer step has to be counted for it.

Letters: B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor

from trl_ext.algorithms.distillation import event_log_probs
from trl_ext.algorithms.entropy import EntropyController
from trl_ext.algorithms.masking import masked_sum
from trl_ext.algorithms.types import LossInputs, StepTokens
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.forward_pass import ForwardPass, Student
from trl_ext.grpo.metrics import StepCounts, StepMetrics, tokens_of_step
from trl_ext.grpo.savings import steps_lie_in_one_rollout
from trl_ext.grpo.teachers import Teachers
from trl_ext.step import MicroBatch, Rows, TRLBatch

if TYPE_CHECKING:
    from accelerate import Accelerator

# Metrics of the objective whose mean is over the computed rows only; the others are 0 in rows that were left out.
_OF_COMPUTED = {"sampling/masked_frac"}


@dataclass(frozen=True)
class Call:
    """The call of `training_step`, or of an evaluation, in which a loss is computed."""

    number: int  # in the run, from 0
    accumulation: int  # TRL's micro-batches of its optimizer step; 0 in an evaluation
    rollout: Sequence[TRLBatch]  # TRL's slices

    @property
    def trains(self) -> bool:
        """Whether it is no evaluation's."""
        return self.accumulation > 0


class StepLoss:
    """Maps micro-batches and their log-probabilities to losses, and accumulates the metrics of a step.

    Args:
        config: of the axes.
        accelerator: of the ranks.
        defers_old: whether TRL has computed no old log-probabilities, and logged nothing of them.
        router_coef: of the routers' auxiliary loss.
        forward: the policy's forward passes.
        teachers: whose values of the tokens are learned from.
    """

    def __init__(
        self,
        config: ExtGRPOConfig,
        accelerator: Accelerator,
        defers_old: Callable[[], bool],
        router_coef: float,
        forward: ForwardPass,
        teachers: Teachers | None = None,
    ) -> None:
        self.config, self.accelerator, self.defers_old = config, accelerator, defers_old
        self.forward, self.teachers, self.distillation = forward, teachers, config.distill()
        self.router_coef = router_coef
        self.objective, self.sampler_correction = config.objective(), config.sampler_correction()
        self.of_sampler = config.old_log_probs == "sampler"
        self.metrics = StepMetrics()
        slices, accumulation = config.steps_per_generation, config.gradient_accumulation_steps
        is_exact = steps_lie_in_one_rollout(config)
        self.counts = StepCounts(slices, accumulation, config.max_completion_length, is_exact)
        self._entropy_controller = EntropyController(
            config.entropy_target, config.entropy_coef_delta, config.entropy_coef_min, config.entropy_coef_max
        )
        self._has_bonus = bool(config.entropy_coef) or config.use_adaptive_entropy
        self._policy_loss: Tensor | float = 0.0  # of the step's micro-batches so far, of this rank
        self._counted: dict[str, float] = {}  # the divisors of the metrics added last, by their names
        self._tokens: tuple[int, list[StepTokens]] = (-1, [])  # of the latest step, by its number

    @classmethod
    def of(cls, trainer: Any, config: ExtGRPOConfig, defers_old: Callable[[], bool], router_coef: float) -> StepLoss:
        """A trainer's, with the teachers that the config names loaded."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        forward = ForwardPass(trainer, model.get_base_model() if is_peft_model(model) else model)
        teachers = Teachers.of(config, trainer.accelerator, forward.bare, trainer._tokenizer)
        return cls(config, trainer.accelerator, defers_old, router_coef, forward, teachers)

    def __call__(
        self,
        batch: MicroBatch,
        logp: Tensor,
        entropy: Tensor,
        call: Call,
        step: StepTokens | None,
        policy_mask: Tensor | None,
        student: Student | None = None,
    ) -> tuple[Tensor, LossInputs]:
        """The loss, whose mean over ranks and sum over a step's micro-batches is the step's, and what it is of.

        Args:
            logp, entropy: (B, T), the first one with a graph.
            step: what `tokens_of` has found.
            policy_mask: (B, T) bool, the tokens that the policy loss is of; None: all that are trained on.
            student: if a divergence from a teacher is learned.
        """
        rows, mask = batch.rows, batch.rows.trained
        old_logp = self.old_log_probs(rows, logp.detach())
        x = LossInputs(logp, old_logp, self.advantages(rows, old_logp, call), mask)
        totals = self.counts.step_totals(self.accelerator, rows, call.number, call.accumulation, call.rollout)
        loss, metrics = self.objective(
            x,
            totals,
            ref_logp=rows.ref_logp,
            sampler_weight=self.weigh(rows, old_logp),
            sampled_logp=rows.sampled_logp,
            entropy=entropy.detach(),
            group=rows.group,
            step=step,
            policy_mask=policy_mask,
            divergence=None if student is None else self._coefficient(call) * self.divergence(rows, student),
        )
        self._policy_loss = self._policy_loss + loss.detach()
        self.metrics.add({"entropy": entropy, **metrics}, mask)
        if self.of_sampler and self.defers_old():  # else a correction's, or TRL's
            assert rows.sampled_logp is not None
            self.metrics.add_logp_difference(logp, rows.sampled_logp, mask)
        if self.teachers is not None:
            self.metrics.add_teachers(self.teachers.names, rows, old_logp)
        is_counted = call.trains and self.counts.is_exact
        self._counted = dict.fromkeys(metrics.keys() - _OF_COMPUTED, totals.tokens) if is_counted else {}
        # Trainer and DDP average over ranks, while our totals already count all of them. Nothing divides after the
        # aggregation: TRL switches Trainer's division by `gradient_accumulation_steps` off (`loss_is_scaled_for_ga`).
        return loss * self.accelerator.num_processes, x

    @property
    def needs_student(self) -> bool:
        """Whether a divergence from a teacher is learned, which needs more than log-probabilities of tokens."""
        return self.distillation is not None and self.distillation.of_distribution

    @property
    def asks_server(self) -> bool:
        """Whether a teacher is behind a server, which can be lost."""
        return self.teachers is not None and self.teachers.are_served

    def taught(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what teachers say of them, if there are any; a collective operation."""
        return list(batches) if self.teachers is None else self.teachers.ask(batches)

    def old_log_probs(self, rows: Rows, logp: Tensor) -> Tensor:
        """(B, T) that the ratio is to: before the step, or the sampler's; `logp` where these are not known.

        Args:
            logp: (B, T) of the current pass, without a graph.

        Raises:
            ValueError: the ratio is to a sampler that has reported nothing.
        """
        if not self.of_sampler:
            return logp if rows.old_logp is None else rows.old_logp
        if rows.sampled_logp is None:
            raise ValueError(
                "old_log_probs='sampler', and the rollout has no log-probabilities of its sampler: return logprobs "
                "from rollout_func, or set old_log_probs: policy"
            )
        return torch.where(rows.sampled_logp.isnan(), logp, rows.sampled_logp)

    def advantages(self, rows: Rows, old_logp: Tensor, call: Call) -> Tensor:
        """(B, 1) or (B, T): the rewards', and those of teachers."""
        if self.distillation is None or rows.teacher_logp is None:
            return rows.advantages
        assert rows.teacher_weight is not None
        of_teachers = self.distillation.advantages(rows.teacher_logp, rows.teacher_weight, old_logp, rows.trained)
        return rows.advantages + self._coefficient(call) * of_teachers

    def _coefficient(self, call: Call) -> float:
        assert self.distillation is not None
        step = call.number // self.config.gradient_accumulation_steps
        return self.distillation.coefficient(step / max(1, self.config.max_steps))

    def divergence(self, rows: Rows, student: Student) -> Tensor:
        """(B, T) from what teachers say of the tokens, with a graph; 0 where nothing is trained on."""
        assert self.distillation is not None
        assert rows.teacher_events is not None
        assert rows.teacher_ids is not None
        assert rows.teacher_weight is not None
        mask, (head, hidden) = rows.trained, student

        def events(logits: Tensor, ids: Tensor) -> Tensor:  # (N, V), (N, M, k) -> (N, M, E)
            return torch.stack([event_log_probs(logits, of_one) for of_one in ids.unbind(1)], dim=1)

        own = head.of_logits(events, hidden[mask], rows.teacher_ids[mask])
        weight = rows.teacher_weight.expand(*mask.shape, -1)[mask]
        found = self.distillation.divergences(rows.teacher_events[mask][None], own[None], weight[None])
        return found.new_zeros(mask.shape).masked_scatter(mask, found[0])

    def weigh(self, rows: Rows, old_logp: Tensor) -> Tensor | None:
        """(B, 1) or (B, T) weights that correct for the engine's mismatch with the trainer, which is logged.

        None, and nothing logged, without a correction.
        """
        if self.sampler_correction is None:
            return None
        sampled, mask = rows.sampled_logp, rows.trained
        assert sampled is not None
        weight = self.sampler_correction(old_logp, sampled, mask)
        if self.defers_old():  # else TRL has logged it
            self.metrics.add_logp_difference(old_logp, sampled, mask)
        longest = self.config.max_completion_length
        self.metrics.add_mismatch(old_logp, sampled, mask, weight.expand_as(mask), longest)
        return weight

    def tokens_of(
        self,
        batch: MicroBatch,
        planned: Sequence[MicroBatch] | None,
        call: Call,
        log_probs: Callable[[MicroBatch], Tensor],
    ) -> StepTokens | None:
        """The tokens of the optimizer step if the policy loss asks for them, from a forward pass at its start.

        Args:
            planned: the step's micro-batches, `batch` among them; None: TRL's, in the order of the calls.
            log_probs: (B, T) of a micro-batch under the current policy, without gradient.
        """
        if "step" not in self.config.inputs_of_loss:
            return None
        if not call.trains:
            return self._tokens_of([batch], call, log_probs)[0]
        step, place = divmod(call.number, self.config.gradient_accumulation_steps)
        if planned is not None:
            place = next(number for number, one in enumerate(planned) if one is batch)
        if self._tokens[0] != step:
            if planned is None:
                first = (call.number - place) % self.config.steps_per_generation
                slices = call.rollout[first : first + self.config.gradient_accumulation_steps]
                planned = self.taught([MicroBatch.of_trl(one) for one in slices])
            self._tokens = step, self._tokens_of(planned, call, log_probs)
        return self._tokens[1][place]

    def _tokens_of(
        self, batches: Sequence[MicroBatch], call: Call, log_probs: Callable[[MicroBatch], Tensor]
    ) -> list[StepTokens]:
        def advantages(rows: Rows, old_logp: Tensor) -> Tensor:
            return self.advantages(rows, old_logp, call)

        return tokens_of_step(batches, log_probs, self.old_log_probs, advantages, self.accelerator)

    def terms(
        self, aux_loss: Tensor | None, entropy: Tensor, trained: Tensor, call: Call, bonus: tuple[float, float]
    ) -> tuple[Tensor | float, tuple[float, float], dict[str, float]]:
        """The routers' auxiliary loss and the entropy bonus, which TRL averages over its micro-batch; and metrics.

        Args:
            aux_loss: None without a mixture of experts.
            entropy: (B, T)
            trained: (B, T) bool, the tokens that the bonus is of.
            bonus: its coefficient and the entropy of the step before; returned as the next micro-batch gets them.
        """
        terms: Tensor | float = 0.0
        logged: dict[str, float] = {}
        (coefficient, last_entropy), config, accumulation = bonus, self.config, call.accumulation or 1
        if aux_loss is not None:
            terms = self.router_coef * aux_loss / accumulation
            logged["aux_loss"] = self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item()
        if coefficient or config.use_adaptive_entropy:
            mean = masked_sum(entropy, trained) / trained.sum().clamp(min=1)
            is_on = not config.use_adaptive_entropy or last_entropy <= config.entropy_target
            terms = terms - coefficient * is_on * mean / accumulation
            ends_step = call.trains and self.accelerator.sync_gradients
            if config.use_adaptive_entropy and call.trains:
                self._entropy_controller.add(entropy, trained)
                if ends_step:
                    bonus = self._entropy_controller.finish(coefficient, self.accelerator.reduce)
            if ends_step:
                logged["entropy_coef"] = bonus[0]
        return terms, bonus, logged

    def add_rows_trained(self, trained: int, rows: int) -> None:
        """Log how many of this rank's rows of the step are trained on."""
        every_row = torch.arange(rows, device=self.accelerator.device)
        self.metrics.add({"step/rows_trained": (every_row < trained).float()}, every_row >= 0)

    def finish(self) -> dict[str, float]:
        """The step's metrics over all ranks, at its end; those of the objective are means over all of its tokens."""
        figures = self.metrics.finish(self.accelerator, self._counted)
        policy_loss, self._policy_loss = self._policy_loss, 0.0
        if self._has_bonus and isinstance(policy_loss, Tensor):  # the logged loss has the bonus in it
            figures["policy_loss"] = self.accelerator.reduce(policy_loss, reduction="sum").item()
        return figures
