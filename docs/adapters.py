"""The course's `tests/adapters.py`, filled in: each name that its tests call is a function of `trl_ext.functional`.

Copied over the file that the course hands out, it lets the course's own tests run against this package.
"""

from trl_ext import functional

run_tokenize_prompt_and_output = functional.tokenize_prompt_and_output
run_compute_entropy = functional.compute_entropy
run_get_response_log_probs = functional.get_response_log_probs
run_masked_normalize = functional.masked_normalize
run_masked_mean = functional.masked_mean
run_sft_microbatch_train_step = functional.sft_microbatch_train_step
run_compute_group_normalized_rewards = functional.compute_group_normalized_rewards
run_compute_naive_policy_gradient_loss = functional.compute_naive_policy_gradient_loss
run_compute_grpo_clip_loss = functional.compute_grpo_clip_loss
run_compute_policy_gradient_loss = functional.compute_policy_gradient_loss
run_grpo_microbatch_train_step = functional.grpo_microbatch_train_step
