"""A pipeline of recipes under rules, with a wall-clock budget that is never overrun and a result at every moment.

`result.json` in the pipeline's folder is whole at any time: it says how good the best model on the disk is, on how many
problems that was measured, and whether that is a result by the rules yet. A checkpoint that it names is linked into
`best_so_far/` first, since the stage continues and removes its own, even for seconds after a kill -9 of the pipeline.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.io import read_json, write_json
from trl_ext.redaction import redact
from trl_ext.registry import unknown
from trl_ext.runs.checkpoints import checkpoints, link_model
from trl_ext.runs.clock import Clock
from trl_ext.runs.layout import RunFolder, checkpoint_name, record_in
from trl_ext.runs.provenance import provenance
from trl_ext.runs.summary import ValidationEntry, weights_step
from trl_ext.runs.tables_and_plots import selection_note
from trl_ext.tools.experiments.pipeline.arms import with_chosen_arm
from trl_ext.tools.experiments.pipeline.record import (
    OTHER,
    elapsed_seconds,
    last_stage_finished,
    load_or_create,
    read_record,
    stages_left,
)
from trl_ext.tools.experiments.pipeline.run import run_pipeline
from trl_ext.tools.experiments.pipeline.settings import Pipeline
from trl_ext.tools.experiments.rules import RULES, Rules

RESULT = "result.json"
BEST = "best_so_far"
_GRACE = 3.0  # seconds before the deadline at which a stage that is still running is killed: it is looked at every one


class OutOfTimeError(Exception):
    """The budget ends now, whatever is running."""


def check_pipeline(pipeline: Pipeline) -> Rules:
    """The rules of a pipeline; an InputError if it breaks them. Its stages are checked when it runs."""
    name = pipeline.rules
    if name not in RULES:
        raise InputError(str(unknown("rules", str(name), RULES)))
    rules = RULES[name]
    broken = []
    if not rules.has_model(pipeline.model_name_or_path):
        broken.append(f"model_name_or_path must be {rules.model!r}, is {pipeline.model_name_or_path!r}")
    if pipeline.time_budget is None or pipeline.time_budget > rules.seconds:
        broken.append(f"time_budget must be at most {rules.seconds:.0f} s, is {pipeline.time_budget}")
    processes = processes_of(pipeline.launch)
    if processes > rules.processes:
        broken.append(f"launch must start at most {rules.processes} processes, starts {processes}")
    if broken:
        raise InputError(f"the rules {name!r} are broken: {'; '.join(broken)}")
    return rules


def processes_of(launch: list[str]) -> int:
    """How many processes options of `accelerate launch` ask for; without a number it takes one per GPU."""
    if not launch:
        return 1
    import torch  # slow to import, and `--help` does not need it

    from trl_ext.hosts.launch import asked_for

    processes = asked_for([*launch, "recipe"]).processes
    return processes or (1 if "--cpu" in launch else max(1, torch.cuda.device_count()))


def run_leaderboard(pipeline: Pipeline, recipes: Path) -> dict[str, Any]:
    """Run the pipeline, or what is left of it, and return the result.

    Raises:
        InputError: a rule is broken, the folder has models of another pipeline, or a stage did not end well.
        Stopped: SIGTERM came.
    """
    rules, folder = check_pipeline(pipeline), Path(pipeline.output_dir)
    record = load_or_create(folder, pipeline)
    if read_record(folder).get("stages", record["stages"]) != record["stages"] and any(candidates(folder)):
        raise InputError(f"{folder} {OTHER}")
    clock, left = Clock(elapsed_seconds(folder)), stages_left(with_chosen_arm(pipeline, record), record)
    assert pipeline.time_budget is not None
    if (folder / RESULT).exists():
        result: dict[str, Any] = read_json(folder / RESULT)
        if not left and result["status"] == "complete":
            return result
        if left and clock.seconds() >= pipeline.time_budget:
            return _write(folder, result | {"status": "out of time"})  # no later than it was measured
    seen: list[dict[str, Any]] = []

    def watch() -> None:
        is_ended = last_stage_finished(with_chosen_arm(pipeline, read_record(folder)))
        if clock.seconds() > float(pipeline.time_budget or 0.0) - (0.0 if is_ended else _GRACE):
            raise OutOfTimeError
        measurements = list(candidates(folder))
        if measurements != seen:
            seen[:] = measurements
            write_result(folder, pipeline.rules, rules, clock, "running")

    write_result(folder, pipeline.rules, rules, clock, "running")
    status = "interrupted"
    try:
        run_pipeline(pipeline, recipes, spent=Clock().seconds(), watch=watch)
        status = "complete"
    except OutOfTimeError:
        status = "out of time"
    finally:
        result = write_result(folder, pipeline.rules, rules, clock, status)
    return result


def candidates(folder: Path) -> Iterator[dict[str, Any]]:
    """Every model on the disk that was validated: accuracy, problems, step, stage and where it is."""
    for stage in sorted(path for path in folder.glob("[0-9]*_*") if path.is_dir()):
        for checkpoint in checkpoints(stage):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                for entry in (record_in(checkpoint) or {"validations": []})["validations"]:  # TRL's own has none
                    if checkpoint.name == checkpoint_name(entry["step"]):
                        yield _candidate(folder, checkpoint, entry)
        if RunFolder(stage).is_finished:
            yield _candidate(folder, stage, RunFolder(stage).summary()["validations"][-1])


def _candidate(folder: Path, model: Path, entry: ValidationEntry) -> dict[str, Any]:
    stage, *checkpoint = model.relative_to(folder).parts
    return {
        "accuracy": entry["accuracy"],
        "problems": entry["problems"],
        "step": weights_step(entry),
        "stage": stage,
        "selection": entry.get("selection"),
        "is_last": not checkpoint,
        "model": model.relative_to(folder).as_posix(),
    }


def best(measurements: list[dict[str, Any]], problems: int) -> dict[str, Any] | None:
    """What was measured on all problems comes first; None where there is nothing.

    Of the stages' last measurements on all problems it is the latest stage's, whatever they say: the highest would be
    too high in the mean. Of others, none of which is a result by the rules in the end, it is the best accuracy.
    """

    def merit(one: dict[str, Any]) -> tuple[bool, bool, int, float]:
        is_whole = one["problems"] == problems
        is_end = is_whole and one.get("is_last", False)
        return is_whole, is_end, int(one["stage"].partition("_")[0]) if is_end else 0, one["accuracy"]

    return max(measurements, key=merit, default=None)


def bias(chosen: dict[str, Any]) -> str | None:
    """What makes a candidate's accuracy too high, in a sentence; None where nothing was chosen by it."""
    if chosen["accuracy"] is None:
        return None
    if chosen.pop("is_last"):
        return selection_note(chosen["selection"], chosen["problems"])
    return "The model was chosen by this accuracy among those of its validations, so it is too high."


def write_result(folder: Path, name: str | None, rules: Rules, clock: Clock, status: str) -> dict[str, Any]:
    """Write `result.json` atomically and return it."""
    chosen = _keep_best(folder, rules.problems)
    seconds, why_not = clock.seconds(), None
    if chosen["problems"] != rules.problems:
        why_not = f"measured on {chosen['problems']} of {rules.problems} problems"
    elif seconds > rules.seconds:
        why_not = f"took {seconds:.1f} of {rules.seconds:.0f} s"
    said = bias(chosen)
    result = {
        "rules": name,
        "status": status,
        "is_by_the_rules": why_not is None,
        "why_not": why_not,
        **chosen,
        "bias": said,
        "seconds": round(seconds, 1),
        "seconds_allowed": rules.seconds,
        **provenance(),
    }
    _write(folder, result)
    for older in (folder / BEST).glob("[0-9]*"):
        if older != folder / str(chosen["model"]):
            shutil.rmtree(older)
    return result


def _keep_best(folder: Path, problems: int) -> dict[str, Any]:
    """The best candidate, its model where nobody removes it."""
    while chosen := best(list(candidates(folder)), problems):
        model = folder / chosen["model"]
        if model.parent == folder:  # a stage's own, which stays
            return chosen
        kept = folder / BEST / str(1 + max((int(path.name) for path in (folder / BEST).glob("[0-9]*")), default=0))
        with contextlib.suppress(FileNotFoundError):  # the stage has removed it: there is another one
            link_model(model, kept)
            return chosen | {"model": kept.relative_to(folder).as_posix()}
    return {"accuracy": None, "problems": 0, "step": None, "stage": None, "model": None}


def _write(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RESULT, redact(result))
    return result
