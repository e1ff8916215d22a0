"""What a pipeline of recipes is: its stages and their shares of one budget, from a YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import InputError
from trl_ext.io import as_flags, read_yaml
from trl_ext.registry import check_fields, unknown
from trl_ext.runs.recipes import RECIPES

_OURS = ("output_dir", "model_name_or_path", "time_budget", "resume", "seed")  # which the pipeline gives a stage


@dataclass(frozen=True)
class Stage:
    """One recipe of the pipeline."""

    recipe: str  # a name of `RECIPES`
    config: str | None = None  # its YAML file; None for the recipe's own
    share: float | None = None  # of the pipeline's time budget; None for what is left
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of its settings, by name
    arm: str | None = None  # of which it is a stage, see `trl_ext.tools.experiments.pipeline.arms`

    def arguments(self) -> list[str]:
        """Its settings as a command line."""
        return [*([] if self.config is None else ["--config", self.config]), *as_flags(self.settings)]


@dataclass(frozen=True)
class Pipeline:
    """The pipeline."""

    stages: list[Stage]
    output_dir: str
    model_name_or_path: str | None = None  # what the first stage starts from; None for the base policy, built locally
    time_budget: float | None = None  # seconds, checks, start-up, validation and saving included; None for no limit
    launch: list[str] = field(default_factory=list)  # options of `accelerate launch`; a single process without any
    seed: int = 0
    rules: str | None = None  # those of `trl_ext.tools.experiments.rules` that every stage has to keep to
    pilot_seconds: float | None = None  # of each arm, out of the time budget

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages: at least one is needed")
        if isinstance(self.launch, str):
            raise ValueError(f"launch must be a list of options, got {self.launch!r}")
        if self.time_budget is not None and self.time_budget <= 0:
            raise ValueError(f"time_budget must be positive seconds, got {self.time_budget}")
        self._check_arms()
        for arm in dict.fromkeys(stage.arm for stage in self.stages):
            self._check_shares([stage for stage in self.stages if stage.arm == arm])

    def _check_shares(self, stages: list[Stage]) -> None:
        """Of stages that follow each other."""
        shares = [stage.share for stage in stages if stage.share is not None]
        if any(not 0 < share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise ValueError(f"shares of the time budget must be above 0 and at most 1 together, got {shares}")
        if shares and self.time_budget is None:
            raise ValueError("share needs a time_budget")
        if self.time_budget is not None and any(stage.share is None for stage in stages[:-1]):
            raise ValueError("every stage but the last needs a share of the time_budget, or it would take all of it")
        if stages[-1].share is None and sum(shares) > 1 - 1e-9:
            raise ValueError(f"the shares {shares} leave nothing of the time budget for the last stage")

    def _check_arms(self) -> None:
        arms = list(dict.fromkeys(stage.arm for stage in self.stages))
        if arms == [None]:
            if self.pilot_seconds is not None:
                raise ValueError("pilot_seconds: no stage has an arm to be a pilot of; give each stage an `arm`")
            return
        if None in arms or len(arms) < 2:
            raise ValueError(f"arm: every stage needs one, and two at least are compared, got {arms}")
        if wrong := [arm for arm in arms if not re.fullmatch(r"[A-Za-z0-9_.-]+", str(arm))]:
            raise ValueError(f"arm: {wrong[0]!r} must be letters, digits and any of _ . -, for a folder is called so")
        if self.time_budget is None or self.pilot_seconds is None:
            raise ValueError("arms need pilot_seconds and a time_budget that these are a part of")
        if self.pilot_seconds <= 0 or len(arms) * self.pilot_seconds >= self.time_budget:
            raise ValueError(
                f"pilot_seconds must be positive, and {len(arms)} pilots leave some of the time_budget of "
                f"{self.time_budget} s to the chosen arm, got {self.pilot_seconds}"
            )
        for arm in arms:
            shares = [stage.share for stage in self.stages if stage.arm == arm]
            taken = sum(share or 0.0 for share in shares) + len(arms) * self.pilot_seconds / self.time_budget
            if taken > 1 + 1e-9 or (shares[-1] is None and taken > 1 - 1e-9):
                raise ValueError(
                    f"arm {arm}: its shares {shares} and {len(arms)} pilots of {self.pilot_seconds} s take {taken:.0%} "
                    f"of the time_budget of {self.time_budget} s and leave its last stage too little; lower one of them"
                )


def read_pipeline(path: Path, **given: Any) -> Pipeline:
    """The pipeline of a YAML file, with what is given in place of its own; an InputError names stage and field."""
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise ValueError("not a mapping")
        settings = {"output_dir": f"runs/{path.stem}"} | content | {k: v for k, v in given.items() if v is not None}
        check_fields(settings, Pipeline)
        listed = settings.pop("stages", None) or []
        stages = [_read_stage(number, stage) for number, stage in enumerate(listed, start=1)]
        return Pipeline(stages=stages, **settings)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error


def _read_stage(number: int, content: Any) -> Stage:
    try:
        if not isinstance(content, Mapping):
            raise ValueError(f"not a mapping: {content!r}")
        check_fields(content, Stage)
        stage = Stage(**content)
        if stage.recipe not in RECIPES:
            raise unknown("recipe", stage.recipe, RECIPES)
        if not isinstance(stage.settings, Mapping):
            raise ValueError(f"settings must be a mapping, got {stage.settings!r}")
        taken = [name for name in stage.settings if name.replace("-", "_") in _OURS]
        if taken:
            raise ValueError(f"settings {', '.join(taken)} are set by the pipeline; remove them from the stage")
        return stage
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"stage {number}: {error}") from error
