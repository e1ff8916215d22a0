"""What happens to every setting next to a preset or an axis, an entry for each.

Without either, training is TRL's and so are its settings. `docs/reference/trl_settings.md` is written from this table
by `python scripts/docs_pages.py`; `tests/training/test_settings_table.py` holds every entry to what happens.
"""

from __future__ import annotations

from trl_ext.training.trl_settings import HONORED, NO_EFFECT, REFUSED, TAKEN_OVER, Entry, rows

_RUN = Entry(HONORED)  # shown by a run with it and one without
_GPU = Entry(HONORED, shown="needs a GPU")
_WAIT = Entry(HONORED, "also on CPU ranks", shown="hosts/test_two_hosts::test_lost_host_ends_the_run_in_a_line")
_RANKS = Entry(HONORED, shown="needs several ranks")
_MEMORY = Entry(HONORED, shown="changes memory or speed, not numbers")
_ENGINE = Entry(HONORED, shown="training/test_settings_table::test_the_engine_is_started_with_the_settings")
_MISMATCH = Entry(HONORED, shown="grpo/test_trainer::test_the_samplers_mismatch_is_corrected_as_in_trl")
_SERVER = Entry(HONORED, shown="needs vLLM's server")
_HUB = Entry(HONORED, shown="needs the Hub; `tests/hub/test_push.py` has a server that stands in")
_EVALUATION = Entry(
    HONORED,
    "of the trainer's own evaluation; a recipe validates with `validate_every`",
    shown="an evaluation of the trainer is HF's, nothing of it is overridden",
)
_LOADED = Entry(HONORED, shown="training/test_settings_table::test_model_settings_and_model_init_kwargs_go_together")
_NO_LABELS = Entry(NO_EFFECT, "GRPO computes its own loss, without labels, and returns no logits, in TRL too")

# `TrainingArguments`.
TRAINER: dict[str, Entry] = {
    **rows(
        "per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs "
        "warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps "
        "max_grad_norm bf16 neftune_noise_alpha logging_strategy logging_steps logging_first_step save_strategy "
        "save_steps save_only_model save_total_limit seed eval_strategy eval_steps eval_delay eval_on_start "
        "per_device_eval_batch_size",
        _RUN,
    ),
    "optim_target_modules": Entry(HONORED, shown="only the GaLore, APOLLO and LOMO optimizers read it; not installed"),
    **rows("fp16 fp16_full_eval tf32 use_liger_kernel liger_kernel_config", _GPU),
    "full_determinism": Entry(HONORED, shown="needs a GPU's kernels to make a difference"),
    "average_tokens_across_devices": Entry(NO_EFFECT, "the loss counts its tokens over all ranks itself, in TRL too"),
    "data_seed": Entry(NO_EFFECT, "TRL's sampler of repeated prompts is seeded by `seed`"),
    "output_dir": Entry(HONORED, shown="runs/test_folder::test_a_folder_that_holds_a_run_is_not_written_to_by_another"),
    **rows("gradient_checkpointing gradient_checkpointing_kwargs torch_empty_cache_steps use_cache", _MEMORY),
    **rows(
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order",
        _MEMORY,
    ),
    **rows(
        "torch_compile torch_compile_backend torch_compile_mode",
        Entry(HONORED, shown="compiling takes seconds; changes speed, not numbers"),
    ),
    "auto_find_batch_size": Entry(REFUSED, "TRL refuses it: a smaller batch would cut groups"),
    "parallelism_config": Entry(HONORED, "TRL refuses sequence and context parallelism", shown=_RANKS.shown),
    **rows(
        "deepspeed fsdp fsdp_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend local_rank",
        _RANKS,
    ),
    "ddp_timeout": _WAIT,
    "accelerator_config": _RANKS,
    "use_cpu": Entry(HONORED, shown="grpo/test_config::test_on_a_cpu_bf16_is_off_unless_asked_for"),
    **rows(
        "log_on_each_node save_on_each_node",
        Entry(HONORED, shown="needs several hosts with disks of their own, which the recipes refuse"),
    ),
    **rows("bf16_full_eval load_best_model_at_end metric_for_best_model greater_is_better do_eval", _EVALUATION),
    **rows(
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics label_names label_smoothing_factor",
        _NO_LABELS,
    ),
    **rows("do_train do_predict", Entry(NO_EFFECT, "for scripts; no trainer reads it")),
    **rows("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", _HUB),
    **rows(
        "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id",
        Entry(HONORED, shown="needs a tracker that is not installed"),
    ),
    **rows(
        "log_level log_level_replica disable_tqdm debug skip_memory_metrics logging_nan_inf_filter",
        Entry(HONORED, shown="changes what is printed, not what is learned"),
    ),
    "include_num_input_tokens_seen": Entry(HONORED, shown="logs a count that TRL logs as `num_tokens`"),
    "remove_unused_columns": Entry(NO_EFFECT, "rewards get every column, in TRL too"),
    **rows(
        "train_sampling_strategy length_column_name dataloader_drop_last",
        Entry(NO_EFFECT, "TRL's sampler of repeated prompts takes its place"),
    ),
    "enable_jit_checkpoint": Entry(HONORED, shown="needs a SIGTERM to the process"),
    **rows(
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
        Entry(HONORED, shown="training/test_resume::test_resumed_after_any_step_a_run_is_bit_identical"),
    ),
}

_CLIPS = {"epsilon": ("eps_low",), "epsilon_high": ("eps_high", "ratio_max"), "delta": ("dual_clip",)}
_SAPO = {f"sapo_temperature_{sign}": (f"temperature_{sign}",) for sign in ("pos", "neg")}

# What `GRPOConfig` adds.
TRL: dict[str, Entry] = {
    **{
        name: Entry(TAKEN_OVER, f"`policy_loss_options: {{{' or '.join(options)}: ...}}`", options=options)
        for name, options in (_CLIPS | _SAPO).items()
    },
    "scale_rewards": Entry(
        TAKEN_OVER,
        "`advantage: batch_std` (batch) or `group_mean` (none), TRL's eps; `group` leaves the preset's",
        advantages={"batch": ("batch_std", {"eps": 1e-4}), "none": ("group_mean", {})},
    ),
    "multi_objective_aggregation": Entry(
        TAKEN_OVER,
        "each reward normalized in its group, then `advantage: batch_std`, TRL's eps",
        advantages={"normalize_then_sum": ("batch_std", {"eps": 1e-4})},
    ),
    "importance_sampling_level": Entry(
        TAKEN_OVER,
        "`sequence` makes `policy_loss: gspo` of ppo_clip, with its clipping range; set "
        "use_bias_correction_kl: false with it, since TRL then weights the KL by the sequence's ratio, and gspo "
        "by the token's",
        excludes=("beta", "use_bias_correction_kl"),
        losses={"sequence": {"ppo_clip": "gspo", "gspo": "gspo"}},
    ),
    "loss_type": Entry(
        REFUSED,
        "set policy_loss and aggregation (grpo: ppo_clip, sequence_mean; dapo: ppo_clip, token_mean; dr_grpo: "
        "ppo_clip, constant; cispo: cispo, token_mean; sapo: sapo, sequence_mean), or drop the preset and the axes",
    ),
    **rows(
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        Entry(REFUSED, "no policy_loss is VESPO; drop the preset and the axes and set loss_type: vespo"),
    ),
    **rows(
        "entropy_coef top_entropy_quantile",
        Entry(HONORED, "of micro-batches as TRL cuts them: no row, padding or prompt is saved then"),
    ),
    **rows(
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        Entry(REFUSED, "TRL's controller is a part of its loss; set entropy_coef, or drop the preset and the axes"),
    ),
    **rows(
        "num_generations max_completion_length shuffle_dataset generation_batch_size steps_per_generation "
        "temperature top_p top_k min_p generation_kwargs repetition_penalty beta num_iterations reward_weights "
        "num_generations_eval mask_truncated_completions use_bias_correction_kl cast_lm_head_to_fp32 "
        "disable_dropout log_completions off_policy_mask_threshold",
        _RUN,
    ),
    **rows("cache_implementation pad_to_multiple_of", _MEMORY),
    "chat_template_kwargs": Entry(HONORED, shown="needs a chat template; a recipe's prompts are text"),
    "sync_ref_model": Entry(HONORED, shown="by the runs with `ref_model_mixup_alpha`"),
    **rows("ref_model_mixup_alpha ref_model_sync_steps", Entry(HONORED, needs=("sync_ref_model",))),
    "model_init_kwargs": _LOADED,
    "trust_remote_code": Entry(HONORED, shown="needs a model with code of its own"),
    "router_aux_loss_coef": Entry(HONORED, shown="needs a mixture of experts"),
    "max_tool_calling_iterations": Entry(HONORED, shown="needs tools, which a recipe does not pass"),
    "ds3_gather_for_generation": _RANKS,
    "use_vllm": Entry(HONORED, shown="grpo/test_config::test_the_engine_is_chosen_with_a_reason"),
    **rows(
        "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", _SERVER
    ),
    **rows(
        "vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size "
        "vllm_max_model_length",
        _ENGINE,
    ),
    "vllm_structured_outputs_regex": Entry(
        HONORED, shown="training/test_settings_table::test_requests_carry_what_the_settings_ask_for"
    ),
    **rows(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        _MISMATCH,
    ),
    "vllm_importance_sampling_cap": Entry(
        HONORED,
        "TRL's earlier name of vllm_importance_sampling_clip_max",
        shown="training/test_settings_table::test_the_earlier_name_of_the_samplers_cap_is_taken",
    ),
    **rows(
        "log_multimodal num_completions_to_print log_unique_prompts",
        Entry(HONORED, shown="changes the table of completions that is printed, not what is learned"),
    ),
    "log_completions_hub_repo": _HUB,
    **rows(
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
        Entry(HONORED, shown="changes which engine of transformers generates; needs a GPU"),
    ),
}

_ADAPTER = "training/test_settings_table::test_settings_of_an_adapter_reach_it"
_QUANTIZED = "training/test_settings_table::test_a_quantized_model_is_asked_for_or_refused"

# `ModelConfig`, of every recipe.
MODEL: dict[str, Entry] = {
    "model_name_or_path": Entry(HONORED, shown="recipes/test_grpo::test_the_main_job_learns"),
    **rows("model_revision dtype attn_implementation", _LOADED),
    "use_peft": Entry(HONORED, shown=_ADAPTER),
    **rows(
        "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save "
        "lora_task_type use_rslora use_dora",
        Entry(HONORED, needs=("use_peft",), shown=_ADAPTER),
    ),
    **rows(
        "load_in_8bit load_in_4bit", Entry(HONORED, "needs bitsandbytes, and HF generate", _QUANTIZED, ("use_peft",))
    ),
    **rows(
        "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        Entry(HONORED, needs=("load_in_4bit",), shown=_QUANTIZED),
    ),
}

_HANDOUT = Entry(HONORED, shown="grpo/test_config::test_the_handouts_settings_become_trls")

# What `ExtGRPOConfig` adds.
OURS: dict[str, Entry] = {
    **rows("preset advantage advantage_options policy_loss policy_loss_options aggregation aggregation_options", _RUN),
    "kl_estimator": Entry(HONORED, needs=("uses_axes", "beta")),
    "kl_estimator_options": Entry(
        HONORED,
        needs=("uses_axes", "beta"),
        shown="grpo/test_config::test_a_kl_estimator_may_have_options_and_be_the_users_own",
    ),
    "micro_batch_tokens": Entry(
        HONORED,
        needs=("uses_axes", "dynamic_micro_batches"),
        shown="grpo/test_step::test_each_saving_alone_changes_nothing",
    ),
    **rows(
        "skip_zero_advantage_rows dynamic_micro_batches share_prompt_prefix reuse_log_probs",
        Entry(
            HONORED,
            "saves computation, for the same gradient; without a preset or an axis nothing is saved",
            shown="grpo/test_step::test_fewer_tokens_are_computed",
        ),
    ),
    "uninformative_keep_prob": Entry(HONORED, shown="grpo/test_curriculum::test_rollout_avoids_uninformative_problems"),
    "reward_timeout": Entry(
        HONORED,
        shown="training/test_faults::test_reward_times_out_as_configured_and_handler_is_restored",
    ),
    **rows(
        "rollout_batch_size group_size train_batch_size micro_train_batch_size epochs_per_rollout_batch "
        "n_grpo_steps cliprange use_std_normalization advantage_eps sampling_temperature sampling_max_tokens",
        _HANDOUT,
    ),
    **rows("resume resume_changed", TRAINER["resume_from_checkpoint"]),
    "hub_merge_adapter": _HUB,
    "max_nonfinite_steps": Entry(
        HONORED, shown="training/test_faults::test_too_many_skipped_steps_end_run_with_checkpoints_intact"
    ),
    "time_budget": Entry(
        HONORED,
        shown="training/test_ending::test_budget_must_leave_time_for_the_longest_step_and_the_end",
    ),
    "lr_decay_fraction": Entry(
        HONORED,
        "needs `time_budget`",
        shown="training/test_ending::test_learning_rate_decays_to_zero_at_the_end_of_the_budget",
    ),
    **rows("stop sampling_min_tokens", _RUN),
    **rows("vllm_max_num_seqs vllm_dtype vllm_quantization vllm_enable_prefix_caching vllm_enforce_eager", _ENGINE),
}

_SPLIT = Entry(HONORED, shown="data/test_load::test_what_cannot_be_found_is_named")
_SAMPLE = Entry(HONORED, shown="data/test_sample::test_problem_limit_takes_a_sample_and_smaller_are_subsets")
_FORMAT = Entry(HONORED, shown="recipes/test_grpo::test_answer_format_of_both_graders_follows_the_prompt")
_MEASURED = Entry(HONORED, shown="runs/test_folder::test_validation_settings_are_recorded_as_used")
_AT_THE_END = Entry(HONORED, shown="training/test_ending::test_run_ends_with_the_requested_weights_and_problems")

# What a recipe adds: problems, reward, validation.
TASK: dict[str, Entry] = {
    **rows("dataset train_split validation_split", _SPLIT),
    "dataset_config": Entry(HONORED, shown="data/test_load::test_a_dataset_repository_with_subjects_as_configurations"),
    **rows(
        "problem_column answer_column",
        Entry(HONORED, shown="data/test_load::test_columns_and_the_place_of_the_answer_can_be_named"),
    ),
    "answer_source": Entry(HONORED, shown="data/test_load::test_where_an_answer_is_found"),
    **rows("prompt answer_format validation_grader", _FORMAT),
    "numeric_tolerance": Entry(
        HONORED,
        shown="recipes/test_grpo::test_tolerance_is_for_the_strict_grader_or_is_refused",
    ),
    "too_long": Entry(HONORED, shown="data/test_sample::test_rows_too_long_can_be_dropped_and_are_counted_and_listed"),
    **rows("sample_seed train_problems validation_problems", _SAMPLE),
    **rows("validation_temperature validation_max_tokens", _MEASURED),
    "validation_batch_size": _MEMORY,
    "validate_every": Entry(
        HONORED, shown="recipes/test_grpo::test_run_prints_validations_and_a_before_and_after_table"
    ),
    **rows("final_validation_problems restore_best", _AT_THE_END),
    "collapse_threshold": Entry(HONORED, shown="training/test_ending::test_a_run_that_has_collapsed_ends_and_says_why"),
    "stop_after_zero_variance_steps": Entry(
        HONORED, shown="training/test_ending::test_run_with_only_zero_variance_steps_for_a_while_ends"
    ),
    "reward": Entry(HONORED, shown="recipes/test_grpo::test_a_reward_of_ones_own_is_taken_as_it_is"),
    "log_generations_every": Entry(
        HONORED, shown="recipes/test_grpo::test_a_run_leaves_its_figures_its_generations_and_its_curve"
    ),
}

_TOKENIZED = "a row is a prompt and a response, tokenized before TRL sees it"
_TO_PREPARE = Entry(NO_EFFECT, f"{_TOKENIZED}, with the tokenizer's own tokens")

# What `SFTConfig` adds, in supervised fine-tuning and expert iteration.
SFT: dict[str, Entry] = {
    **rows("max_length packing padding_free completion_only_loss loss_type shuffle_dataset", _RUN),
    "packing_strategy": Entry(HONORED, needs=("packing",)),
    **rows("eos_token pad_token", _TO_PREPARE),
    **rows("pad_to_multiple_of activation_offloading dataset_num_proc", _MEMORY),
    **rows("model_init_kwargs", _LOADED),
    "trust_remote_code": TRL["trust_remote_code"],
    "router_aux_loss_coef": TRL["router_aux_loss_coef"],
    **rows("dataset_text_field chat_template_path dataset_kwargs", Entry(REFUSED, _TOKENIZED)),
    "assistant_only_loss": Entry(REFUSED, f"{_TOKENIZED}; completion_only_loss is the loss on the response only"),
    "truncation_mode": Entry(
        REFUSED, "a row longer than max_length is left out and counted, since half a trace has no answer"
    ),
    "eval_packing": Entry(REFUSED, "a run is validated by sampling, with validate_every"),
}

# What `ExtSFTConfig` adds; the rest of it is as in `ExtGRPOConfig`.
SFT_OURS: dict[str, Entry] = {
    "normalize_constant": Entry(
        HONORED, shown="sft/test_trainer::test_constant_normalizer_gives_handout_step_in_any_batching"
    ),
    "use_vllm": TRL["use_vllm"],
    **rows("vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length", _ENGINE),
}

_TRACES = Entry(HONORED, shown="data/test_traces::test_trace_file_is_read_by_column_names_and_split_once")

# What the SFT recipe adds to problems and validation.
SFT_TASK: dict[str, Entry] = {
    **rows("traces traces_split trace_prompt trace_response", _TRACES),
    "traces_config": Entry(HONORED, shown="data/test_load::test_a_dataset_repository_with_subjects_as_configurations"),
    "trace_answer": Entry(HONORED, shown="data/test_traces::test_trace_columns_default_to_prompt_response_and_answer"),
    "num_unique_examples": Entry(
        HONORED, shown="recipes/test_sft_and_pipeline::test_several_sizes_are_run_once_each_and_plotted"
    ),
    "filter_correct": Entry(
        HONORED, shown="recipes/test_sft_and_pipeline::test_only_correct_traces_are_kept_counted_and_reported"
    ),
}

_STEPS = Entry(HONORED, shown="expert_iteration/test_trainer::test_every_setting_of_a_step_has_its_effect")

# What `ExpertIterationConfig` adds to `ExtSFTConfig`.
EXPERT_ITERATION: dict[str, Entry] = {
    **rows(
        "n_ei_steps epochs_per_step questions_per_step group_size rollout_batch_size selection selection_options",
        _STEPS,
    ),
    "rollout_chunk": Entry(
        HONORED, shown="expert_iteration/test_trainer::test_every_chunk_of_rollouts_is_sampled_again"
    ),
}

_SAMPLES = Entry(HONORED, shown="recipes/test_evaluate::test_a_setting_of_how_it_is_sampled_reaches_the_sampler")
_ENGINE_OF_AN_EVALUATION = Entry(HONORED, shown="recipes/test_evaluate::test_settings_of_the_engine_reach_it")

# What an evaluation adds to the problems.
EVALUATION: dict[str, Entry] = {
    "model_name_or_path": Entry(
        HONORED,
        shown="recipes/test_evaluate::test_recipes_run_from_command_line_and_compare_evaluations",
    ),
    "split": _SPLIT,
    "problems": _SAMPLE,
    **rows(
        "samples batch_size",
        Entry(HONORED, shown="recipes/test_evaluate::test_an_interrupted_evaluation_resumes_with_the_same_result"),
    ),
    "grader": Entry(HONORED, shown="recipes/test_evaluate::test_the_samples_the_summary_and_the_table_say_the_same"),
    **rows("temperature top_p max_tokens min_tokens stop", _SAMPLES),
    "seed": Entry(HONORED, shown="recipes/test_evaluate::test_the_number_of_a_sample_decides_its_draw"),
    "use_vllm": TRL["use_vllm"],
    "ddp_timeout": _WAIT,
    **rows("dtype vllm_gpu_memory_utilization vllm_max_model_length vllm_enforce_eager", _ENGINE_OF_AN_EVALUATION),
    **rows(
        "show category output_dir",
        Entry(
            HONORED,
            shown="recipes/test_evaluate::test_finished_evaluation_is_shown_again_without_a_model",
        ),
    ),
}

# What best-of-n adds to an evaluation.
BEST_OF_N: dict[str, Entry] = {
    "at": Entry(HONORED, shown="recipes/test_evaluate::test_best_of_n_uses_one_set_of_samples_and_draws_its_curves"),
}
