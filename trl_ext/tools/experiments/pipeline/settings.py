"""What a pipeline of recipes is: its stages and their shares of one budget, from a YAML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_ext.io import read_yaml
from trl_ext.tools.experiments.runspec import RunSpec, checked_fields, from_fields, named_in_errors, refuse_taken

TAKEN_TOO = ("model_name_or_path", "time_budget")  # settings that the pipeline gives a stage next to `TAKEN`


@dataclass(frozen=True)
class Stage(RunSpec):
    """One recipe of the pipeline."""

    share: float | None = None  # of the pipeline's time budget; None for what is left
    arm: str | None = None  # of which it is a stage, see `trl_ext.tools.experiments.pipeline.arms`

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_taken(self.settings, "the pipeline", TAKEN_TOO)


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
    with named_in_errors(path):
        written = read_yaml(path)
        if isinstance(written, dict):  # a name with nothing behind it, such as `launch:`, is left out
            written = {name: value for name, value in written.items() if value is not None}
        content = checked_fields(written, Pipeline) | {k: v for k, v in given.items() if v is not None}
        stages = []
        for number, stage in enumerate(content.pop("stages", []), start=1):
            with named_in_errors(f"stage {number}"):
                stages.append(from_fields(stage, Stage))
        return Pipeline(**{"output_dir": f"runs/{path.stem}", "stages": stages, **content})
