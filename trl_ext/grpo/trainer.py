"""The seam to TRL: every override of `GRPOTrainer`, in the order in which an optimizer step calls them.

    Trainer.train -> ExtGRPOTrainer.train             refuses fewer problems than a rollout has
      Trainer._run_epoch                              checkpoints, SIGTERM, finite steps: training/trainer.py
        training_step          ours, TRL's, HF's      a micro-batch of the step's plan (StepPlanner)
          _prepare_inputs      ours, TRL's            every few steps a rollout; passes a planned micro-batch through
            _generate_and_score_completions  ours, TRL's   problems (Curriculum), then ours: masks and advantages
              _generate        ours, TRL's            completions as texts, with special tokens that are text
                _tokenize_prompts  ours, TRL's        prompts without a second BOS
                _generate_single_turn  ours, TRL's    HF generate with stop strings
              _calculate_rewards  ours, TRL's         rewards checked on all ranks: the Rollout, rows for the log
          _compute_loss        ours                   LossInputs and StepTotals to the Objective

Without a preset or an axis, TRL's advantages and loss are used. TRL 1.16 has no public hook for any of it.
What is no override and needs no trainer is next to it: savings.py, metrics.py, rollout.py, dynamic_sampling.py.
`tests/grpo/test_seam.py` holds the signatures and this order.

Letters: P prompts, G completions per prompt, N = P*G, B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from trl_ext.compat import lazy_vllm as _lazy_vllm  # noqa: F401

# isort: split
import contextlib
import functools
import inspect
import logging
import math
import time
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType, gather_object, is_peft_model
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_ext.algorithms.advantages import total_reward
from trl_ext.algorithms.entropy import EntropyController
from trl_ext.algorithms.masking import masked_mean, masked_sum
from trl_ext.algorithms.selection import rewards_differ
from trl_ext.algorithms.types import LossInputs, StepTokens
from trl_ext.compat.hf_sampling import generating_with
from trl_ext.compat.trl_scoring import old_log_probs_left_out, texts_left_on_ranks
from trl_ext.dashboards.progress import show_rewards_in_notebook
from trl_ext.generation.adapter_models import with_adapter_loaded
from trl_ext.generation.adapters import check_adapter, refuse_untrainable
from trl_ext.generation.completion import entropy_estimates
from trl_ext.generation.interruption import sampling
from trl_ext.generation.policy import sampling_kwargs
from trl_ext.generation.progress import CountedTokens, advance, reporting
from trl_ext.generation.token_logprobs import TokenLogProbs
from trl_ext.generation.tokens import to_be_continued
from trl_ext.generation.vllm import engine_settings
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.curriculum import Curriculum
from trl_ext.grpo.dynamic_sampling import Try, sample_until_full
from trl_ext.grpo.metrics import StepCounts, StepMetrics, tokens_of_step
from trl_ext.grpo.rewards import correct_by_row, describe_nonfinite, distinct_columns, fault_of_nan, score_on_all_ranks
from trl_ext.grpo.rollout import Rollout, log_rows, sample_metrics, with_special_tokens
from trl_ext.grpo.savings import savings
from trl_ext.grpo.without_effect import chosen_without_effect
from trl_ext.rewards.guard import Guard, RewardError, guarded
from trl_ext.runs.token_log import TokenLog
from trl_ext.step import (
    MicroBatch,
    Rows,
    StepPlanner,
    TRLBatch,
    as_wide_as,
    loss_mask,
    not_the_last,
    numbers_of_sequences,
    restored_rollout,
)
from trl_ext.training.ending import TimeBudget
from trl_ext.training.state import from_plain, to_plain
from trl_ext.training.trainer import ReliableTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.trainer_utils import TrainOutput

Inputs = MicroBatch | TRLBatch | list[dict[str, Any]]  # planned, TRL's, or rows of the dataset

# Metrics of the objective whose mean is over the computed rows only; the others are 0 in rows that were left out.
_OF_COMPUTED = {"sampling/masked_frac"}

# Attributes that a checkpoint has by their name, TRL's among them.
_RESUMED = (
    "_logs", "_current_train_step_time", "_last_world_entropy", "entropy_coef", "last_rollout", "_unscored_in_a_row",
    "_nonfinite",
)  # fmt: skip

log = logging.getLogger(__name__)


class ExtGRPOTrainer(ReliableTrainer, GRPOTrainer):
    """`GRPOTrainer` with the advantage, the policy loss, the aggregation and the KL estimator of the config.

    With neither a preset nor an axis in the config it trains exactly as TRL does.
    """

    args: ExtGRPOConfig
    _logs: dict[str, Any]
    _buffered_inputs: list[TRLBatch]
    _last_world_entropy: float
    _bare_model: PreTrainedModel
    entropy_coef: float
    eos_token_ids: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args") or next((a for a in args if isinstance(a, ExtGRPOConfig)), None)
        if not isinstance(config, ExtGRPOConfig):
            raise TypeError("ExtGRPOTrainer needs args=ExtGRPOConfig(...)")
        # TRL counts a completion that ended at a stop string as truncated; with `stop` we mask truncated ones.
        self._mask_truncated = bool(config.stop) and config.mask_truncated_completions
        if config.stop or config.sampling_min_tokens:
            config.generation_kwargs = sampling_kwargs(config)
        given = inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments
        refuse_untrainable(given.get("peft_config"))
        if config.use_vllm:
            check_adapter(given["model"], given.get("peft_config"))
        loaded = with_adapter_loaded(given, config)
        if config.overlong_buffer is not None:
            given["reward_funcs"] = config.with_overlong_penalty(given["reward_funcs"])
        with engine_settings(config), loaded:
            super().__init__(**given)
        show_rewards_in_notebook(self)
        if None in self.eos_token_ids:  # TRL's for a tokenizer without EOS
            self.eos_token_ids = [token for token in self.eos_token_ids if token is not None]
            if not self.use_vllm:
                self.generation_config.eos_token_id = self.eos_token_ids or None
                self.generation_kwargs["eos_token_id"] = self.eos_token_ids or None
        self.served = self.use_vllm and config.vllm_mode == "server"
        if self.use_vllm:
            self.vllm_generation.seed_requests(config.seed, self.place_in_run)
        self.reward_funcs = [
            function if isinstance(function, torch.nn.Module) else guarded(function, config.reward_timeout)
            for function in self.reward_funcs  # type: ignore[has-type]
        ]
        self.set_sampling({} if self.use_vllm else self.generation_kwargs)
        self.mask_truncated_completions = config.mask_truncated_completions and not self._mask_truncated
        self._planner: StepPlanner | None = None  # of micro-batches; without one TRL's are taken as they are
        if config.uses_axes:
            self._set_up_axes(config)
        self._step_metrics, self._counts = (
            StepMetrics(),
            StepCounts(config.steps_per_generation, config.gradient_accumulation_steps, config.max_completion_length),
        )
        self._entropy_controller = EntropyController(
            config.entropy_target, config.entropy_coef_delta, config.entropy_coef_min, config.entropy_coef_max
        )
        self._step_tokens: tuple[int, list[StepTokens]] = (-1, [])  # of the latest step, by its number
        self._token_log: TokenLog | None = None
        self._curriculum: Curriculum | None = None
        if config.uninformative_keep_prob < 1 or config.dynamic_sampling_tries > 1:
            self._curriculum = Curriculum.of_dataset(self.train_dataset, config.uninformative_keep_prob, config.seed)
        self._rollout: Rollout  # the last scored completions, of training or of an evaluation
        self.last_rollout: list[dict[str, Any]] = []
        self._unscored_in_a_row = 0  # rollouts

    # The overrides, in the order in which an optimizer step calls them.

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer` does, unless there are fewer training problems than a rollout has."""
        if isinstance(self.train_dataset, Sized):
            self.args.check_problem_count(len(self.train_dataset))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Called `gradient_accumulation_steps` times per optimizer step.

        If the plan has fewer micro-batches, the first calls are no-ops; if it has more, the first computes several.
        """
        if self._planner is None:
            return super().training_step(model, inputs, num_items_in_batch)
        began = time.perf_counter()
        if not self.model.training:  # Trainer does it after the rollout, and each time, through all modules
            model.train()
        micro_batches = self._next_micro_batches(self._planner, inputs)
        loss = torch.zeros((), device=self.accelerator.device)
        for micro_batch in micro_batches[:-1]:
            with not_the_last(self.accelerator, model):  # Trainer's: TRL's would count another call
                loss = loss + super(GRPOTrainer, self).training_step(model, micro_batch, num_items_in_batch)
            micro_batch.finish()
        self._current_train_step_time += time.perf_counter() - began
        if not micro_batches:
            self._step += 1
            return loss
        loss = loss + super().training_step(model, micro_batches[-1], num_items_in_batch)
        micro_batches[-1].finish()
        return loss

    def _next_micro_batches(self, planner: StepPlanner, inputs: Inputs) -> list[MicroBatch]:
        before = self._buffered_inputs
        self._prepare_inputs(inputs)
        if self._buffered_inputs is not before or not planner.plans:
            planner.plan(self._buffered_inputs)
            self._store_old_log_probs(planner)
        if self._step % planner.accumulation == 0:
            rows = planner.accumulation * self.args.per_device_train_batch_size
            every_row = torch.arange(rows, device=self.accelerator.device)
            trained = (every_row < planner.rows_trained(self._step)).float()
            self._step_metrics.add({"step/rows_trained": trained}, every_row >= 0)
        return planner.micro_batches(self._step)

    @torch.no_grad()
    def _store_old_log_probs(self, planner: StepPlanner) -> None:
        """Compute the old log-probabilities of micro-batches that an off-policy step will train on."""
        if self._is_on_policy() or not self._defers_old_log_probs():
            return
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            planner.store_old(
                lambda batch: self._log_probs(self.model, batch)[0], several_epochs=self.num_iterations > 1
            )

    def _prepare_inputs(self, generation_batch: Inputs) -> Inputs:
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> TRLBatch:
        begins_a_step = self.model.training and self._step % self.args.gradient_accumulation_steps == 0
        with self.saving_last_step() if begins_a_step else contextlib.nullcontext():
            return self._roll_out(inputs)

    def _roll_out(self, inputs: list[dict[str, Any]]) -> TRLBatch:
        began, synced = time.perf_counter(), self._seconds_syncing()
        found = self._sample(inputs)
        if self.model.training and self.args.dynamic_sampling_tries > 1:
            found = self._sample_until_full(found, inputs, began)
        batch, rollout = found.batch, found.rollout
        batch["row"] = torch.arange(len(inputs), device=self.accelerator.device)  # survives TRL's shuffle
        if self.model.training:
            syncing = self._seconds_syncing() - synced
            self._metrics["train"]["sync_time"].append(syncing)  # read by scripts/plan_budget.py, with the next
            self._metrics["train"]["rollout_time"].append(time.perf_counter() - began - syncing)
            group = (rollout.offset + batch["row"]) // self.num_generations
            batch["group"] = numbers_of_sequences(batch["prompt_ids"], batch["prompt_mask"], group)
        if self._mask_truncated:
            batch["completion_mask"] = batch["completion_mask"] * rollout.finished[:, None]
            batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        if self.model.training and self._planner is not None:
            completions = batch["completion_ids"], batch["completion_mask"]
            batch["sequence"] = numbers_of_sequences(*completions, batch["group"])
        if self.args.uses_axes and self._generations > 1:  # an evaluation's single completion has TRL's advantage 0
            batch["advantages"] = as_wide_as(batch["completion_ids"], rollout.own(self._advantages(rollout)))
        elif self.model.training and rollout.reward.isinf().any() and self.accelerator.is_main_process:
            log.warning(
                "a reward is infinite; TRL's own advantages, used without a preset or an axis, may turn it to 0"
            )
        if self.model.training and batch["advantages"].ndim == 1:
            for row, advantage in zip(self.last_rollout, batch["advantages"].tolist(), strict=True):
                row["advantage"] = advantage
        if found.problems is not None and self.args.dynamic_sampling_tries == 1:
            self._update_curriculum(found.problems, self._informative(batch))
        return batch

    def _sample(self, inputs: list[dict[str, Any]], attempt: int = 0) -> Try:
        """Completions of these rows, or of the problems that the curriculum selects in their place, with rewards."""
        problems = None
        if self._curriculum is not None and self.model.training:
            rollout = self._step // (
                self.args.steps_per_generation * self.num_iterations
            )  # micro-steps depend on ranks
            first_row = self.accelerator.process_index * len(inputs)
            prompts = [row["prompt"] for row in inputs]
            problems = self._curriculum.select(prompts, first_row, self.num_generations, rollout, attempt)
            inputs = [self.train_dataset[problem] for problem in problems]
        with contextlib.ExitStack() as left_out:
            if self._defers_old_log_probs():
                left_out.enter_context(old_log_probs_left_out(self, self._is_on_policy()))
            if not self.log_completions:
                left_out.enter_context(texts_left_on_ranks(self))
            batch: TRLBatch = super()._generate_and_score_completions(inputs)
        return Try(batch, self._rollout, self.last_rollout, problems)

    def _sample_until_full(self, first: Try, inputs: list[dict[str, Any]], began: float) -> Try:
        """The rollout with other problems in place of uninformative ones, as far as tries and time allow."""

        def judge(found: Try) -> list[bool]:
            informative: list[bool] = self._kept(found.rollout).any(dim=1).tolist()
            assert found.problems is not None
            self._update_curriculum(found.problems, informative)
            return informative

        def may_retry(tries: int) -> bool:
            """Whether a time budget leaves twice what one of this rollout's tries took; collective with a budget."""
            budgets = [callback for callback in self.callback_handler.callbacks if isinstance(callback, TimeBudget)]
            ahead = 2 * (time.perf_counter() - began) / tries
            return tries < self.args.dynamic_sampling_tries and not any(budget.is_spent(ahead) for budget in budgets)

        ranks = self.num_generations, self.accelerator.gather, gather_object
        found, metrics = sample_until_full(first, lambda n: self._sample(inputs, attempt=n), judge, may_retry, *ranks)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._rollout, self.last_rollout = found.rollout, found.rows
        return found

    def _kept(self, rollout: Rollout) -> Tensor:
        """(P, G) bool: the completions of all ranks that are trained on."""
        assert self._select is not None
        return rollout.kept(self._select, self.num_generations, self.accelerator.gather)

    def _advantages(self, rollout: Rollout) -> Tensor:
        """(N,) or (N, T) advantages of all ranks; TRL's table of completions gets their means over tokens."""
        left_out = None
        if self.model.training and self._select is not None:
            left_out = ~self._kept(rollout) & ~rollout.reward.view(-1, self._generations).isinf()
            self._metrics["train"]["rollout_selection/kept_frac"].append(1 - left_out.sum().item() / left_out.numel())
        weights = self.reward_weights.to(rollout.reward.device)
        advantages = rollout.advantages(
            self._advantage_fn, weights, self._generations, self.accelerator.gather, left_out
        )
        of_completions = advantages if advantages.ndim == 1 else advantages.mean(dim=1)
        table = self._logs["advantages"]  # TRL has appended its own
        for _ in range(min(len(advantages), len(table))):
            table.pop()
        table.extend(of_completions.tolist())
        if self.model.training:
            by_name = dict(zip(self.reward_func_names, rollout.rewards.unbind(1), strict=True))
            self._nonfinite = describe_nonfinite(of_completions, self.args.advantage, by_name)
        return advantages

    def _update_curriculum(self, problems: list[int], informative: list[bool]) -> None:
        """Tell the curriculum which groups of all ranks were informative, given the problems of this rank's rows."""
        assert self._curriculum is not None
        numbers = self.accelerator.gather(torch.tensor(problems, device=self.accelerator.device))
        self._curriculum.update(numbers[:: self.num_generations].tolist(), informative)
        self._metrics["train"]["curriculum/settled_problems"].append(float(len(self._curriculum.uninformative)))

    def _informative(self, batch: TRLBatch) -> list[bool]:
        """For each group of all ranks, whether a row of it has a gradient."""
        reward = self._rollout.reward.view(-1, self.num_generations)  # (P, G) of all ranks
        if not self._ignores_zero_advantage_rows():
            return [True] * len(reward)
        found = rewards_differ(reward)
        if self.args.uses_axes:
            rows = torch.tensor(Rows.of_trl(batch).has_gradient(), device=self.accelerator.device)
            found = self.accelerator.gather(rows).view(reward.shape).any(dim=1)
        informative: list[bool] = found.tolist()
        return informative

    def _ignores_zero_advantage_rows(self) -> bool:
        """Whether rows with advantage 0 have no gradient."""
        return self._objective.ignores_zero_advantage_rows() if self.args.uses_axes else self.beta == 0

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, completion_ids, tool_mask, completions, *others = super()._generate(prompts)
        is_stock = not (self.args.uses_axes or self.args.stop)
        completions = with_special_tokens(
            completions, completion_ids, self._tokenizer, self.eos_token_ids, tags_only=is_stock
        )
        return prompt_ids, completion_ids, tool_mask, completions, *others

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, *others = super()._tokenize_prompts(prompts)
        if isinstance(prompts[0], str):
            prompt_ids = to_be_continued(self._tokenizer, prompts, prompt_ids)
        return prompt_ids, *others

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: object, **kwargs: object
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        with reporting(f"rollout after step {self.state.global_step}", len(prompt_ids), self.max_completion_length):
            if self.use_vllm:
                ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                self.sampled_logps = logps
                return ids, logps
            if self.args.stop:
                return self._hf_completion_ids(prompt_ids), None  # TRL takes log-probabilities of engines only
            recorder = TokenLogProbs(len(prompt_ids), self.temperature or 1.0)
            counted = CountedTokens(self.generation_config)
            model = self.accelerator.unwrap_model(self.model)
            with generating_with(model, recorder, counted, recorder.record), sampling():
                ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            advance(0, finished=len(ids))
            self._keep_logps(ids, recorder)
            return ids, None

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        device, metrics = self.accelerator.device, self._mode_metrics
        finished = self._is_finished(completion_ids_list).to(device)
        lengths = torch.tensor([len(ids) for ids in completion_ids_list], dtype=torch.float32, device=device)
        score = functools.partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        unscored = torch.zeros(len(prompts), len(self.reward_funcs), device=device)
        rewards = score_on_all_ranks(score, self._fault_of_nan, unscored)
        reward = total_reward(rewards, self.reward_weights.to(device))
        offset = self.accelerator.process_index * len(prompts)
        entropies = entropy_estimates(completion_ids_list, self.sampled_logps)
        self.sampled_logps = None  # a rollout of somebody else's function would find this one's
        rows = log_rows(inputs, prompts, completions, completion_ids_list, entropies)
        columns = distinct_columns(self._guards, rows[0], self.reward_func_names)
        correct = correct_by_row(self._guards, reward[offset : offset + len(prompts)])
        self._rollout = Rollout(rewards, reward, finished, lengths, correct, offset)
        self._pending_extra_logs.clear()
        if self.log_completions:  # TRL gathers them, for its table
            self._pending_extra_logs.update(columns)
        self._rollout.complete(rows, columns, self.reward_func_names)
        if self.model.training:  # an evaluation may come between two steps on one rollout
            self.last_rollout = rows
        entropy = torch.tensor([math.nan if e is None else e for e in entropies], device=device)
        truncation, sampled = sample_metrics(lengths, finished, correct, entropy, self.accelerator.gather)
        for name, value in truncation.items() if self.args.stop else ():
            metrics[name][-1] = value  # TRL has counted completions that ended at a stop string as truncated
        for name, value in sampled.items():
            metrics[name].append(value)
        return rewards

    def _fault_of_nan(self, rewards: Tensor) -> RewardError | None:
        """An error at once in the first rollout, then after `max_nonfinite_steps` rollouts in a row without rewards."""
        if not self.model.training:
            return None
        self._unscored_in_a_row = self._unscored_in_a_row + 1 if rewards.isnan().all() else 0
        tolerated = self.args.max_nonfinite_steps if self.state.global_step else 1
        return fault_of_nan(self._guards, len(rewards), self._unscored_in_a_row, tolerated)

    @property
    def _guards(self) -> list[Guard]:  # reward models have none
        return [function.guard for function in self.reward_funcs if hasattr(function, "guard")]

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch | TRLBatch) -> Tensor:
        if not self.args.uses_axes:
            return super()._compute_loss(model, inputs)
        batch = inputs if isinstance(inputs, MicroBatch) else MicroBatch.of_trl(inputs)
        rows, mask = batch.rows, batch.rows.trained
        step = self._tokens_of_step(model, batch)  # first: its passes take the shared prompts that ours continues on
        logp, entropy, aux_loss = self._log_probs(model, batch)
        old_logp = logp.detach() if rows.old_logp is None else rows.old_logp
        x = LossInputs(logp, old_logp, rows.advantages, mask)
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 0
        totals = self._counts.step_totals(self.accelerator, rows, self._step, accumulation, self._buffered_inputs)
        high_entropy = None
        if self.top_entropy_quantile < 1:
            high_entropy = self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
        loss, metrics = self._objective(
            x,
            totals,
            ref_logp=rows.ref_logp,
            sampler_weight=self._sampler_weight(rows, old_logp),
            sampled_logp=rows.sampled_logp,
            entropy=entropy.detach(),
            group=rows.group,
            step=step,
            policy_mask=high_entropy,
        )
        if self.model.training and rows.row is not None:
            for row, value in zip(rows.row.tolist(), masked_mean(entropy, mask, dim=1).tolist(), strict=True):
                self.last_rollout[row]["token_entropy"] = value
            if self._token_log is not None:
                ids, sampled = rows.completion_ids, rows.sampled_logp
                self._token_log.keep(self.state.global_step, rows.row, ids, x, sampled, entropy)
        self._step_metrics.add({"entropy": entropy, **metrics}, mask)
        is_counted = accumulation and self._counts.is_exact
        self._log_step_metrics(dict.fromkeys(metrics.keys() - _OF_COMPUTED, totals.tokens) if is_counted else {})
        # Trainer and DDP average over ranks, while our totals already count all of them.
        loss = loss * self.accelerator.num_processes
        return loss + self._terms_of_a_micro_batch(aux_loss, entropy, mask if high_entropy is None else high_entropy)

    def _log_probs(self, model: nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, T) log-probabilities and entropies of the completions, and the auxiliary loss of a mixture of experts."""
        if batch.by is not None:
            with self.accelerator.autocast():
                return *batch.log_probs(model, self._bare_model), None
        rows = batch.rows
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([rows.prompt_ids, rows.completion_ids], dim=1),
            torch.cat([rows.prompt_mask, rows.completion_mask], dim=1),
            rows.completion_ids.shape[1],
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **rows.images,
        )

    def _tokens_of_step(self, model: nn.Module, batch: MicroBatch) -> StepTokens | None:
        """The tokens of the optimizer step if the policy loss asks for them, from a forward pass at its start."""
        if "step" not in self.args.inputs_of_loss:
            return None
        if not self.model.training:
            return tokens_of_step([batch], lambda one: self._log_probs(model, one)[0], self.accelerator)[0]
        step, place = divmod(self._step, self.args.gradient_accumulation_steps)
        if self._planner is not None:
            batches = self._planner.of_step(self._step)
            place = next(number for number, one in enumerate(batches) if one is batch)
        if self._step_tokens[0] != step:
            if self._planner is None:
                first = (self._step - place) % self.args.steps_per_generation
                slices = self._buffered_inputs[first : first + self.args.gradient_accumulation_steps]
                batches = [MicroBatch.of_trl(one) for one in slices]
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                found = tokens_of_step(batches, lambda one: self._log_probs(model, one)[0], self.accelerator)
            self._step_tokens = step, found
        return self._step_tokens[1][place]

    def _terms_of_a_micro_batch(self, aux_loss: Tensor | None, entropy: Tensor, trained: Tensor) -> Tensor | float:
        """The routers' auxiliary loss and the entropy bonus, which TRL averages over its micro-batch."""
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1
        terms: Tensor | float = 0.0
        if aux_loss is not None:
            terms = self.router_aux_loss_coef * aux_loss / accumulation
            logged = self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item()
            self._mode_metrics["aux_loss"].append(logged)
        if self.entropy_coef or self.use_adaptive_entropy:
            bonus = masked_sum(entropy, trained) / trained.sum().clamp(min=1)
            is_on = not self.use_adaptive_entropy or self._last_world_entropy <= self.args.entropy_target
            terms = terms - self.entropy_coef * is_on * bonus / accumulation
            if self.use_adaptive_entropy and self.model.training:
                self._entropy_controller.add(entropy, trained)
                if self.accelerator.sync_gradients:
                    found = self._entropy_controller.finish(self.entropy_coef, self.accelerator.reduce)
                    self.entropy_coef, self._last_world_entropy = found
                    self._mode_metrics["entropy_coef"].append(self.entropy_coef)
        return terms

    def _sampler_weight(self, rows: Rows, old_logp: Tensor) -> Tensor | None:
        """(B, 1) or (B, T) weights that correct for the engine's mismatch with the trainer, or None."""
        if self._sampler_correction is None:
            return None
        sampled, mask = rows.sampled_logp, rows.trained
        assert sampled is not None
        weight = self._sampler_correction(old_logp, sampled, mask)
        if self._defers_old_log_probs():  # else TRL has logged it
            self._step_metrics.add_logp_difference(old_logp, sampled, mask)
        self._step_metrics.add_mismatch(old_logp, sampled, mask, weight.expand_as(mask), self.max_completion_length)
        return weight

    def _log_step_metrics(self, counts: dict[str, float]) -> None:
        """Log the step's metrics at the end of an optimizer step, and after every batch of an evaluation."""
        if self.model.training and not self.accelerator.sync_gradients:
            return
        for name, value in self._step_metrics.finish(self.accelerator, counts).items():
            self._mode_metrics[name].append(value)

    # How this run trains.

    def _set_up_axes(self, config: ExtGRPOConfig) -> None:
        self._advantage_fn, self._objective = config.advantage_fn(), config.objective()
        self._select = config.selection_fn()
        self._sampler_correction = config.sampler_correction()
        self.vllm_importance_sampling_mode = GRPOConfig.vllm_importance_sampling_mode  # of ratios that nobody reads
        self._warn_of_settings(config)
        model, keeps_rows = self.accelerator.unwrap_model(self.model), not self._ignores_zero_advantage_rows()
        facts = {"aux_loss": self.aux_loss_enabled, "images": self._is_vlm, "fsdp": self.is_fsdp_enabled}
        facts["one_process"] = self.accelerator.distributed_type == DistributedType.NO
        batching, off = savings(config, model, keeps_rows, **facts)
        self._warn(off)
        if batching is not None:
            steps = config.gradient_accumulation_steps, config.steps_per_generation
            self._planner = StepPlanner(batching, *steps, self.accelerator)
            # Kept, since accelerate looks for installed packages, in files, whenever it is asked.
            self._bare_model = model.get_base_model() if is_peft_model(model) else model

    def _warn_of_settings(self, config: ExtGRPOConfig) -> None:
        self._warn(chosen_without_effect(config))

    def _warn(self, lines: list[str]) -> None:
        for line in lines if self.accelerator.is_main_process else ():
            log.warning("%s", line)

    def _defers_old_log_probs(self) -> bool:
        """Whether our own passes compute the old log-probabilities: the loss's on-policy, the plan's off-policy."""
        if not (self.args.uses_axes and self.args.reuse_log_probs):
            return False
        if self._is_on_policy():
            return True
        # The reference of an adapter is the same model, so TRL's calls for it cannot be told from the policy's.
        is_distinct = self.beta == 0 or self.ref_model is not None
        return is_distinct and (self._planner is not None or not self.model.training)

    def _is_on_policy(self) -> bool:
        """Whether every rollout is used up in one optimizer step, so that old and current policy are the same."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    @property
    def _generations(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _seconds_syncing(self) -> float:
        return float(getattr(self.vllm_generation, "seconds_syncing", 0.0)) if self.use_vllm else 0.0

    # State for resuming, reports of a step, and sampling outside of rollouts.

    def resume_state(self) -> dict[str, Any]:
        """The curriculum, metrics not yet logged, and the rollout while steps on it are left."""
        state = super().resume_state() | {name: to_plain(getattr(self, name)) for name in _RESUMED}
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state_dict()
        micro_steps = self.args.steps_per_generation * self.num_iterations
        state["steps_per_rollout"] = -(-micro_steps // self.args.gradient_accumulation_steps)
        if self._step % micro_steps:
            state |= {"rollout": self._buffered_inputs, "old_log_probs": []}
            if self._planner is not None:
                state |= self._planner.state_dict()
        return state

    def load_resume_state(self, state: dict[str, Any] | None) -> None:
        """Resume within a rollout; from a checkpoint of stock TRL (None), with a new rollout at the same position."""
        super().load_resume_state(state)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if state is None:
            return
        for name in (name for name in _RESUMED if name in state):  # earlier versions kept fewer of these
            setattr(self, name, from_plain(getattr(self, name), state[name]))
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.load_state_dict(state["curriculum"])
        rows, slices = self.args.per_device_train_batch_size, self.args.steps_per_generation
        rollout = restored_rollout(state.get("rollout", ()), rows, slices, self.accelerator.device)
        if rollout and self._planner is not None:
            self._planner.plan(rollout)
            if all(gather_object([self._planner.fits(state)])):
                self._planner.load_state_dict(state, self.accelerator.device)
            else:
                rollout = []
                self._warn(["the checkpoint's steps were planned otherwise: the remaining ones use a new rollout"])
        self._buffered_inputs = rollout or self._buffered_inputs

    def log_tokens(self) -> Callable[[int], dict[str, Any]]:
        """Keep every step's values per token until the next step; returns what tells a row's, by its number."""
        self._token_log = TokenLog(self._tokenizer.decode)
        return self._token_log.of_row

    def completion_ids(self, prompts: list[str]) -> list[list[int]]:
        """One completion per prompt, generated as in a rollout."""
        prompt_ids, images, fields = self._tokenize_prompts(prompts)
        return self._generate_single_turn(prompt_ids, images, fields, 1)[0]
