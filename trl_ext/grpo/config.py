"""`ExtGRPOConfig`: a few typed fields on TRL's, resolved and checked before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from trl import GRPOConfig

from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import BY_GRADIENT, KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.presets import PRESETS
from trl_ext.compat.on_resume import OnResume
from trl_ext.compat.renamed import accepts_earlier_names
from trl_ext.errors import InputError
from trl_ext.registry import Registry, unknown
from trl_ext.training.handout_settings import resolve_handout
from trl_ext.training.options import parse_options
from trl_ext.training.settings import RunSettings
from trl_ext.training.settings_table import OURS, TRL
from trl_ext.training.trl_settings import check_needs, refuse_ignored, take_over_advantage, take_over_policy_loss

_OPTIONS = ("advantage_options", "policy_loss_options", "aggregation_options", "kl_estimator_options")


_OPTIONS_HELP = {"help": "The options of that axis: a mapping in YAML, `name=value,name=value` or JSON as a flag."}


@accepts_earlier_names
@dataclass
class ExtGRPOConfig(RunSettings, GRPOConfig):
    """TRL's `GRPOConfig` plus the axes and the course handout's vocabulary.

    With neither a preset nor an axis, TRL's own `loss_type`, `scale_rewards`, ... decide, and training is TRL's.

    Raises:
        UnknownName: a name or an option that is not in its table.
        ValueError: settings that contradict each other; the message has the numbers.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, *_OPTIONS]

    preset: str | None = field(
        default=None,
        metadata={
            "help": "A named combination of the axes; an axis given next to it overrides it. "
            f"One of: {', '.join(PRESETS)}."
        },
    )
    advantage: str | None = field(
        default=None,
        metadata={
            "help": f"How rewards become advantages. One of: {', '.join(sorted(ADVANTAGES))}, or file.py:function."
        },
    )
    advantage_options: dict[str, Any] | str | None = field(default=None, metadata=_OPTIONS_HELP)
    policy_loss: str | None = field(
        default=None,
        metadata={
            "help": f"The per-token policy loss. One of: {', '.join(sorted(POLICY_LOSSES))}, or file.py:function."
        },
    )
    policy_loss_options: dict[str, Any] | str | None = field(default=None, metadata=_OPTIONS_HELP)
    aggregation: str | None = field(
        default=None,
        metadata={
            "help": f"How token losses become a scalar. One of: {', '.join(sorted(AGGREGATIONS))}, or file.py:function."
        },
    )
    aggregation_options: dict[str, Any] | str | None = field(default=None, metadata=_OPTIONS_HELP)
    kl_estimator: str = field(
        default="k3",
        metadata={
            "help": "The estimator of the KL penalty, which --beta scales. "
            f"One of: {', '.join(sorted(KL_ESTIMATORS))}, or file.py:function."
        },
    )
    kl_estimator_options: dict[str, Any] | str | None = field(default=None, metadata=_OPTIONS_HELP)
    reward_timeout: Annotated[float | None, OnResume.MAY_CHANGE] = field(
        default=600.0, metadata={"help": "The time limit of a reward function, in seconds per rollout."}
    )

    # What an optimizer step does not compute, for the same gradient; needs a preset or an axis.
    skip_zero_advantage_rows: bool = field(
        default=True,
        metadata={"help": "Skip rows without gradient: zero advantage and no KL penalty."},
    )
    dynamic_micro_batches: bool = field(
        default=True,
        metadata={"help": "Pack rows of similar length into micro-batches by tokens, and trim the padding."},
    )
    micro_batch_tokens: int | None = field(
        default=None,
        metadata={
            "help": "The maximum number of tokens in a micro-batch, padding included. The default is what "
            "micro_train_batch_size rows with the rollout's longest prompt and completion have."
        },
    )
    share_prompt_prefix: bool = field(
        default=True,
        metadata={"help": "Compute a group's prompt once for its completions; needs dynamic_micro_batches."},
    )
    reuse_log_probs: bool = field(
        default=True,
        metadata={"help": "Take the old log-probabilities from the first pass; no second forward pass."},
    )

    # Which problems a rollout is made of.
    uninformative_keep_prob: float = field(
        default=1.0,
        metadata={
            "help": "Revisit problems of zero reward variance with this probability. "
            "Others take their place; problems not yet seen are judged by their subject and "
            "level."
        },
    )

    # The handout's vocabulary; each is resolved into the TRL field named in its help.
    rollout_batch_size: int | None = field(
        default=None,
        metadata={"help": "The number of completions per rollout (TRL: generation_batch_size)."},
    )
    group_size: int | None = field(
        default=None, metadata={"help": "The number of completions per prompt (TRL: num_generations)."}
    )
    train_batch_size: int | None = field(
        default=None, metadata={"help": "The number of completions per optimizer step, over all ranks."}
    )
    micro_train_batch_size: int | None = field(
        default=None,
        metadata={"help": "The number of completions per forward pass (TRL: per_device_train_batch_size)."},
    )
    epochs_per_rollout_batch: int | None = field(
        default=None, metadata={"help": "The number of passes over each rollout batch (TRL: num_iterations)."}
    )
    n_grpo_steps: Annotated[int | None, OnResume.LENGTH] = field(
        default=None, metadata={"help": "The number of rollout batches in the run; max_steps follows from it."}
    )
    cliprange: float | None = field(
        default=None, metadata={"help": "Set eps_low and eps_high of ppo_clip to one number."}
    )
    use_std_normalization: bool | None = field(
        default=None, metadata={"help": "Choose the advantage group_std (true) or group_mean (false)."}
    )
    advantage_eps: float | None = field(
        default=None,
        metadata={"help": "The eps added to the rewards' standard deviation (handout: 1e-6, TRL: 1e-4)."},
    )
    sampling_temperature: float | None = field(
        default=None, metadata={"help": "The sampling temperature of rollouts (TRL: temperature)."}
    )
    sampling_max_tokens: int | None = field(
        default=None, metadata={"help": "The maximum completion length in tokens (TRL: max_completion_length)."}
    )

    def __post_init__(self) -> None:
        if self.reward_timeout is not None and self.reward_timeout <= 0:
            raise ValueError(f"reward_timeout must be positive seconds, got {self.reward_timeout}")
        if not 0 <= self.uninformative_keep_prob <= 1:
            raise ValueError(f"uninformative_keep_prob must be between 0 and 1, got {self.uninformative_keep_prob}")
        for name in _OPTIONS:
            setattr(self, name, parse_options(name, getattr(self, name)))
        self.resolve_run_settings()
        resolve_handout(self)
        self._resolve_axes()
        super().__post_init__()
        # Trainer reads this name as rows per forward pass; the handout's meaning has been resolved by now.
        self.train_batch_size = self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def uses_axes(self) -> bool:
        """Whether the loss is ours; otherwise it is TRL's own."""
        return self.policy_loss is not None

    def check_problem_count(self, problems: int) -> None:
        """Refuse fewer training problems than a rollout has: TRL's `RepeatSampler` leaves out an incomplete rollout.

        Raises:
            InputError: with the settings to change.
        """
        needed = self.generation_batch_size // self.num_generations
        if problems < needed:
            raise InputError(
                f"{problems} training problems, and a rollout has {needed} different ones (rollout_batch_size "
                f"{self.generation_batch_size} in groups of group_size {self.num_generations}), so that nothing would "
                f"be trained: lower rollout_batch_size to {problems * self.num_generations} or less, or give more "
                "problems"
            )

    @property
    def _group(self) -> int:
        return max(self.num_generations or 0, 2)  # TRL refuses fewer later

    def advantage_fn(self) -> Callable[..., Any]:
        """(P, G) rewards -> (P, G) advantages."""
        assert self.advantage is not None
        return ADVANTAGES.build(self.advantage, self._group, **_mapping(self.advantage_options))

    def objective(self) -> Objective:
        """Policy loss, KL and aggregation with their options bound."""
        assert self.policy_loss is not None
        assert self.aggregation is not None
        return Objective(
            policy_loss=POLICY_LOSSES.build(self.policy_loss, self._group, **_mapping(self.policy_loss_options)),
            aggregate=AGGREGATIONS.build(self.aggregation, self._group, **_mapping(self.aggregation_options)),
            kl=self._kl(),
            beta=self.beta,
            kl_bias_correction=self.use_bias_correction_kl,
            kl_by_gradient=self.kl_estimator in BY_GRADIENT,
            off_policy_threshold=self.off_policy_mask_threshold,
        )

    def _kl(self) -> Callable[..., Any]:
        return KL_ESTIMATORS.build(self.kl_estimator, self._group, **_mapping(self.kl_estimator_options))

    def _resolve_axes(self) -> None:
        """Fill every axis from the preset, then from what was given next to it; refuse what would be ignored."""
        self._kl()  # refuses an unknown name or option
        scale: Any = self.scale_rewards  # type: ignore[has-type]
        self.scale_rewards = {"true": "group", "false": "none"}.get(str(scale).lower(), scale)
        axes = ("advantage", "policy_loss", "aggregation")
        given = [name for name in axes if getattr(self, name) or getattr(self, f"{name}_options")]
        if self.preset is None and not given:
            check_needs(self, OURS)
            return
        if self.preset is not None and self.preset not in PRESETS:
            raise unknown("preset", self.preset, PRESETS)
        base = PRESETS[self.preset or "grpo_clip"]  # the unnamed axes of a run that names only some
        refuse_ignored(self, TRL)
        take_over_advantage(self, TRL)
        take_over_policy_loss(self, TRL, base.policy_loss, base.policy_loss_options, POLICY_LOSSES)
        for axis, table in zip(axes, (ADVANTAGES, POLICY_LOSSES, AGGREGATIONS), strict=True):
            self._resolve_axis(axis, table, getattr(base, axis), getattr(base, f"{axis}_options"))
        check_needs(self, OURS | TRL)
        self.scale_rewards = "none"  # ours replaces it; TRL then logs frac_reward_zero_std per group

    def _resolve_axis(self, axis: str, table: Registry, name: str, options: Mapping[str, Any]) -> None:
        chosen = getattr(self, axis) or name
        own = _mapping(getattr(self, f"{axis}_options"))
        merged = {**options, **own} if chosen == name else own  # another member does not inherit the preset's options
        table.build(chosen, self._group, **merged)
        setattr(self, axis, chosen)
        setattr(self, f"{axis}_options", merged)


def _mapping(options: dict[str, Any] | str | None) -> dict[str, Any]:
    assert not isinstance(options, str)  # __post_init__ parsed it
    return options or {}
