"""`MicroBatches`: what makes TRL's trainer compute an optimizer step on micro-batches that `batching` has planned.

TRL cuts a rollout into equal slices, as its rows come and as wide as the widest, and computes old log-probabilities of
all of them before it knows their advantages.

Letters: B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import is_peft_model, send_to_device
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.models.utils import disable_gradient_checkpointing

from trl_ext.algorithms.objective import Objective
from trl_ext.generation.kv_sharing import has_rotary_positions, why_not
from trl_ext.grpo import prompt_sharing as shared_prompts
from trl_ext.grpo.batching import Batch, Batching, joined
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.metrics import StepMetrics

log = logging.getLogger(__name__)

# What TRL's own loss passes on to a model that sees images.
_OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


class MicroBatches:
    """To be inherited beside `GRPOTrainer`."""

    args: ExtGRPOConfig
    accelerator: Any
    model: Any
    ref_model: Any
    beta: float
    num_iterations: int
    aux_loss_enabled: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    vllm_importance_sampling_correction: bool
    _is_vlm: bool
    _step: int
    _buffered_inputs: Any
    _current_train_step_time: float
    _objective: Objective
    _step_metrics: StepMetrics
    _batching: Batching | None
    _plans: list[list[Batch]]  # per optimizer step on the current rollout: its micro-batches
    _old_log_probs_come_later: bool  # while TRL scores a rollout

    def _make_batching(self) -> Batching | None:
        """How micro-batches are cut; None where TRL's are taken as they are."""
        args = self.args
        if not (args.uses_axes and self._steps_lie_in_one_rollout()) or self.aux_loss_enabled or self._is_vlm:
            return None
        if args.entropy_coef or args.top_entropy_quantile < 1:  # both are about a micro-batch as TRL cuts it
            return None
        sharded = (self.is_deepspeed_enabled and is_deepspeed_zero3_enabled()) or self.is_fsdp_enabled
        model = self.accelerator.unwrap_model(self.model)
        refusal = why_not(model, args.gradient_checkpointing, sharded)
        batching = Batching(
            rows=args.per_device_train_batch_size,
            tokens=args.micro_batch_tokens,
            compact=args.dynamic_micro_batches and has_rotary_positions(model),
            skip_idle=args.skip_zero_advantage_rows and self._objective.leaves_idle_rows_alone(),
            shared=args.share_prompt_prefix and args.dynamic_micro_batches and refusal is None,
            multiple_of=args.pad_to_multiple_of,
        )
        return batching if batching.compact or batching.skip_idle or batching.shared else None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        """One of the optimizer step's turns: the last ones compute its micro-batches, those before have nothing to do.

        The last turn always computes one, since the backends reduce gradients there.
        """
        trl: Any = super()
        if self._batching is None:
            return trl.training_step(model, inputs, num_items_in_batch)
        began = time.perf_counter()
        model.train()  # as Trainer does, before the rollout
        micro_batch = self._next_micro_batch(inputs)
        self._current_train_step_time += time.perf_counter() - began
        if micro_batch is None:
            self._step += 1
            return torch.zeros((), device=self.accelerator.device)
        return trl.training_step(model, micro_batch, num_items_in_batch)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, dict) and "completion_ids" in generation_batch:
            return generation_batch  # a micro-batch already
        trl: Any = super()
        return trl._prepare_inputs(generation_batch)

    def _next_micro_batch(self, inputs: Any) -> Batch | None:
        before, accumulation = self._buffered_inputs, self.args.gradient_accumulation_steps
        trl: Any = super()
        trl._prepare_inputs(inputs)
        if self._buffered_inputs is not before or not self._plans:
            self._plans = self._make_plans()
            self._remember_old_log_probs()
        plan = self._plans[self._step % self.args.steps_per_generation // accumulation]
        idle_turns = accumulation - len(plan)
        turn = self._step % accumulation
        if turn == 0:
            trained = sum(len(batch["row"]) for batch in plan if "row" in batch)
            every_row = torch.arange(
                accumulation * self.args.per_device_train_batch_size, device=self.accelerator.device
            )
            self._step_metrics.add({"step/rows_trained": (every_row < trained).float()}, every_row >= 0)
        return None if turn < idle_turns else plan[turn - idle_turns]

    def _make_plans(self) -> list[list[Batch]]:
        assert self._batching is not None
        accumulation = self.args.gradient_accumulation_steps
        windows = [
            self._buffered_inputs[start : start + accumulation]
            for start in range(0, self.args.steps_per_generation, accumulation)
        ]
        return [self._batching.plan(joined(window), self._largest_over_ranks) for window in windows]

    def _largest_over_ranks(self, n: int) -> int:
        return int(self.accelerator.gather(torch.tensor([n], device=self.accelerator.device)).max())

    def _rollout_state(self) -> dict[str, Any]:
        """What a run needs to go on with the steps that are left on its rollout."""
        old_log_probs = [[batch.get("old_per_token_logps") for batch in plan] for plan in self._plans]
        return {"rollout": self._buffered_inputs, "old_log_probs": old_log_probs}

    def _restore_rollout(self, state: dict[str, Any]) -> None:
        device, slices = self.accelerator.device, [len(batch["prompt_ids"]) for batch in state["rollout"]]
        if slices != [self.args.per_device_train_batch_size] * self.args.steps_per_generation:
            log.warning(
                "the checkpoint was saved within a rollout of %d micro-batches of %d rows, now there are %d of "
                "%d (--per_device_train_batch_size): the steps that were left on it are made on a new rollout",
                len(slices), slices[0], self.args.steps_per_generation, self.args.per_device_train_batch_size,
            )  # fmt: skip
            return
        self._buffered_inputs = [send_to_device(batch, device) for batch in state["rollout"]]
        self._plans = self._make_plans() if self._batching is not None else []
        for plan, olds in zip(self._plans, send_to_device(state["old_log_probs"], device), strict=True):
            for batch, old in zip(plan, olds, strict=True):
                if old is not None:
                    batch["old_per_token_logps"] = old

    @torch.no_grad()
    def _remember_old_log_probs(self) -> None:
        """Off-policy: of the rows that are trained on after the policy has changed, before it does."""
        if self._is_on_policy() or not self._defers_old_log_probs():
            return
        again = self.num_iterations > 1
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for batch in itertools.chain(*self._plans[0 if again else 1 :]):
                batch["old_per_token_logps"] = self._log_probs(self.model, batch)[0]

    def _defers_old_log_probs(self) -> bool:
        """Whether old log-probabilities come from our own passes: on-policy the loss's, off-policy those of a plan."""
        if not (self.args.uses_axes and self.args.reuse_log_probs):
            return False
        if self._is_on_policy():
            return True
        # An adapter's reference is the model itself, so that TRL's two calls for it look alike.
        told_apart = self.beta == 0 or self.ref_model is not None
        return told_apart and (self._batching is not None or not self.model.training)

    def _steps_lie_in_one_rollout(self) -> bool:
        return self.args.steps_per_generation % self.args.gradient_accumulation_steps == 0

    def _is_on_policy(self) -> bool:
        """Whether every rollout is trained on in one optimizer step, so that old and current policy are the same."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    @contextlib.contextmanager
    def _no_second_forward(self) -> Iterator[None]:
        """TRL computes old log-probabilities of all rows, before their advantages are known; not where ours do."""
        corrected = self.vllm_importance_sampling_correction
        deferred = self._defers_old_log_probs()
        self.vllm_importance_sampling_correction = corrected and not deferred
        self._old_log_probs_come_later = deferred
        try:
            yield
        finally:
            self.vllm_importance_sampling_correction = corrected
            self._old_log_probs_come_later = False

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._old_log_probs_come_later and model is self.model and not self._is_on_policy():
            return None, None, None
        trl: Any = super()
        return trl._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _log_probs(self, model: Any, inputs: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, T) log-probabilities and entropies of the completions, and the routers' loss where there is one."""
        prompt_ids, prompt_mask = inputs["prompt_ids"], inputs["prompt_mask"]
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        if "prompts" in inputs:
            unwrapped = self.accelerator.unwrap_model(model)
            decoder = (unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped).base_model
            with self.accelerator.autocast():
                cache = inputs["prompts"].cache(decoder, inputs["group"])
                logp, entropy = shared_prompts.completion_log_probs(
                    model, cache, prompt_ids, prompt_mask, completion_ids, completion_mask
                )
            return logp, entropy, None
        found: tuple[Tensor, Tensor, Tensor | None] = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([prompt_ids, completion_ids], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            completion_ids.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **{name: inputs[name] for name in _OF_IMAGES if name in inputs},
        )
        return found
