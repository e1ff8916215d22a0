"""The seam to TRL: every override of `GRPOTrainer`, in the order in which an optimizer step calls them.

    Trainer.train -> ExtGRPOTrainer.train             refuses fewer problems than a rollout has
      Trainer._run_epoch                              checkpoints, SIGTERM, finite steps: training/trainer.py
        get_batch_samples      ours, HF's             the step's batches, and a look at the next rollout's
        training_step          ours, TRL's, HF's      a micro-batch of the step's plan (StepPlanner)
          _prepare_inputs      ours, TRL's            every few steps a rollout; passes a planned micro-batch through
            _generate_and_score_completions  ours, TRL's   problems (Curriculum), then ours: masks and advantages
              _generate        ours, TRL's            completions as texts, with special tokens that are text
                _tokenize_prompts  ours, TRL's        prompts without a second BOS
                _generate_single_turn  ours, TRL's    HF generate with stop strings
                _tool_call_loop  ours or TRL's    turns of the policy and of its tools
              _calculate_rewards  ours, TRL's         rewards checked on all ranks: the Rollout, rows for the log
          _compute_loss        ours                   LossInputs and StepTotals to the Objective

Without a preset or an axis, TRL's advantages and loss are used. TRL 1.16 has no public hook for any of it.
`tests/grpo/test_seam.py` holds the signatures and this order.

Letters: P prompts, G completions per prompt, N = P*G, B rows of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from trl_ext.compat import lazy_vllm as _lazy_vllm  # noqa: F401

# isort: split
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from trl_ext.compat.trl_scoring import only_what_is_used
from trl_ext.generation.hf import recorded
from trl_ext.generation.progress import reporting
from trl_ext.generation.tokens import to_be_continued
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.grpo.construction import RolloutTools, config_of, constructing
from trl_ext.grpo.ineffective_settings import chosen_ineffective_settings
from trl_ext.grpo.problem_sampler import ProblemSampler
from trl_ext.grpo.rewards import describe_nonfinite, distinct_columns, fault_of_nan, guards_of, score_on_all_ranks
from trl_ext.grpo.rollout import (
    Rollout,
    SampledBatch,
    add_numbers,
    log_rows,
    note,
    note_entropies,
    replace_last,
    sample_metrics,
    with_special_tokens,
)
from trl_ext.grpo.rollout_ahead import RolloutsAhead
from trl_ext.grpo.savings import savings
from trl_ext.grpo.step_loss import Call, StepLoss
from trl_ext.runs.token_log import TokenLog
from trl_ext.step import (
    MicroBatch,
    StepPlanner,
    TRLBatch,
    advantages_of,
    loss_mask,
    not_the_last,
    resumed_rollout,
)
from trl_ext.training.trainer import ReliableTrainer

if TYPE_CHECKING:
    from transformers.trainer_utils import TrainOutput

Inputs = MicroBatch | TRLBatch | list[dict[str, Any]]  # planned, TRL's, or rows of the dataset

log = logging.getLogger(__name__)


class ExtGRPOTrainer(ReliableTrainer, GRPOTrainer):
    """`GRPOTrainer` with the advantage, the policy loss, the aggregation and the KL estimator of the config.

    With neither a preset nor an axis in the config it trains exactly as TRL does.
    """

    resumed = (
        "_logs", "_current_train_step_time", "_last_world_entropy", "entropy_coef", "last_rollout",
        "_unscored_in_a_row", "_nonfinite",
    )  # fmt: skip
    args: ExtGRPOConfig
    _logs: dict[str, Any]
    _buffered_inputs: list[TRLBatch]
    _last_world_entropy: float
    entropy_coef: float
    eos_token_ids: list[int]
    policy_tools: RolloutTools | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = config_of(args, kwargs)
        # TRL counts a completion that ended at a stop string as truncated; with `stop` we mask truncated ones.
        self._mask_truncated = bool(config.stop) and config.mask_truncated_completions
        with constructing(self, config, args, kwargs) as given:
            super().__init__(**given)
        self.served = self.use_vllm and config.vllm_mode == "server"
        if self.use_vllm:
            self.vllm_generation.seed_requests(config.seed, self.place_in_run)
        self.set_sampling({} if self.use_vllm else self.generation_kwargs)
        self.mask_truncated_completions = config.mask_truncated_completions and not self._mask_truncated
        self._planner: StepPlanner | None = None  # of micro-batches; without one TRL's are taken as they are
        self._loss: StepLoss | None = None  # by the axes; without one TRL's
        if config.uses_axes:
            self._set_up_axes(config)
        self._token_log: TokenLog | None = None
        ignores_zero = self._ignores_zero_advantage_rows()
        self._problems = ProblemSampler(config, self.train_dataset, self.accelerator, ignores_zero, self._log_training)
        self._rewarded: tuple[Rollout, list[dict[str, Any]]] | None = None  # between two overrides
        self.last_rollout: list[dict[str, Any]] = []
        self.ahead = RolloutsAhead(self, config, self._problems)
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

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of an optimizer step."""
        return super().get_batch_samples(self.ahead.watched(epoch_iterator), num_batches, device)

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
        assert self._loss is not None
        before = self._buffered_inputs
        with self.saving_last_step() if self._loss.asks_server else contextlib.nullcontext():
            self._prepare_inputs(inputs)  # fills `_buffered_inputs` where a rollout is due
            if self._buffered_inputs is not before or not planner.plans:
                planner.plan(self._buffered_inputs)
                if self._defers_old_log_probs() and not (self._is_on_policy() or self._loss.of_sampler):
                    log_probs = functools.partial(self._loss.forward.log_probs, self.model)
                    planner.store_old(log_probs, self.num_iterations > 1)
            seconds = planner.ask_teachers(self._loss.taught)  # a resumed rollout's, too
        if self._loss.teachers is not None and self._step % planner.accumulation == 0:
            self._log_training("teacher_time", seconds)
        if self._step % planner.accumulation == 0:
            rows = planner.accumulation * self.args.per_device_train_batch_size
            self._loss.add_rows_trained(planner.rows_trained(self._step), rows)
        return planner.micro_batches(self._step)

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
        sampled = self._sample(inputs)
        if self.model.training and self.args.dynamic_sampling_tries > 1:
            retry = functools.partial(self._sample, inputs)
            sampled = self._problems.resampled(sampled, retry, began, self.callback_handler.callbacks)
        batch, rollout = sampled.batch, sampled.rollout
        if self.model.training:
            syncing = self._seconds_syncing() - synced
            self._metrics["train"]["sync_time"].append(syncing)  # read by scripts/plan_budget.py, with the next
            self._metrics["train"]["rollout_time"].append(time.perf_counter() - began - syncing)
        if self._mask_truncated:
            batch["completion_mask"] = batch["completion_mask"] * rollout.finished[:, None]
            batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        group_size = self.num_generations if self.model.training else None
        add_numbers(batch, rollout.offset, group_size, sequences=self._planner is not None)
        if self.args.uses_axes and self._generations > 1:  # an evaluation's single completion has TRL's advantage 0
            batch["advantages"] = advantages_of(batch, rollout.own(self._advantages(rollout)))
        elif self.model.training and rollout.reward.isinf().any():
            self._warn(["a reward is infinite; TRL's own advantages, without a preset or an axis, may turn it to 0"])
        if self.model.training and batch["advantages"].ndim == 1:
            note(sampled.rows, "advantage", batch["advantages"])
        if self.model.training:  # an evaluation may come between two steps on one rollout
            self.last_rollout = sampled.rows
            self._problems.learn(sampled)
            self.ahead.finish(sampled.rows)
        return batch

    def _sample(self, inputs: list[dict[str, Any]], attempt: int = 0) -> SampledBatch:
        """Completions of these rows, or of the problems that the curriculum selects in their place, with rewards."""
        problems = None
        if self.model.training:
            inputs, problems = self._problems.selected(inputs, self._step, attempt)
        if self.policy_tools is not None:
            self.policy_tools.rows = inputs
        with only_what_is_used(self, self._is_on_policy() if self._defers_old_log_probs() else None):
            batch: TRLBatch = super()._generate_and_score_completions(inputs)
        assert self._rewarded is not None
        (rollout, rows), self._rewarded = self._rewarded, None
        if self._loss is not None and self._loss.teachers is not None:
            batch |= self._loss.teachers.of_rollout(inputs, rollout.correct)
        return SampledBatch(batch, rollout, rows, problems)

    def _advantages(self, rollout: Rollout) -> Tensor:
        """(N,) or (N, T) advantages of all ranks; TRL's table of completions gets their means over tokens."""
        left_out = self._problems.left_out(rollout) if self.model.training else None
        weights = self.reward_weights.to(rollout.reward.device)
        advantages = rollout.advantages(
            self._advantage_fn, weights, self._generations, self.accelerator.gather, left_out
        )
        of_completions = advantages if advantages.ndim == 1 else advantages.mean(dim=1)
        replace_last(self._logs["advantages"], of_completions.tolist())  # TRL has appended its own
        if self.model.training:
            by_name = zip(self.reward_func_names, rollout.rewards.unbind(1), strict=True)
            self._nonfinite = describe_nonfinite(of_completions, self.args.advantage, dict(by_name))
        return advantages

    def _ignores_zero_advantage_rows(self) -> bool:
        """Whether rows with advantage 0 have no gradient."""
        return self._loss.objective.ignores_zero_advantage_rows() if self._loss else self.beta == 0

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, completion_ids, tool_mask, completions, *others = super()._generate(prompts)
        if self.policy_tools is None:
            is_stock = not (self.args.uses_axes or self.args.stop)
            special = self._tokenizer, self.eos_token_ids
            completions = with_special_tokens(completions, completion_ids, *special, tags_only=is_stock)
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
                now = functools.partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
                ids, logps = self.ahead.roll_out(prompt_ids, now)
                self.generated_logps = logps
                return ids, logps
            if self.args.stop:
                return self._hf_completion_ids(prompt_ids), None  # TRL takes log-probabilities of engines only
            model = self.accelerator.unwrap_model(self.model)
            with recorded(model, self.generation_config, len(prompt_ids), self.temperature or 1.0) as recorder:
                ids, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self._keep_logps(ids, recorder)
            return ids, None

    def _tool_call_loop(
        self, prompts: object, prompt_ids: list[list[int]], completion_ids: list[list[int]], completions: object,
        logprobs: list[list[float | None]] | None, images: object, multimodal_fields: object,
    ) -> tuple[Any, ...]:  # fmt: skip
        if self.policy_tools is not None:
            return self.policy_tools.loop(prompt_ids, completion_ids, logprobs)
        loop: Callable[..., tuple[Any, ...]] = super()._tool_call_loop
        return loop(prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields)

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        device, metrics = self.accelerator.device, self._mode_metrics
        finished = self._is_finished(completion_ids_list).to(device)
        completion_ids_list = self.own_tokens(completion_ids_list)
        lengths = torch.tensor([len(ids) for ids in completion_ids_list], dtype=torch.float32, device=device)
        score = functools.partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)
        unscored = torch.zeros(len(prompts), len(self.reward_funcs), device=device)
        rewards = score_on_all_ranks(score, self._fault_of_nan, unscored)
        weights, rank = self.reward_weights.to(device), self.accelerator.process_index
        turns = None if self.policy_tools is None else self.policy_tools.turns(device)
        rollout = Rollout.scored(rewards, weights, guards_of(self.reward_funcs), finished, lengths, rank, turns)
        rows = log_rows(inputs, prompts, completions, completion_ids_list, self.generated_logps)
        self.generated_logps = None  # a rollout of somebody else's function would find this one's
        columns = distinct_columns(guards_of(self.reward_funcs), rows[0], self.reward_func_names)
        self._pending_extra_logs.clear()
        if self.log_completions:  # TRL gathers them, for its table
            self._pending_extra_logs.update(columns)
        rollout.complete(rows, columns, self.reward_func_names)
        self.ahead.note_versions(rows)
        self._rewarded = rollout, rows
        truncation, sampled = sample_metrics(rollout, rows, self.accelerator.gather)
        for name, value in truncation.items() if self.args.stop else ():
            metrics[name][-1] = value  # TRL has counted completions that ended at a stop string as truncated
        if self.policy_tools is not None:
            self.policy_tools.complete(rows)
            sampled |= self.policy_tools.metrics(rollout, self.accelerator.gather)
        for name, value in sampled.items():
            metrics[name].append(value)
        return rewards

    def _fault_of_nan(self, rewards: Tensor) -> Exception | None:
        """An error at once in the first rollout, then after `max_nonfinite_steps` rollouts in a row without rewards."""
        if not self.model.training:
            return None
        self._unscored_in_a_row = self._unscored_in_a_row + 1 if rewards.isnan().all() else 0
        tolerated = self.args.max_nonfinite_steps if self.state.global_step else 1
        return fault_of_nan(guards_of(self.reward_funcs), len(rewards), self._unscored_in_a_row, tolerated)

    def _compute_loss(self, model: nn.Module, inputs: MicroBatch | TRLBatch) -> Tensor:
        if self._loss is None:
            return super()._compute_loss(model, inputs)
        (batch,) = self._loss.taught([inputs if isinstance(inputs, MicroBatch) else MicroBatch.of_trl(inputs)])
        rows = batch.rows
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 0
        call = Call(self._step, accumulation, self._buffered_inputs)
        # First: its passes take the shared prompts that ours continues on.
        planned = self._planner.of_step(self._step) if self._planner is not None and call.trains else None
        step = self._loss.tokens_of(batch, planned, call, functools.partial(self._loss.forward.log_probs, model))
        logp, entropy, aux_loss, student = self._loss.forward(model, batch, self._loss.needs_student)
        high_entropy = None
        if self.top_entropy_quantile < 1:
            high_entropy = self.get_high_entropy_mask(entropy, rows.trained, 1 - self.top_entropy_quantile)
        loss, x = self._loss(batch, logp, entropy, call, step, high_entropy, student)
        if self.model.training and rows.row is not None:
            note_entropies(self.last_rollout, rows, entropy)
            if self._token_log is not None:
                ids, sampled = rows.completion_ids, rows.sampled_logp
                self._token_log.keep(self.state.global_step, rows.row, ids, x, sampled, entropy, rows.teachers_mean())
        policy_mask = rows.trained if high_entropy is None else high_entropy
        coefficient = self.entropy_coef, self._last_world_entropy
        terms, coefficient, logged = self._loss.terms(aux_loss, entropy, policy_mask, call, coefficient)
        self.entropy_coef, self._last_world_entropy = coefficient
        if not self.model.training or self.accelerator.sync_gradients:  # the end of a step, or of an evaluation's batch
            logged |= self._loss.finish()
        for name, value in logged.items():
            self._mode_metrics[name].append(value)
        return loss + terms

    # How this run trains.

    def _set_up_axes(self, config: ExtGRPOConfig) -> None:
        self._advantage_fn = config.advantage_fn()
        self._loss = StepLoss.of(self, config, self._defers_old_log_probs, self.router_aux_loss_coef)
        self.vllm_importance_sampling_mode = GRPOConfig.vllm_importance_sampling_mode  # of ratios that nobody reads
        self._warn_of_settings(config)
        keeps_rows = not self._ignores_zero_advantage_rows()
        facts = {"aux_loss": self.aux_loss_enabled, "images": self._is_vlm, "fsdp": self.is_fsdp_enabled}
        facts["one_process"] = self.accelerator.distributed_type == DistributedType.NO
        batching, off = savings(config, self.accelerator.unwrap_model(self.model), keeps_rows, **facts)
        self._warn(off)
        if batching is not None:
            steps = config.gradient_accumulation_steps, config.steps_per_generation
            self._planner = StepPlanner(batching, *steps, self.accelerator)

    def _warn_of_settings(self, config: ExtGRPOConfig) -> None:
        self._warn(chosen_ineffective_settings(config))

    def _warn(self, lines: list[str]) -> None:
        for line in lines if self.accelerator.is_main_process else ():
            log.warning("%s", line)

    def _defers_old_log_probs(self) -> bool:
        """Whether TRL has none to compute: the loss's pass does on-policy, the plan's off-policy, the sampler has."""
        of_sampler = self.args.old_log_probs == "sampler"
        if not (self.args.uses_axes and (self.args.reuse_log_probs or of_sampler)):
            return False
        if self._is_on_policy():
            return True
        # The reference of an adapter is the same model, so TRL's calls for it cannot be told from the policy's.
        is_distinct = self.beta == 0 or self.ref_model is not None
        return is_distinct and (of_sampler or self._planner is not None or not self.model.training)

    def _is_on_policy(self) -> bool:
        """Whether every rollout is used up in one step: before the step is the current pass, whoever has sampled."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _log_training(self, name: str, value: float) -> None:
        self._metrics["train"][name].append(value)

    @property
    def _generations(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _seconds_syncing(self) -> float:
        return float(getattr(self.vllm_generation, "seconds_syncing", 0.0)) if self.use_vllm else 0.0

    # State for resuming, reports of a step, and sampling outside of rollouts.

    def resume_state(self) -> dict[str, Any]:
        """The curriculum, metrics not yet logged, and the rollout while steps on it are left."""
        state = super().resume_state() | self._problems.state_dict() | self.ahead.state_dict()
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
        self._problems.load_state_dict(state)
        self.ahead.load_state_dict(state)
        rows, slices = self.args.per_device_train_batch_size, self.args.steps_per_generation
        buffered = resumed_rollout(state, rows, slices, self._planner, self.accelerator.device)
        self._buffered_inputs = buffered or self._buffered_inputs

    def log_tokens(self) -> Callable[[int], dict[str, Any]]:
        """Keep every step's values per token until the next step; returns what tells a row's, by its number."""
        self._token_log = TokenLog(self._tokenizer.decode)
        return self._token_log.of_row

    def turn_ids(self, prompts: list[list[int]]) -> list[list[int]]:
        """One completion per prompt, generated as in a rollout, up to a call of a tool."""
        return self._generate_single_turn(prompts, None, {}, 1)[0]
