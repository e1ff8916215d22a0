"""A pipeline of recipes, each starting from the model of the one before, with one wall-clock budget for all of them.

Every stage is a process of its own, launched as by hand, in a folder of its own under the pipeline's.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.runs.layout import CURVE, SUMMARY, RunFolder, finished
from trl_ext.runs.provenance import provenance
from trl_ext.runs.summary import RunSummary, ValidationEntry, write_summary
from trl_ext.runs.tables_and_plots import write_curve
from trl_ext.tools.experiments.pipeline.arms import decision, pilot_name, pilots_of, with_chosen_arm
from trl_ext.tools.experiments.pipeline.record import (
    NOT_STAGES,
    entry_seconds,
    load_or_create,
    name_of,
    resume_point,
    stages_left,
    write_record,
)
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage
from trl_ext.tools.experiments.preflight import check_runs
from trl_ext.tools.experiments.process import run_stage

_END = 4.0  # seconds for the report of all stages, and more than a leaderboard ends what still runs before its budget


def run_pipeline(
    pipeline: Pipeline, recipes: Path, spent: float = 0.0, watch: Callable[[], None] = lambda: None
) -> RunSummary:
    """Run the pilots and stages that are not done yet, and report on all of them. Returns the summary.

    Started again after an interruption it resumes in the stage where it was, with the time that is left.

    Args:
        recipes: the folder with the recipes' scripts.
        spent: seconds that this process took before.
        watch: called every second while a stage runs, and between two stages; what it raises ends the pipeline at once.

    Raises:
        InputError: the settings of a stage do not fit together, or a stage did not end well.
        Stopped: SIGTERM came; the stage has saved a checkpoint.
    """
    folder = Path(pipeline.output_dir)
    record = load_or_create(folder, pipeline)
    began = time.time() - spent - record.get("overhead", {}).get("seconds", 0.0)
    todo = stages_left(with_chosen_arm(pipeline, record), record)
    folder.mkdir(parents=True, exist_ok=True)
    if todo:
        _record_overhead(folder, record, began)  # the checks take long enough to be killed during them
        _check_stages(pipeline)
        _record_overhead(folder, record, began)
    model = pipeline.model_name_or_path
    if pilots := pilots_of(pipeline):
        if "decision" not in record:
            _run_pilots(pipeline, pilots, recipes, record, watch)
        model = str(folder / record[pilot_name(record["decision"]["arm"])]["folder"])
        pipeline = with_chosen_arm(pipeline, record)
    for number, stage in enumerate(pipeline.stages, start=1):
        name = name_of(number, stage)
        if "seconds" not in record.get(name, {}):
            print(f"stage {number} of {len(pipeline.stages)}: {stage.recipe}", flush=True)
            _run_one(pipeline, name, stage, recipes, model, record, watch)
            if number < len(pipeline.stages):
                watch()
        model = str(folder / record[name]["folder"])
    return _report(folder, pipeline, record)


def _run_pilots(
    pipeline: Pipeline,
    pilots: Mapping[str, Stage],
    recipes: Path,
    record: dict[str, Any],
    watch: Callable[[], None],
) -> None:
    """Run the pilots that are not done, and record which arm the rule chooses."""
    folder = Path(pipeline.output_dir)
    for arm, stage in pilots.items():
        if "seconds" not in record.get(pilot_name(arm), {}):
            print(f"pilot of {arm}: {stage.recipe}, {pipeline.pilot_seconds:.0f} s", flush=True)
            _run_one(pipeline, pilot_name(arm), stage, recipes, pipeline.model_name_or_path, record, watch)
            watch()
    record["decision"] = decision(folder, pipeline, record)
    write_record(folder, record)
    for arm, one in record["decision"]["pilots"].items():
        print(
            f"{arm}: {one['accuracy']:.3f} of {one['problems']}, {one['slope_per_hour']:+.2f} an hour in its last half"
        )
    print(f"chosen: {record['decision']['arm']}", flush=True)


def _record_overhead(folder: Path, record: dict[str, Any], began: float) -> None:
    record["overhead"] = {"seconds": round(time.time() - began, 1)}
    write_record(folder, record)


def _run_one(
    pipeline: Pipeline,
    name: str,
    stage: Stage,
    recipes: Path,
    model: str | None,
    record: dict[str, Any],
    watch: Callable[[], None],
) -> None:
    """Run the stage of that name, or what is left of it, from a model."""
    folder = Path(pipeline.output_dir)
    entry = record.pop(name, {"earlier": 0.0})
    if "time_budget" not in entry:
        entry["time_budget"] = _budget(pipeline, stage, record)  # by what the others have used
    record[name] = entry
    output, on_clock = resume_point(folder / name)
    # seconds of processes that were interrupted; one that was killed has left how far it was
    entry["earlier"] = max(entry["earlier"] + entry.pop("running", 0.0), on_clock)
    write_record(folder, record)
    budget = _budget_of_process(entry, on_clock, _left(pipeline, stage, record))
    began = time.time()

    def tick() -> None:
        entry["running"] = round(time.time() - began, 1)
        write_record(folder, record)
        watch()

    try:
        run_stage(_command(pipeline, stage, recipes, output, model, budget), name, tick)
        run = finished(output)
        assert run is not None  # a stage that ends well has written its summary
        entry |= {"folder": run.path.name, "seconds": round(entry["earlier"] + time.time() - began, 1)}
    except BaseException:
        entry["earlier"] = round(entry["earlier"] + time.time() - began, 1)
        raise
    finally:
        entry.pop("running", None)
        write_record(folder, record)


def _left(pipeline: Pipeline, stage: Stage, record: Mapping[str, Any]) -> float:
    """Seconds of the budget that nothing has used, less those of the end where `stage` is the last one."""
    if pipeline.time_budget is None:
        return math.inf
    spent = sum(entry_seconds(entry) for name, entry in record.items() if name not in ("stages", "inputs"))
    return pipeline.time_budget - spent - (_END if stage is pipeline.stages[-1] else 0.0)


def _budget(pipeline: Pipeline, stage: Stage, record: Mapping[str, Any]) -> float | None:
    """Seconds that a stage may take: its share, and never more than is left; an InputError if not even one is."""
    if pipeline.time_budget is None:
        return None
    left = _left(pipeline, stage, record)
    if left < 1:
        raise InputError(f"earlier stages used up the time budget of {pipeline.time_budget:.0f} s")
    return round(min(left, stage.share * pipeline.time_budget) if stage.share else left, 1)


def _budget_of_process(entry: Mapping[str, Any], spent: float, left: float) -> float | None:
    """What is left to a stage, on the clock of its run, which continues from `spent`; at least a second."""
    if entry["time_budget"] is None:
        return None
    return round(spent + max(min(entry["time_budget"] - entry["earlier"], left), 1.0), 1)


def _command(
    pipeline: Pipeline, stage: Stage, recipes: Path, output: Path, model: str | None, budget: float | None
) -> list[str]:
    launcher = ["-m", "accelerate.commands.launch", *pipeline.launch] if pipeline.launch else []
    command = [sys.executable, *launcher, *stage.command(recipes, pipeline.seed)]
    command += ["--output_dir", str(output), "--resume", "auto"]
    command += ["--model_name_or_path", model] if model else []
    return [*command, "--time_budget", str(budget)] if budget is not None else command


def _check_stages(pipeline: Pipeline) -> None:
    """Parse every stage's arguments before the first one runs, in a process of its own that leaves no device in use."""
    budget = [] if pipeline.time_budget is None else ["--time_budget", str(pipeline.time_budget)]
    names = {f"stage {number} ({stage.recipe})": stage for number, stage in enumerate(pipeline.stages, start=1)}
    last = {stage.arm: name for name, stage in names.items()}  # each arm's; None is that of all
    stages = {name: dataclasses.replace(stage, more=budget) for name, stage in names.items()}
    check_runs(stages, pipeline.rules, names.keys() - last.values())


def _on_pipelines_clock(entry: ValidationEntry, stage: str, steps: int, seconds: float) -> ValidationEntry:
    """A stage's validation, after the steps and the seconds of the stages before."""
    step, clock = entry["step"] + steps, entry["wall_clock_s"] + seconds
    moved: ValidationEntry = {**entry, "step": step, "wall_clock_s": clock, "stage": stage}
    if "weights_of_step" in moved:
        moved["weights_of_step"] += steps
    return moved


def _report(folder: Path, pipeline: Pipeline, record: Mapping[str, Any]) -> RunSummary:
    """One curve and one summary of all stages, on the pipeline's clock and in optimizer steps of all stages."""
    curves: dict[str, list[ValidationEntry]] = {}
    names = [name_of(number, stage) for number, stage in enumerate(pipeline.stages, start=1)]
    if "decision" in record:
        names.insert(0, pilot_name(record["decision"]["arm"]))
    others = [entry for name, entry in record.items() if name not in (*NOT_STAGES, *names)]  # the other arms' pilots
    seconds, steps = record.get("overhead", {}).get("seconds", 0.0) + sum(map(entry_seconds, others)), 0
    for name in names:
        summary = RunFolder(folder / record[name]["folder"]).summary()
        curves[name] = [_on_pipelines_clock(entry, name, steps, seconds) for entry in summary["validations"]]
        seconds, steps = seconds + record[name]["seconds"], curves[name][-1]["step"]
    write_curve(folder / CURVE, curves, title=folder.name, seconds=pipeline.time_budget)
    history = [entry for curve in curves.values() for entry in curve]
    more = {"seed": pipeline.seed, "stages": {k: v for k, v in record.items() if k not in NOT_STAGES}, **provenance()}
    if "decision" in record:
        more["decision"] = record["decision"]
    return write_summary(folder / SUMMARY, history, seconds, more)
