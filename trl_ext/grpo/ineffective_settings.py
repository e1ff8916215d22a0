"""Settings that change nothing in a combination with others, each with its reason.

Those that a configuration refuses are in `training/settings_table.py`; these are allowed, since a preset or a default
may have them. `explain` prints all of them, a trainer warns of those that were chosen.
"""

from __future__ import annotations

from trl_ext.algorithms.policy_losses import is_reinforce_on_policy
from trl_ext.algorithms.presets import PRESETS, Preset
from trl_ext.compat.given import recorded_names
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.registry import defaults_of

_ON_POLICY = "every rollout is used in one step, where all ratios are 1"


def updates_per_rollout(config: ExtGRPOConfig) -> float:
    """Optimizer steps per rollout; above 1, all but the first are off-policy."""
    return float(config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps)


def ineffective_settings(config: ExtGRPOConfig) -> dict[str, str]:
    """Names of settings without effect, and why; of a configuration that uses the axes."""
    of_sampler = config.old_log_probs == "sampler"
    is_on_policy = updates_per_rollout(config) <= 1 and not of_sampler
    # Its ratio is to the engine, which is another model than the trainer.
    has_engine_ratio = config.use_vllm and "sampled_logp" in config.inputs_of_loss
    loss = config.objective().policy_loss
    is_plain = is_on_policy and not has_engine_ratio and config.policy_loss != "reinforce"
    is_plain = is_plain and is_reinforce_on_policy(loss)
    checkpointing = config.gradient_checkpointing and (config.gradient_checkpointing_kwargs or {})
    reentrant = bool(checkpointing and checkpointing.get("use_reentrant"))
    rules: list[tuple[str, bool, str]] = [
        ("policy_loss", is_plain, f"as reinforce: {_ON_POLICY}"),
        ("policy_loss_options", is_plain, _ON_POLICY),
        ("off_policy_mask_threshold", is_on_policy and not config.use_vllm, _ON_POLICY),
        ("reuse_log_probs", of_sampler, "the sampler's log-probabilities are the old ones"),
        ("share_prompt_prefix", reentrant, "reentrant gradient checkpointing has no gradient for the prompts"),
        ("skip_zero_advantage_rows", bool(config.beta), "every row has a KL penalty"),
        ("skip_zero_advantage_rows", "step" in config.inputs_of_loss, "the loss sees every row of a step"),
    ]
    return {name: why for name, applies, why in rules if applies and getattr(config, name)}


def chosen_ineffective_settings(config: ExtGRPOConfig) -> list[str]:
    """Those among them that were given, or are neither a default nor the preset's, in a line each."""
    usual = {**defaults_of(config), **vars(PRESETS.get(config.preset or "grpo_clip", Preset("", "", "")))}
    return [
        f"{name}={getattr(config, name)} has no effect here: {why}"
        for name, why in ineffective_settings(config).items()
        if name in recorded_names(config) or getattr(config, name) != usual[name]
    ]
