"""The algorithms of the course handout and of the literature, each as one member per axis with its options.

`docs/site/algorithms.yaml` has the paper and the authors' code of each, and says where one differs on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """The name and options of one member of each axis, and other settings that the method is made of."""

    advantage: str
    policy_loss: str
    aggregation: str
    advantage_options: dict[str, Any] = field(default_factory=dict)
    policy_loss_options: dict[str, Any] = field(default_factory=dict)
    aggregation_options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # where a run has the default

    @property
    def needs_teacher(self) -> bool:
        """Whether it distills, from the teacher that `--teacher` names."""
        return "distillation" in self.settings


_TOKEN_SUM = {"normalize_constant": 1.0}  # over a sequence
_CLIP_HIGHER = {"eps_low": 0.2, "eps_high": 0.28}
LOSS_TYPES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip")  # the course handout's
PRESETS: dict[str, Preset] = {
    "no_baseline": Preset("raw", "reinforce", "sequence_mean"),
    "reinforce_with_baseline": Preset("group_std", "reinforce", "sequence_mean"),
    "grpo_clip": Preset("group_std", "ppo_clip", "sequence_mean"),
    "grpo_no_clip": Preset("group_std", "importance_ratio", "sequence_mean"),
    # the literature
    "dr_grpo": Preset("group_mean", "ppo_clip", "constant"),  # arXiv:2503.20783
    "dapo": Preset("group_std", "ppo_clip", "token_mean", policy_loss_options=_CLIP_HIGHER),  # arXiv:2503.14476
    "dapo_full": Preset(  # with its dynamic sampling and overlong reward shaping: 4,096 of 20,480 tokens
        "group_std",
        "ppo_clip",
        "token_mean",
        policy_loss_options=_CLIP_HIGHER,
        settings={"dynamic_sampling_tries": 4, "overlong_buffer": 0.2, "mask_truncated_completions": True},
    ),
    "rloo": Preset("leave_one_out", "reinforce", "constant", aggregation_options=_TOKEN_SUM),  # arXiv:2402.14740
    "gspo": Preset("group_std", "gspo", "sequence_mean"),  # arXiv:2507.18071
    "cispo": Preset("group_std", "cispo", "token_mean"),  # arXiv:2506.13585
    # arXiv:2602.02710, whose gradient is of the whole response's log-probability: a sum over its tokens
    "max_rl": Preset("max_rl", "reinforce", "constant", aggregation_options=_TOKEN_SUM),
    "gspo_token": Preset("group_std", "gspo_token", "sequence_mean"),  # arXiv:2507.18071, section 4.3
    "luspo": Preset("group_std", "gspo", "constant", aggregation_options=_TOKEN_SUM),  # arXiv:2602.05261
    "gmpo": Preset("group_std", "gmpo", "sequence_mean"),  # arXiv:2507.20673
    "ce_gppo": Preset("group_std", "ce_gppo", "token_mean", policy_loss_options={"dual_clip": 3.0}),  # arXiv:2509.20712
    "aspo": Preset("group_std", "aspo", "token_mean"),  # arXiv:2510.06062
    "vespo": Preset("group_std", "vespo", "token_mean"),  # arXiv:2602.10693
    "dppo": Preset("group_mean", "dppo_tv", "constant"),  # arXiv:2602.04879
    "gdpo": Preset("gdpo", "ppo_clip", "sequence_mean"),  # arXiv:2601.05242
    "reinforce_plus_plus": Preset("reinforce_plus_plus", "ppo_clip", "sequence_mean"),  # arXiv:2501.03262
    "reinforce_plus_plus_baseline": Preset("reinforce_plus_plus_baseline", "ppo_clip", "sequence_mean"),  # the same
    "opo": Preset("opo", "reinforce", "constant", aggregation_options=_TOKEN_SUM),  # arXiv:2505.23585
    "w_reinforce": Preset("w_reinforce", "reinforce", "constant", aggregation_options=_TOKEN_SUM),  # arXiv:2506.01347
    "pkpo": Preset("pkpo", "reinforce", "constant", aggregation_options=_TOKEN_SUM),  # arXiv:2505.15201
    # From the teacher that `--teacher` names: Lu et al., "On-Policy Distillation" (2025), and GKD (arXiv:2306.13649).
    "opd": Preset("zero", "importance_ratio", "token_mean", settings={"distillation": "reverse_kl"}),
    "gkd": Preset("zero", "reinforce", "token_mean", settings={"distillation": "jensen_shannon"}),
    "opd_grpo": Preset("group_std", "ppo_clip", "token_mean", settings={"distillation": "reverse_kl"}),
}
