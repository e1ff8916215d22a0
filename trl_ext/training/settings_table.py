"""What our code does with TRL's settings next to a preset or an axis; all others are honored or have no effect.

Without a preset and without an axis, training is TRL's and so are its settings. The page of all settings,
`docs/reference/trl_settings.md`, is written from this table and from `docs/site/trl_settings.yaml`, which says how each
effect is known.
"""

from __future__ import annotations

from trl_ext.training.trl_settings import Rule, rules

_CLIPS = {"epsilon": ("eps_low",), "epsilon_high": ("eps_high", "ratio_max"), "delta": ("dual_clip",)}
_OF_TYPE = {  # TRL's prefix and the options of the policy loss of that name
    f"{prefix}_{option}": (option,)
    for prefix, options in {
        "sapo": "temperature_pos temperature_neg",
        "vespo": "k_pos lambda_pos k_neg lambda_neg",
    }.items()
    for option in options.split()
}

_GROUP_STD: tuple[str, dict[str, float]] = ("group_std", {"eps": 1e-4})

TRL: dict[str, Rule] = {  # `GRPOConfig`
    **{
        name: Rule(f"`policy_loss_options: {{{' or '.join(options)}: ...}}`", options=options)
        for name, options in (_CLIPS | _OF_TYPE).items()
    },
    "scale_rewards": Rule(
        "`advantage: batch_std` (batch), `group_std` (group) or `group_mean` (none), TRL's eps; `group` leaves a "
        "preset's group_std and gdpo",
        advantages={"batch": ("batch_std", {"eps": 1e-4}), "none": ("group_mean", {}), "group": _GROUP_STD},
        keeps={"group": lambda advantage: advantage in ("group_std", "gdpo")},
    ),
    "multi_objective_aggregation": Rule(
        "`advantage: gdpo`, TRL's eps; sum_then_normalize is `advantage: group_std` in place of a preset's gdpo",
        advantages={"normalize_then_sum": ("gdpo", {"eps": 1e-4}), "sum_then_normalize": _GROUP_STD},
        keeps={"sum_then_normalize": lambda advantage: advantage != "gdpo"},
    ),
    "importance_sampling_level": Rule(
        "`sequence` makes `policy_loss: gspo` of ppo_clip, with its clipping range; set "
        "use_bias_correction_kl: false with it, since TRL then weights the KL by the sequence's ratio, and gspo "
        "by the token's",
        excludes=("beta", "use_bias_correction_kl"),
        losses={"sequence": {"ppo_clip": "gspo", "gspo": "gspo"}},
        without={"token": ("gspo", "gspo_token", "gmpo", "vespo")},
    ),
    "loss_type": Rule(
        "set policy_loss and aggregation (grpo: ppo_clip, sequence_mean; dapo: ppo_clip, token_mean; dr_grpo: "
        "ppo_clip, constant; cispo: cispo, token_mean; sapo: sapo, sequence_mean; vespo: vespo, token_mean; luspo: "
        "preset luspo), or drop the preset and the axes",
        refused=True,
    ),
    **rules(
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", Rule(needs=("use_adaptive_entropy",))
    ),
    **rules("ref_model_mixup_alpha ref_model_sync_steps", Rule(needs=("sync_ref_model",))),
    "sync_ref_model": Rule(needs=("beta",)),
}

MODEL: dict[str, Rule] = {  # `ModelConfig`
    **rules(
        "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type "
        "use_rslora use_dora load_in_8bit load_in_4bit",
        Rule(needs=("use_peft",)),
    ),
    **rules("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", Rule(needs=("load_in_4bit",))),
}

_TOKENIZED = "a row is a prompt and a response, tokenized before TRL sees it"

SFT: dict[str, Rule] = {  # `SFTConfig`, in supervised fine-tuning and expert iteration
    "packing_strategy": Rule(needs=("packing",)),
    **rules("dataset_text_field chat_template_path dataset_kwargs", Rule(_TOKENIZED, refused=True)),
    "assistant_only_loss": Rule(f"{_TOKENIZED}; completion_only_loss is the loss on the response only", refused=True),
    "truncation_mode": Rule(
        "a row longer than max_length is left out and counted, since half a trace has no answer", refused=True
    ),
    "eval_packing": Rule("a run is validated by sampling, with validate_every", refused=True),
}
