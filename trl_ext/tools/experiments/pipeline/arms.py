"""Arms of a pipeline: each has a pilot, a rule written down beforehand chooses one, and only that one continues.

An arm is the stages of one name. Its pilot is its first stage, cut off after `pilot_seconds`, from the pipeline's
model; the chosen arm's stages begin with what its pilot has left, and have the rest of the budget.

The rule: the highest accuracy in the validation at the end of the pilots. Of those that are not distinguishable from
it, by at most one standard error of the difference, the one whose accuracy rose fastest in its pilot's last half.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.runs.layout import RunFolder
from trl_ext.runs.summary import ValidationEntry
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage

# Settings of an arm's stage that are for its end; a pilot is as good as its last weights, at the full learning rate.
_OF_THE_END = ("restore_best", "final_validation_problems", "lr_decay_fraction")


def pilots_of(pipeline: Pipeline) -> dict[str, Stage]:
    """The stage that is each arm's pilot, by arm; empty without arms."""
    pilots: dict[str, Stage] = {}
    for stage in pipeline.stages:
        if stage.arm is not None and stage.arm not in pilots:
            assert pipeline.pilot_seconds is not None
            assert pipeline.time_budget is not None
            kept = {name: value for name, value in stage.settings.items() if name not in _OF_THE_END}
            share = pipeline.pilot_seconds / pipeline.time_budget
            pilots[stage.arm] = dataclasses.replace(stage, settings=kept | {"restore_best": False}, share=share)
    return pilots


def pilot_name(arm: str) -> str:
    """The folder of an arm's pilot, and its entry in the record."""
    return f"0_{arm}"


def with_chosen_arm(pipeline: Pipeline, record: Mapping[str, Any]) -> Pipeline:
    """The pipeline without the arms that were not chosen; as it is while none is."""
    if "decision" not in record:
        return pipeline
    arm = record["decision"]["arm"]
    stages = [dataclasses.replace(stage, arm=None) for stage in pipeline.stages if stage.arm == arm]
    return dataclasses.replace(pipeline, stages=stages, pilot_seconds=None)


def decision(folder: Path, pipeline: Pipeline, record: Mapping[str, Any]) -> dict[str, Any]:
    """The chosen arm, and what it was chosen by; all pilots must have ended."""
    curves = {}
    for arm in pilots_of(pipeline):
        pilot = folder / record[pilot_name(arm)]["folder"]
        curves[arm] = RunFolder(pilot).summary()["validations"]
        if not curves[arm]:
            raise InputError(f"{pilot}: no validation of arm {arm}; set validate_every in its first stage")
    measured = {
        arm: {
            "accuracy": curve[-1]["accuracy"],
            "problems": curve[-1]["problems"],
            "slope_per_hour": slope_of_last_half(curve),
        }
        for arm, curve in curves.items()
    }
    return {"arm": choose(measured), "pilots": measured}


def choose(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The arm by the rule; of equal ones the first."""
    best = max(measured.values(), key=lambda one: float(one["accuracy"]))

    def is_as_good(one: Mapping[str, Any]) -> bool:
        variance = sum(x["accuracy"] * (1 - x["accuracy"]) / x["problems"] for x in (best, one))
        return bool(best["accuracy"] - one["accuracy"] <= math.sqrt(variance))

    as_good = [arm for arm, one in measured.items() if is_as_good(one)]
    return max(as_good, key=lambda arm: float(measured[arm]["slope_per_hour"]))


def slope_of_last_half(curve: Sequence[ValidationEntry]) -> float:
    """Accuracy gained per hour from the last validation in the first half of the time between first and last."""
    first, last = curve[0], curve[-1]
    middle = (first["wall_clock_s"] + last["wall_clock_s"]) / 2
    begin = [entry for entry in curve if entry["wall_clock_s"] <= middle][-1]
    seconds = last["wall_clock_s"] - begin["wall_clock_s"]
    return 3600 * (last["accuracy"] - begin["accuracy"]) / seconds if seconds else 0.0
