"""The seam to TRL: `ExtGRPOTrainer` replaces the advantages and the loss of `GRPOTrainer` and nothing else.

TRL 1.16 has no public hook for either. `tests/test_seam.py` holds the signatures relied on here.

Letters: P prompts, G completions per prompt, N = P*G, B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from trl_ext.config import ExtGRPOConfig
from trl_ext.rollout import hf_generate, is_finished
from trl_ext.sampler_correction import SAMPLER_CORRECTIONS
from trl_ext.types import LossInputs, StepTotals


class ExtGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the advantage, the policy loss, the aggregation and the KL estimator of the config.

    With neither a preset nor an axis in the config it trains exactly as TRL does.
    """

    args: ExtGRPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args") or next((a for a in args if isinstance(a, ExtGRPOConfig)), None)
        if not isinstance(config, ExtGRPOConfig):
            raise TypeError("ExtGRPOTrainer needs args=ExtGRPOConfig(...)")
        # TRL counts a completion that ended at a stop string as truncated; with `stop` we mask truncated ones.
        self._mask_truncated = bool(config.stop) and config.mask_truncated_completions
        if config.stop or config.sampling_min_tokens:
            config.generation_kwargs = _sampling_kwargs(config)
        super().__init__(*args, **kwargs)
        self.mask_truncated_completions = self.mask_truncated_completions and not self._mask_truncated
        if config.uses_axes:
            self._advantage_fn, self._objective = config.advantage_fn(), config.objective()
        self._totals: tuple[int, StepTotals] | None = None  # optimizer step they belong to, and its totals
        self._finished = torch.zeros(0, dtype=torch.bool)  # (N local,) of the last rollout
        self._lengths = torch.zeros(0)  # (N local,)

    # Rollout: one `stop` setting for HF generate and vLLM.

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm or not self.args.stop:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            return hf_generate(model, self._tokenizer, prompt_ids, self.generation_config, self.args.stop), None

    def _generate(self, prompts: list[Any]) -> Any:
        output = super()._generate(prompts)
        completion_ids = output[1]
        self._finished = is_finished(completion_ids, self._tokenizer, self.eos_token_ids, self.args.stop)
        self._lengths = torch.tensor([len(ids) for ids in completion_ids], dtype=torch.float32)
        if self.args.stop:
            self._log_truncation()
        return output

    def _log_truncation(self) -> None:
        """Write TRL's truncation metrics again, with completions that ended at a stop string as finished."""
        device = self.accelerator.device
        finished = self.accelerator.gather(self._finished.to(device))
        lengths = self.accelerator.gather(self._lengths.to(device))[finished]
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["completions/clipped_ratio"][-1] = 1 - finished.float().mean().item()
        for name in ("mean", "min", "max"):
            value = getattr(lengths, name)().item() if len(lengths) else 0.0
            metrics[f"completions/{name}_terminated_length"][-1] = value

    # Advantages.

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        per_func: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        reward = (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)
        self._rewards = reward.masked_fill(per_func.isnan().all(dim=1), torch.nan)  # (N,), NaN: nothing scored it
        self._log_lengths_by_outcome(len(prompts))
        return per_func

    def _log_lengths_by_outcome(self, local: int) -> None:
        """Response length of correct and of incorrect responses; correct is what a reward logs so, or reward > 0."""
        start = self.accelerator.process_index * local
        logged = self._pending_extra_logs.get("correct")
        correct = torch.tensor(logged, dtype=torch.bool) if logged else (self._rewards[start : start + local] > 0).cpu()
        per_outcome = torch.stack(
            [(self._lengths * correct).sum(), correct.sum(), (self._lengths * ~correct).sum(), (~correct).sum()]
        )
        right_sum, right, wrong_sum, wrong = self.accelerator.reduce(per_outcome.to(self.accelerator.device)).tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["completions/mean_length_correct"].append(right_sum / right if right else float("nan"))
        metrics["completions/mean_length_incorrect"].append(wrong_sum / wrong if wrong else float("nan"))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._mask_truncated:
            batch["completion_mask"] = batch["completion_mask"] * self._finished.to(self.accelerator.device)[:, None]
        if self.args.uses_axes and self.model.training:
            advantages = self._advantage_fn(self._rewards.view(-1, self.num_generations))  # (P, G)
            advantages = torch.nan_to_num(advantages, nan=0.0).flatten()  # an unscored completion teaches nothing
            start = self.accelerator.process_index * len(inputs)
            batch["advantages"] = advantages[start : start + len(inputs)]
            self._relog_advantages(advantages)
        return batch

    def _relog_advantages(self, advantages: Tensor) -> None:
        """Put ours where TRL's completions table has just logged its own."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())

    # Loss.

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.args.uses_axes:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        mask = _loss_mask(inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logp, entropy, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, attention, mask.shape[1], compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        # TRL leaves the old log-probabilities out where they equal the current ones.
        old_logp = inputs.get("old_per_token_logps", logp.detach())
        x = LossInputs(logp, old_logp, inputs["advantages"].view(len(logp), -1), mask)
        totals = self._step_totals() if self.model.training else self._micro_batch_totals(mask)
        loss, metrics = self._objective(
            x,
            totals,
            ref_logp=inputs.get("ref_per_token_logps"),
            sampler_weight=self._sampler_weight(inputs, old_logp, mask),
        )
        self._log_token_means({"entropy": entropy, **metrics}, mask)
        # Trainer and DDP average over ranks, while our totals already count all of them.
        loss = loss * self.accelerator.num_processes
        if self.aux_loss_enabled:
            accumulation = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation
        return loss

    def _sampler_weight(self, inputs: dict[str, Any], old_logp: Tensor, mask: Tensor) -> Tensor | None:
        """(B, 1) or (B, T) weight for the engine's mismatch with the trainer, or None for no correction."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        correct = SAMPLER_CORRECTIONS.build(
            self.vllm_importance_sampling_mode,
            clip_min=self.args.vllm_importance_sampling_clip_min,
            clip_max=self.args.vllm_importance_sampling_clip_max,
        )
        weight: Tensor = correct(old_logp, inputs["sampling_per_token_logps"], mask)
        return weight

    def _step_totals(self) -> StepTotals:
        """Sequences and tokens of the optimizer step that the current micro-batch belongs to, over all ranks."""
        accumulation = self.current_gradient_accumulation_steps
        step = self._step // self.args.gradient_accumulation_steps
        if self._totals is None or self._totals[0] != step:
            first = self._step % self.args.steps_per_generation
            first -= first % self.args.gradient_accumulation_steps
            window = [_loss_mask(batch) for batch in self._buffered_inputs[first : first + accumulation]]
            counts = torch.tensor(
                [sum(len(m) for m in window), sum(int(m.sum()) for m in window)],
                dtype=torch.float64,
                device=self.accelerator.device,
            )
            sequences, tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
            self._totals = step, StepTotals(sequences, tokens, self.max_completion_length)
        return self._totals[1]

    def _micro_batch_totals(self, mask: Tensor) -> StepTotals:
        ranks = self.accelerator.num_processes
        return StepTotals(len(mask) * ranks, mask.sum().item() * ranks, self.max_completion_length)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _log_token_means(self, values: dict[str, Tensor], mask: Tensor) -> None:
        """Log each (B, T) quantity's mean over the unmasked tokens of all ranks, in one reduction."""
        sums = torch.stack([mask.sum().to(torch.float32), *[(v.float() * mask).sum() for v in values.values()]])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, total in zip(values, totals, strict=True):
            metrics[name].append(total / max(count, 1.0))


def _loss_mask(batch: dict[str, Any]) -> Tensor:
    """(B, T) bool: completion tokens that the model wrote and that train."""
    mask = batch["completion_mask"]
    return (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()


def _sampling_kwargs(config: ExtGRPOConfig) -> dict[str, Any]:
    """`stop` and `sampling_min_tokens` in the words of the engine that generates."""
    kwargs = dict(config.generation_kwargs or {})
    if config.use_vllm and config.stop:
        kwargs |= {"stop": config.stop, "include_stop_str_in_output": True}
    if config.sampling_min_tokens:
        kwargs["min_tokens" if config.use_vllm else "min_new_tokens"] = config.sampling_min_tokens
    return kwargs
