"""Settings of teachers and of what is learned from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_ext.algorithms.distillation import DISTILLATIONS, Distillation
from trl_ext.algorithms.policy_losses import POLICY_LOSSES, keeps_advantages_of_tokens
from trl_ext.compat.given import given
from trl_ext.registry import unknown
from trl_ext.setting import Group, setting
from trl_ext.training.settings import RunSettings

ROLLOUTS = ("all", "correct", "incorrect")
_NAMED = re.compile(r"(?P<name>\w+)=(?P<model>.+)")


@dataclass
class DistillationSettings(RunSettings):
    """Mixin for the config of a trainer that samples from the policy."""

    teacher: str | None = setting(
        None,
        (
            "Distill from this model: a folder or a Hub id with the policy's tokenizer. Several are separated by "
            "commas, and may have names: math=FOLDER,code=FOLDER."
        ),
        Group.DISTILLATION,
        needs="uses_axes",
    )
    teacher_column: str | None = setting(
        None,
        "The dataset's column that names each problem's teacher. Without it, all teach every problem.",
        Group.DISTILLATION,
        needs="teacher",
        rare=True,
    )
    teacher_weights: list[float] | None = setting(
        None,
        "The weight of each teacher, such as 0.7 0.3. By default their mean counts.",
        Group.DISTILLATION,
        needs="teacher",
        rare=True,
    )
    teacher_init_kwargs: dict[str, Any] | str | None = setting(
        None,
        "How teachers are loaded, such as dtype=bfloat16 or load_in_8bit=true. The rest is as for the policy.",
        Group.DISTILLATION,
        needs="teacher",
        rare=True,
    )
    distillation: str | None = setting(
        None,
        (
            "What is learned from the teacher; reverse_kl if there is one. One of: "
            f"{', '.join(sorted(DISTILLATIONS))}, or file.py:function."
        ),
        Group.DISTILLATION,
        needs="teacher",
    )
    distillation_options: dict[str, Any] | str | None = setting(
        None,
        "Options of distillation: a mapping, JSON or name=value,...",
        Group.DISTILLATION,
        needs="teacher",
        rare=True,
    )
    distillation_coef: float = setting(
        1.0,
        "The teacher's weight next to the reward's advantage.",
        Group.DISTILLATION,
        needs="teacher",
        within="[0, inf)",
    )
    distillation_coef_end: float | None = setting(
        None,
        "Change distillation_coef linearly to this one over the run's max_steps.",
        Group.DISTILLATION,
        needs="teacher",
        within="[0, inf)",
        rare=True,
    )
    distill_rollouts: str = setting(
        "all",
        f"Which completions the teacher's values are used of. One of: {', '.join(ROLLOUTS)}.",
        Group.DISTILLATION,
        needs="teacher",
        rare=True,
    )
    teacher_top_k: int = setting(
        64,
        "The number of the teacher's most probable tokens that divergences are of; the others count as one.",
        Group.DISTILLATION,
        needs="teacher",
        within="[1, inf)",
        rare=True,
    )

    def resolve_distillation(self) -> None:
        """Choose what is learned from a teacher, and check all that can be checked without it."""
        if self.teacher is None:
            return
        self.distillation = self.distillation or "reverse_kl"
        models, member = self.teachers, self.distillation_fn()
        if not fits_loss(member, POLICY_LOSSES.get_function(self.policy_loss)):  # type: ignore[attr-defined]
            raise ValueError(
                f"policy_loss {self.policy_loss!r} has the ratio of a whole response, which would give each token the "  # type: ignore[attr-defined]
                f"mean of the advantages of {self.distillation!r}: use gspo_token or ppo_clip, or distillation "
                "reverse_kl_mean or jensen_shannon"
            )
        if self.distill_rollouts not in ROLLOUTS:
            raise unknown("value of distill_rollouts", self.distill_rollouts, ROLLOUTS)
        if given(self, ["teacher_top_k"], off=False) and not needs_events(member):
            raise ValueError(f"teacher_top_k={self.teacher_top_k} needs a divergence, not {self.distillation!r}")
        if self.teacher_weights is not None and self.teacher_column is not None:
            raise ValueError("teacher_weights and teacher_column: a problem has one teacher, or all; leave one out")
        if self.teacher_weights is not None and len(self.teacher_weights) != len(models):
            raise ValueError(f"teacher_weights has {len(self.teacher_weights)} for {len(models)} teachers")
        if self.distillation_coef_end is not None and self.max_steps <= 0:  # type: ignore[attr-defined]
            raise ValueError("distillation_coef_end needs max_steps, over which the coefficient changes")

    @property
    def teachers(self) -> dict[str, str]:
        """Folder or Hub id of each teacher, by its name.

        Raises:
            ValueError: two have the same name, or one has none that `teacher_column` could have.
        """
        models = dict[str, str]()
        for entry in (self.teacher or "").split(","):
            match = _NAMED.fullmatch(entry.strip())
            if self.teacher_column is not None and match is None:
                raise ValueError(
                    f"teacher {entry.strip()!r} has no name for {self.teacher_column!r}: NAME={entry.strip()}"
                )
            model = match["model"] if match else entry.strip()
            name = match["name"] if match else model.rstrip("/").rpartition("/")[2]
            if not model or name in models:
                raise ValueError(f"teacher {self.teacher!r}: {name!r} is there twice; name them: a=FOLDER,b=FOLDER")
            models[name] = model
        return models

    def distillation_fn(self) -> Callable[..., Any]:
        """The member of `DISTILLATIONS` with its options bound."""
        options = self.distillation_options
        return DISTILLATIONS.build(str(self.distillation), **(options if isinstance(options, dict) else {}))

    def distill(self) -> Distillation | None:
        """What is learned from teachers; None without one."""
        if self.teacher is None:
            return None
        ends = self.distillation_coef, self.distillation_coef_end
        return Distillation(self.distillation_fn(), ends[0], ends[0] if ends[1] is None else ends[1])


def fits_loss(member: Callable[..., Any], policy_loss: Callable[..., Any]) -> bool:
    """Whether what a member of `DISTILLATIONS` says of single tokens reaches them through a policy loss."""
    of_tokens = not needs_events(member) and not getattr(member, "of_response", False)
    return not of_tokens or keeps_advantages_of_tokens(policy_loss)


def needs_events(member: Callable[..., Any]) -> bool:
    """Whether a member of `DISTILLATIONS` is of probabilities of several tokens at each place."""
    return bool(getattr(member, "of_distribution", False))
