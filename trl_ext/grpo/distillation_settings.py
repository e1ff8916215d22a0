"""Settings of teachers and of what is learned from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_ext.algorithms.distillation import DISTILLATIONS, Distillation, is_divergence
from trl_ext.algorithms.policy_losses import POLICY_LOSSES, keeps_advantages_of_tokens
from trl_ext.compat.given import given
from trl_ext.registry import unknown
from trl_ext.setting import Group, OnResume, setting
from trl_ext.training.settings import RunSettings

ROLLOUTS = ("all", "correct", "incorrect")
_ADDRESS = re.compile("https?://")
_NAMED = re.compile(r"(?P<name>\w+)=(?P<value>.+)")


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
    teacher_url: str | None = setting(
        None,
        (
            "Distill from the model of this vLLM server, such as http://host:8000. Several are separated by commas and "
            "may have names, next to those of teacher. It tells probabilities at temperature 1; its key, if it has "
            "one, is VLLM_API_KEY of the environment."
        ),
        Group.DISTILLATION,
        on_resume=OnResume.MAY_CHANGE,
        needs="uses_axes",
    )
    validate_teachers: bool = setting(
        False,
        "Measure each teacher on the validation problems before the training: the ceiling, in the curve and the card.",
        Group.DISTILLATION,
        on_resume=OnResume.MAY_CHANGE,
        needs="has_teacher",
        rare=True,
    )
    teacher_column: str | None = setting(
        None,
        "The dataset's column that names each problem's teacher. Without it, all teach every problem.",
        Group.DISTILLATION,
        needs="has_teacher",
        rare=True,
    )
    teacher_weights: list[float] | None = setting(
        None,
        "The weight of each teacher, such as 0.7 0.3. By default their mean counts.",
        Group.DISTILLATION,
        needs="has_teacher",
        rare=True,
    )
    teacher_init_kwargs: dict[str, Any] | str | None = setting(
        None,
        "How teachers are loaded, such as dtype=bfloat16 or load_in_8bit=true. The rest is as for the policy.",
        Group.DISTILLATION,
        needs="has_teacher",
        rare=True,
    )
    distillation: str | None = setting(
        None,
        (
            "What is learned from the teacher; reverse_kl if there is one. One of: "
            f"{', '.join(sorted(DISTILLATIONS))}, or file.py:function."
        ),
        Group.DISTILLATION,
        needs="has_teacher",
    )
    distillation_options: dict[str, Any] | str | None = setting(
        None,
        "Options of distillation: a mapping, JSON or name=value,...",
        Group.DISTILLATION,
        needs="has_teacher",
        rare=True,
    )
    distillation_coef: float = setting(
        1.0,
        "The teacher's weight next to the reward's advantage.",
        Group.DISTILLATION,
        needs="has_teacher",
        within="[0, inf)",
    )
    distillation_coef_end: float | None = setting(
        None,
        "Change distillation_coef linearly to this one over the run's max_steps.",
        Group.DISTILLATION,
        needs="has_teacher",
        within="[0, inf)",
        rare=True,
    )
    distill_rollouts: str = setting(
        "all",
        f"Which completions the teacher's values are used of. One of: {', '.join(ROLLOUTS)}.",
        Group.DISTILLATION,
        needs="has_teacher",
        rare=True,
    )
    teacher_top_k: int = setting(
        64,
        "The number of the teacher's most probable tokens that divergences are of; the others count as one.",
        Group.DISTILLATION,
        needs="has_teacher",
        within="[1, inf)",
        rare=True,
    )

    def resolve_distillation(self) -> None:
        """Choose what is learned from a teacher, and check all that can be checked without it."""
        if not self.has_teacher:
            return
        if self.teacher_url is not None and self.temperature != 1:  # type: ignore[attr-defined]
            raise ValueError(
                f"teacher_url: a server tells probabilities at temperature 1, and the policy samples at "
                f"{self.temperature:g}; set temperature 1, or load the teacher here with teacher"  # type: ignore[attr-defined]
            )
        self.distillation = self.distillation or "reverse_kl"
        count, member = len(self.teacher_models) + len(self.teacher_urls), self.distillation_fn()
        if not fits_loss(member, POLICY_LOSSES.get_function(self.policy_loss)):  # type: ignore[attr-defined]
            raise ValueError(
                f"policy_loss {self.policy_loss!r} has the ratio of a whole response, which would give each token the "  # type: ignore[attr-defined]
                f"mean of the advantages of {self.distillation!r}: use gspo_token or ppo_clip, or distillation "
                "reverse_kl_mean or jensen_shannon"
            )
        if self.distill_rollouts not in ROLLOUTS:
            raise unknown("value of distill_rollouts", self.distill_rollouts, ROLLOUTS)
        if given(self, ["teacher_top_k"], off=False) and not is_divergence(member):
            raise ValueError(f"teacher_top_k={self.teacher_top_k} needs a divergence, not {self.distillation!r}")
        if self.teacher_weights is not None and self.teacher_column is not None:
            raise ValueError("teacher_weights and teacher_column: a problem has one teacher, or all; leave one out")
        if self.teacher_weights is not None and len(self.teacher_weights) != count:
            raise ValueError(f"teacher_weights has {len(self.teacher_weights)} for {count} teachers")
        if self.distillation_coef_end is not None and self.max_steps <= 0:  # type: ignore[attr-defined]
            raise ValueError("distillation_coef_end needs max_steps, over which the coefficient changes")

    @property
    def has_teacher(self) -> bool:
        """Whether there is one, here or behind a server."""
        return self.teacher is not None or self.teacher_url is not None

    @property
    def learns_divergence(self) -> bool:
        """Whether probabilities of several tokens at each place are learned from, and not of the sampled one alone."""
        return self.has_teacher and is_divergence(self.distillation_fn())

    @property
    def teacher_models(self) -> dict[str, str]:
        """Folder or Hub id of each teacher in this process, by its name.

        Raises:
            ValueError: two have the same name, or one has none that `teacher_column` could have, or is an address.
        """
        models = self._named("teacher", lambda model: model.rstrip("/").rpartition("/")[2])
        for model in models.values():
            if _ADDRESS.match(model):
                raise ValueError(f"teacher {model!r} is an address: use teacher_url for a server")
        return models

    @property
    def teacher_urls(self) -> dict[str, str]:
        """The address of each teacher behind a server, by its name.

        Raises:
            ValueError: as of `teacher_models`, or one is no address.
        """
        urls = self._named("teacher_url", lambda _: "teacher")  # an address may change, and is nobody else's business
        for url in urls.values():
            if not _ADDRESS.match(url):
                raise ValueError(f"teacher_url {url!r} is no address, such as http://host:8000")
        if twice := sorted(urls.keys() & self.teacher_models.keys()):
            raise ValueError(
                f"teacher and teacher_url: {twice[0]!r} is there twice; name them: a=FOLDER, b=http://HOST"
            )
        return urls

    def _named(self, setting_name: str, usual_name: Callable[[str], str]) -> dict[str, str]:
        entries = dict[str, str]()
        listed: str | None = getattr(self, setting_name)
        for entry in (part.strip() for part in (listed or "").split(",") if listed is not None):
            match = _NAMED.fullmatch(entry)
            if self.teacher_column is not None and match is None:
                raise ValueError(f"{setting_name} {entry!r} has no name for {self.teacher_column!r}: NAME={entry}")
            value = match["value"] if match else entry
            name = match["name"] if match else usual_name(value)
            if not value:
                raise ValueError(f"{setting_name} {listed!r} has an empty entry")
            if name in entries:
                raise ValueError(f"{setting_name} {listed!r}: {name!r} is there twice; name them: a=...,b=...")
            entries[name] = value
        return entries

    def distillation_fn(self) -> Callable[..., Any]:
        """The member of `DISTILLATIONS` with its options bound."""
        options = self.distillation_options
        return DISTILLATIONS.build(str(self.distillation), **(options if isinstance(options, dict) else {}))

    def distill(self) -> Distillation | None:
        """What is learned from teachers; None without one."""
        if not self.has_teacher:
            return None
        ends = self.distillation_coef, self.distillation_coef_end
        return Distillation(self.distillation_fn(), ends[0], ends[0] if ends[1] is None else ends[1])


def fits_loss(member: Callable[..., Any], policy_loss: Callable[..., Any]) -> bool:
    """Whether what a member of `DISTILLATIONS` says of single tokens reaches them through a policy loss."""
    of_tokens = not is_divergence(member) and not getattr(member, "of_response", False)
    return not of_tokens or keeps_advantages_of_tokens(policy_loss)
