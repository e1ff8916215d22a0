"""`ExtGRPOConfig`: TRL's settings plus ours, resolved and checked before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trl import GRPOConfig
from trl.rewards import get_soft_overlong_punishment

from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.distillation import DISTILLATIONS
from trl_ext.algorithms.kl import BY_GRADIENT, KL_ESTIMATORS
from trl_ext.algorithms.objective import Objective
from trl_ext.algorithms.policy_losses import POLICY_LOSSES, has_ratio_to_old
from trl_ext.algorithms.presets import PRESETS
from trl_ext.algorithms.sampler_correction import (
    SAFE_PAIR,
    SAMPLER_REJECTIONS,
    SAMPLER_WEIGHTS,
    SamplerCorrection,
    trl_mode,
)
from trl_ext.algorithms.selection import SELECTIONS
from trl_ext.compat.given import given, reset
from trl_ext.errors import InputError, brief_in_notebooks
from trl_ext.grpo.distillation_settings import DistillationSettings
from trl_ext.registry import parse_options, unknown
from trl_ext.setting import Group, OnResume, setting
from trl_ext.training.handout_settings import resolve_handout
from trl_ext.training.options import check_sampling
from trl_ext.training.settings_table import TRL
from trl_ext.training.trl_settings import (
    check_needs,
    refuse_ignored,
    refuse_next_to,
    rules_of,
    take_over_advantage,
    take_over_policy_loss,
)
from trl_ext.turns.settings import ToolSettings, check_tools

AXES = {
    "advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "aggregation": AGGREGATIONS, "kl_estimator": KL_ESTIMATORS,
    "sampler_weight": SAMPLER_WEIGHTS, "sampler_rejection": SAMPLER_REJECTIONS, "rollout_selection": SELECTIONS,
    "distillation": DISTILLATIONS,
}  # fmt: skip
OLD_LOG_PROBS = ("policy", "sampler")
_OPTIONS = [f"{axis}_options" for axis in AXES]
_OPTIONS_HELP = "Options of that axis."
_FORMS_HELP = "A mapping, JSON or name=value,..."


def _help(axis: str, purpose: str) -> str:
    return f"{purpose} One of: {', '.join(sorted(AXES[axis]))}, or file.py:function."


@dataclass
class RolloutSettings(ToolSettings, DistillationSettings):
    """What is sampled with, and learned from, next to the reward."""


@brief_in_notebooks
@dataclass
class ExtGRPOConfig(RolloutSettings, GRPOConfig):
    """TRL's `GRPOConfig` plus the axes and the course handout's vocabulary.

    With neither a preset nor an axis, TRL's own `loss_type`, `scale_rewards`, ... decide, and training is TRL's.

    Raises:
        UnknownName: a name or an option that is not in its table.
        ValueError: settings that contradict each other; the message has the numbers.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, *_OPTIONS, "teacher_init_kwargs"]

    preset: str | None = setting(None, f"A combination of the axes. One of: {', '.join(PRESETS)}.", Group.ALGORITHM)
    advantage: str | None = setting(None, _help("advantage", "How rewards become advantages."), Group.ALGORITHM)
    advantage_options: dict[str, Any] | str | None = setting(None, _OPTIONS_HELP, Group.ALGORITHM)
    policy_loss: str | None = setting(None, _help("policy_loss", "The loss of each token."), Group.ALGORITHM)
    policy_loss_options: dict[str, Any] | str | None = setting(None, _OPTIONS_HELP, Group.ALGORITHM)
    aggregation: str | None = setting(
        None,
        _help("aggregation", "Mean over tokens."),
        Group.ALGORITHM,
        also_called="normalize_constant constant_normalizer",
    )
    aggregation_options: dict[str, Any] | str | None = setting(None, _OPTIONS_HELP, Group.ALGORITHM)
    kl_estimator: str = setting(
        "k3", _help("kl_estimator", "The KL penalty's estimator."), Group.ALGORITHM, needs="uses_axes beta"
    )
    kl_estimator_options: dict[str, Any] | str | None = setting(
        None, _OPTIONS_HELP, Group.ALGORITHM, needs="uses_axes beta"
    )
    old_log_probs: str = setting(
        "policy",
        (
            "What the policy loss's ratio is to: policy or sampler. policy is that before the step, and sampler_weight "
            "corrects for the sampler (decoupled PPO); sampler is what vLLM reports, and only the ratio corrects."
        ),
        Group.ALGORITHM,
        needs="uses_axes",
        rare=True,
    )
    sampler_weight: str | None = setting(
        None,
        _help("sampler_weight", "An importance weight."),
        Group.ALGORITHM,
        needs="uses_axes use_vllm vllm_importance_sampling_correction",
    )
    sampler_rejection: str | None = setting(
        None,
        _help("sampler_rejection", "Which tokens vLLM's mismatch rejects."),
        Group.ALGORITHM,
        needs="uses_axes use_vllm vllm_importance_sampling_correction",
    )
    sampler_weight_options: dict[str, Any] | str | None = setting(
        None,
        _FORMS_HELP,
        Group.ALGORITHM,
        needs="uses_axes use_vllm vllm_importance_sampling_correction",
        rare=True,
    )
    sampler_rejection_options: dict[str, Any] | str | None = setting(
        None,
        _FORMS_HELP,
        Group.ALGORITHM,
        needs="uses_axes use_vllm vllm_importance_sampling_correction",
        rare=True,
    )
    vllm_importance_sampling_mode: str | None = setting(
        None,
        (
            "TRL's name for a weight with a rejection, such as sequence_mask. It also has sequence_truncate, "
            "token_mask and token_truncate. If unset, sequence_mask with TRL's loss; with a preset or an axis, "
            "sampler_weight token and sampler_rejection sequence_mean_k3."
        ),
        Group.ALGORITHM,
        rare=True,
    )
    reward_timeout: float | None = setting(
        600.0,
        "The time limit of a reward function, in seconds per rollout.",
        Group.REWARD,
        on_resume=OnResume.MAY_CHANGE,
        within="(0, inf)",
        unit="seconds",
        rare=True,
    )

    # Savings of an optimizer step, for the same gradient; they need a preset or an axis.
    skip_zero_advantage_rows: bool = setting(
        True, "Skip rows without gradient: zero advantage and no KL penalty.", Group.SAVINGS
    )
    dynamic_micro_batches: bool = setting(
        True, "Pack rows by tokens into micro-batches without padding; compute equal rows once.", Group.SAVINGS
    )
    micro_batch_tokens: int | None = setting(
        None,
        (
            "The maximum number of tokens in a micro-batch, padding included. The default is what "
            "micro_train_batch_size rows with the rollout's longest prompt and completion have."
        ),
        Group.SAVINGS,
        needs="uses_axes dynamic_micro_batches",
        within="[1, inf)",
    )
    share_prompt_prefix: bool = setting(
        True, "Compute a group's prompt once for its completions; needs dynamic_micro_batches.", Group.SAVINGS
    )
    reuse_log_probs: bool = setting(
        True, "Take the old log-probabilities from the first pass; no second forward pass.", Group.SAVINGS
    )

    # Which problems a rollout is made of, and which of its completions are trained on.
    uninformative_keep_prob: float = setting(
        1.0,
        (
            "Revisit problems of zero reward variance with this probability. Others take their place; "
            "problems not yet seen are judged by their subject and level."
        ),
        Group.ALGORITHM,
        within="[0, 1]",
    )

    rollout_selection: str | None = setting(
        None,
        (
            "Which completions are trained on, such as mixed_groups; if unset, all. The choices: "
            f"{', '.join(sorted(SELECTIONS))}, or file.py:function."
        ),
        Group.ALGORITHM,
        needs="uses_axes",
    )
    rollout_selection_options: dict[str, Any] | str | None = setting(
        None,
        _FORMS_HELP,
        Group.ALGORITHM,
        needs="rollout_selection",
        rare=True,
    )
    dynamic_sampling_tries: int = setting(
        1,
        (
            "Try a rollout up to N times, until rollout_selection keeps some of each group. Unset, it is mixed_groups "
            "here, DAPO's. Other problems take the place of groups of which it keeps none; 1 is off."
        ),
        Group.ALGORITHM,
        needs="uses_axes",
        within="[1, inf)",
    )
    overlong_buffer: float | None = setting(
        None,
        "Subtract up to 1 in the last N tokens of the maximum length (DAPO). Below 1, a fraction of them.",
        Group.ALGORITHM,
    )

    rollout_ahead: int = setting(
        0,
        (
            "How many rollouts vLLM servers are ahead: with 1 they sample the next one while steps on this one are "
            "made, with weights that are one rollout old; the sampler's correction weighs it."
        ),
        Group.SAMPLING,
        within="[0, 1]",
        rare=True,
    )

    # The handout's names, each resolved into the TRL field named in its help.
    rollout_batch_size: int | None = setting(
        None,
        "The number of completions per rollout.",
        Group.OPTIMIZER,
        trl="generation_batch_size",
        also_called="n_prompts_per_rollout_batch D_b",
        within="[1, inf)",
    )
    group_size: int | None = setting(
        None,
        "The number of completions per prompt.",
        Group.OPTIMIZER,
        trl="num_generations",
        also_called="G",
        within="[1, inf)",
    )
    train_batch_size: int | None = setting(
        None, "The number of completions per optimizer step, over all ranks.", Group.OPTIMIZER, within="[1, inf)"
    )
    micro_train_batch_size: int | None = setting(
        None,
        "The number of completions per forward pass.",
        Group.OPTIMIZER,
        trl="per_device_train_batch_size",
        also_called="n_microbatches_per_rollout_batch",
        within="[1, inf)",
    )
    epochs_per_rollout_batch: int | None = setting(
        None,
        "The number of passes over each rollout batch.",
        Group.OPTIMIZER,
        trl="num_iterations",
        also_called="n_train_steps_per_rollout_batch",
        within="[1, inf)",
    )
    n_grpo_steps: int | None = setting(
        None,
        "The number of rollout batches in the run; max_steps follows from it.",
        Group.OPTIMIZER,
        on_resume=OnResume.LENGTH,
        within="[1, inf)",
    )
    cliprange: float | None = setting(
        None, "Set eps_low and eps_high of ppo_clip to one number.", Group.ALGORITHM, within="[0, inf)"
    )
    use_std_normalization: bool | None = setting(
        None,
        "Choose the advantage group_std (true) or group_mean (false).",
        Group.ALGORITHM,
        also_called="normalize_by_std normalized_by_std",
    )
    advantage_eps: float | None = setting(
        None,
        "The eps added to the rewards' standard deviation (handout: 1e-6, TRL: 1e-4).",
        Group.ALGORITHM,
        within="[0, inf)",
    )
    sampling_temperature: float | None = setting(
        None, "The sampling temperature of rollouts.", Group.SAMPLING, trl="temperature"
    )
    sampling_max_tokens: int | None = setting(
        None,
        "The maximum completion length in tokens.",
        Group.SAMPLING,
        trl="max_completion_length",
        also_called="max_tokens",
        within="[1, inf)",
    )

    def __post_init__(self) -> None:
        if self.dynamic_sampling_tries > 1 and self.log_completions:
            raise ValueError(
                f"log_completions=True would be ignored next to dynamic_sampling_tries={self.dynamic_sampling_tries}, "
                "since TRL's table has one try; set log_generations_every in a recipe"
            )
        for name in (*_OPTIONS, "teacher_init_kwargs"):
            setattr(self, name, parse_options(name, getattr(self, name)))
        self.resolve_run_settings()
        resolve_handout(self)
        check_sampling(self)
        self._resolve_axes()
        super().__post_init__()
        check_tools(self)
        self._check_rollout_ahead()
        spans = self.steps_per_generation % self.gradient_accumulation_steps
        if spans and self.uses_axes and "step" in self.inputs_of_loss:
            raise ValueError(
                f"policy_loss {self.policy_loss!r} sees all tokens of an optimizer step, so a step has to lie in one "
                f"rollout: steps_per_generation={self.steps_per_generation} is no multiple of "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}"
            )
        if self.overlong_buffer is not None:
            self.overlong_tokens  # noqa: B018, refuses a number that does not fit
        # Trainer reads this name as rows per forward pass; the handout's meaning has been resolved by now.
        self.train_batch_size = self.per_device_train_batch_size * max(1, self.n_gpu)

    def _check_rollout_ahead(self) -> None:
        if not self.rollout_ahead:
            return
        is_served = str(self.use_vllm).lower() == "true" and self.vllm_mode == "server"
        refused = {
            "an engine on GPUs of its own: a colocated one, as HF generate, decodes or lets the policy train (set "
            "use_vllm: true and vllm_mode: server)": not is_served,
            "rollouts of whole optimizer steps (steps_per_generation a multiple of gradient_accumulation_steps)": (
                self.steps_per_generation * self.num_iterations % self.gradient_accumulation_steps != 0
            ),
            "responses of one turn (leave out tools)": bool(self.tools),
            "a correction for old samples (leave out vllm_importance_sampling_correction: false; sampler_weight: "
            "unweighted with sampler_rejection: keep_all does without)": not self.vllm_importance_sampling_correction,
        }
        if needs := [what for what, lacks in refused.items() if lacks]:
            raise ValueError(f"rollout_ahead=1 needs {needs[0]}, or set rollout_ahead: 0")

    @property
    def uses_axes(self) -> bool:
        """Whether the loss is ours; otherwise it is TRL's own."""
        return self.policy_loss is not None

    def check_problem_count(self, problems: int) -> None:
        """Refuse fewer training problems than a rollout has: TRL's `RepeatSampler` drops an incomplete rollout."""
        needed = self.generation_batch_size // self.num_generations
        if problems < needed:
            raise InputError(
                f"a rollout needs {needed} different training problems (rollout_batch_size "
                f"{self.generation_batch_size} in groups of group_size {self.num_generations}), there are {problems}: "
                f"lower rollout_batch_size to {problems * self.num_generations} or less, or give more problems"
            )

    def advantage_fn(self) -> Callable[..., Any]:
        """(P, G) rewards -> (P, G) advantages."""
        return self._build("advantage")

    def selection_fn(self) -> Callable[..., Any] | None:
        """(P, G) rewards -> (P, G) bool, the completions that are trained on; None for all of them."""
        if self.rollout_selection is None and self.dynamic_sampling_tries > 1:
            return SELECTIONS["mixed_groups"]
        return self._build("rollout_selection") if self.rollout_selection else None

    def objective(self) -> Objective:
        """Policy loss, KL and aggregation with their options bound."""
        return Objective(
            policy_loss=self._build("policy_loss"),
            aggregate=self._build("aggregation"),
            kl=self._build("kl_estimator"),
            beta=self.beta,
            kl_bias_correction=self.use_bias_correction_kl,
            kl_by_gradient=self.kl_estimator in BY_GRADIENT,
            off_policy_threshold=self.off_policy_mask_threshold,
        )

    @property
    def overlong_tokens(self) -> int:
        """The number of tokens before the maximum completion length in which a completion is penalized."""
        given = self.overlong_buffer or 0.0
        if given <= 0:
            raise ValueError(f"overlong_buffer must be a positive number of tokens, got {given:g}")
        tokens = round(given * self.max_completion_length) if given < 1 else round(given)
        if tokens > self.max_completion_length:
            raise ValueError(f"overlong_buffer={given:g} is more than sampling_max_tokens={self.max_completion_length}")
        return max(tokens, 1)

    def with_overlong_penalty(self, rewards: Any) -> list[Any]:
        """The reward functions and DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), with the weight 1."""
        functions = list(rewards) if isinstance(rewards, list) else [rewards]
        weights: list[float] | None = self.reward_weights  # type: ignore[has-type]
        if weights is not None and len(weights) == len(functions):
            self.reward_weights = [*weights, 1.0]
        return [*functions, get_soft_overlong_punishment(self.max_completion_length, self.overlong_tokens)]

    @property
    def inputs_of_loss(self) -> tuple[str, ...]:
        """Names of what the policy loss asks for next to its usual inputs."""
        return POLICY_LOSSES.inputs_of(POLICY_LOSSES.get_function(str(self.policy_loss)))

    def sampler_correction(self) -> SamplerCorrection | None:
        """The weight and the rejection for vLLM's mismatch with the trainer; None if nothing or the ratio corrects."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction) or self.old_log_probs == "sampler":
            return None
        return SamplerCorrection(self._build("sampler_weight"), self._build("sampler_rejection"))

    def _build(self, axis: str) -> Callable[..., Any]:
        return AXES[axis].build(getattr(self, axis), self._group, **(getattr(self, f"{axis}_options") or {}))

    @property
    def _group(self) -> int:
        return max(self.num_generations or 0, 2)  # TRL refuses fewer later

    def _resolve_axes(self) -> None:
        """Fill every axis from the preset and the options given next to it; refuse settings without effect."""
        self._build("kl_estimator")  # refuses an unknown name or option
        scale = str(self.scale_rewards).lower()  # type: ignore[has-type]
        self.scale_rewards = {"true": "group", "false": "none"}.get(scale, self.scale_rewards)  # type: ignore[has-type]
        axes = ("advantage", "policy_loss", "aggregation")
        chosen = [name for name in axes if getattr(self, name) or getattr(self, f"{name}_options")]
        if self.preset is None and not chosen:
            check_needs(self, rules_of(type(self)))
            if self.vllm_importance_sampling_mode is None:
                self.vllm_importance_sampling_mode = GRPOConfig.vllm_importance_sampling_mode
            return
        if self.preset is not None and self.preset not in PRESETS:
            raise unknown("preset", self.preset, PRESETS)
        base = PRESETS[self.preset or "grpo_clip"]  # for the axes that a run does not name
        if base.needs_teacher and not self.has_teacher:
            raise ValueError(
                f"preset {self.preset!r} distills, and there is no teacher: give --teacher FOLDER, or --teacher_url"
            )
        for name, value in base.settings.items():
            if not given(self, [name]):
                setattr(self, name, value)
        refuse_ignored(self, TRL)
        take_over_advantage(self, TRL, base.advantage)
        take_over_policy_loss(self, TRL, base.policy_loss, base.policy_loss_options, POLICY_LOSSES)
        for axis in axes:
            self._resolve_axis(axis, getattr(base, axis), getattr(base, f"{axis}_options"))
        check_needs(self, rules_of(type(self)) | TRL)
        self.resolve_distillation()
        if self.rollout_selection:
            SELECTIONS.try_on_example(self.rollout_selection, self._build("rollout_selection"), self._group)
        self._resolve_sampler()
        if "ref_logp" in self.inputs_of_loss and not self.beta:
            raise ValueError(f"policy_loss {self.policy_loss!r} needs the reference model: set beta above 0")
        self.scale_rewards = "none"  # ours replaces it; TRL then logs frac_reward_zero_std per group

    def _resolve_sampler(self) -> None:
        """The two axes of the sampler where none is given: from TRL's mode and bounds, or else the safe pair."""
        if self.old_log_probs not in OLD_LOG_PROBS:
            raise unknown("value of old_log_probs", self.old_log_probs, OLD_LOG_PROBS)
        trl = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")]
        if self.old_log_probs == "sampler":
            self._check_ratio_to_sampler(trl)
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return
        axes = ("sampler_weight", "sampler_rejection")
        pair: tuple[tuple[str, Any], tuple[str, Any]] = ("unweighted", {}), ("keep_all", {})
        corrects = "sampled_logp" in self.inputs_of_loss
        if corrects and self.sampler_weight not in (None, "unweighted"):
            raise ValueError(
                f"sampler_weight={self.sampler_weight!r} would be ignored, because policy_loss {self.policy_loss!r} "
                "corrects for the sampler itself; drop sampler_weight"
            )
        ours = [name for name in axes if getattr(self, name)] + ["policy_loss"] * corrects
        if ours:
            refuse_next_to(self, ours[0], trl)
        elif given(self, trl, off=False):
            mode, *bounds = (getattr(self, name) for name in trl)
            pair = trl_mode(mode or GRPOConfig.vllm_importance_sampling_mode, *bounds)
        elif self.old_log_probs == "policy":
            pair = SAFE_PAIR
        for axis, (name, options) in zip(axes, pair, strict=True):
            self._resolve_axis(axis, name, options)
        reset(self, *trl)

    def _check_ratio_to_sampler(self, trl: list[str]) -> None:
        """Refuse `old_log_probs: sampler` where it does nothing, or where a second correction would come on top."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            lacks = "vllm_importance_sampling_correction" if self.use_vllm else "use_vllm"
            raise ValueError(
                f"old_log_probs='sampler' needs an engine whose log-probabilities are used: set {lacks}: true, or "
                "old_log_probs: policy"
            )
        if not has_ratio_to_old(self._build("policy_loss")):
            has_own = "sampled_logp" in self.inputs_of_loss
            why = "corrects for the sampler itself" if has_own else "has no ratio to the old log-probabilities"
            raise ValueError(
                f"old_log_probs='sampler' would be ignored, because policy_loss {self.policy_loss!r} {why}; set "
                "old_log_probs: policy"
                + ("" if has_own else ", where sampler_weight corrects, or use importance_ratio")
            )
        ours = ("sampler_weight", "sampler_rejection", "sampler_weight_options", "sampler_rejection_options")
        idle: tuple[Any, ...] = (None, "unweighted", "keep_all", {})
        for name, value in given(self, [*ours, *trl], off=False).items():
            if value not in idle:
                raise ValueError(
                    f"{name}={value!r} next to old_log_probs='sampler': the policy loss's ratio is to the sampler "
                    f"already; leave out {name}, or set old_log_probs: policy"
                )

    def _resolve_axis(self, axis: str, name: str, options: Mapping[str, Any]) -> None:
        chosen, own = getattr(self, axis) or name, getattr(self, f"{axis}_options") or {}
        setattr(self, axis, chosen)
        # Another member than the preset's does not inherit the preset's options.
        setattr(self, f"{axis}_options", {**options, **own} if chosen == name else own)
        self._build(axis)  # refuses an unknown name or option
