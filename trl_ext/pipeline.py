"""A chain of recipes, each going on from the model of the one before, with one wall-clock budget for all of them.

Every stage is a process of its own, launched as by hand, in a folder of its own under the pipeline's.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_ext.arguments import InputError, as_flags
from trl_ext.checkpoints import checkpoints
from trl_ext.files import write_text
from trl_ext.provenance import provenance
from trl_ext.registry import check_fields, unknown
from trl_ext.report import write_curve, write_summary
from trl_ext.stage_process import run_stage

RECIPES = {"grpo": "grpo_math.py", "sft": "sft_math.py", "expert_iteration": "expert_iteration.py"}
RECORD = "pipeline.json"
OTHER = (
    "holds a pipeline of other stages, another seed, model or time budget; set them back or choose another --output_dir"
)
_NOT_STAGES = ("stages", "overhead")  # names of the record beside the stages'
_END = 4.0  # seconds for the report of all stages, and more than a leaderboard ends what still runs before its budget
_OURS = ("output_dir", "model_name_or_path", "time_budget", "resume", "seed")  # which the pipeline gives a stage


@dataclass(frozen=True)
class Stage:
    """One recipe of the chain.

    Attributes:
        recipe: a name of `RECIPES`.
        config: its YAML file; None for the recipe's own.
        share: of the pipeline's time budget; None for what is left.
        settings: more of its settings, by name.
    """

    recipe: str
    config: str | None = None
    share: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Its settings as a command line."""
        return [*([] if self.config is None else ["--config", self.config]), *as_flags(self.settings)]


@dataclass(frozen=True)
class Pipeline:
    """The chain.

    Attributes:
        model_name_or_path: what the first stage starts from; None for the base policy that the machine makes.
        time_budget: seconds for all of it, checks, start-up, validation and saving included; None for no limit.
        launch: options of `accelerate launch`; without any, a stage is a single process without it.
        rules: those of `trl_ext.rules` that every stage has to keep to.
    """

    stages: list[Stage]
    output_dir: str
    model_name_or_path: str | None = None
    time_budget: float | None = None
    launch: list[str] = field(default_factory=list)
    seed: int = 0
    rules: str | None = None

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("stages: at least one is needed")
        if isinstance(self.launch, str):
            raise ValueError(f"launch must be a list of options, got {self.launch!r}")
        if self.time_budget is not None and self.time_budget <= 0:
            raise ValueError(f"time_budget must be positive seconds, got {self.time_budget}")
        shares = [stage.share for stage in self.stages if stage.share is not None]
        if any(not 0 < share <= 1 for share in shares) or sum(shares) > 1 + 1e-9:
            raise ValueError(f"shares of the time budget must be above 0 and at most 1 together, got {shares}")
        if shares and self.time_budget is None:
            raise ValueError("a stage has a share, and there is no time_budget to share")
        if self.time_budget is not None and any(stage.share is None for stage in self.stages[:-1]):
            raise ValueError("every stage but the last needs a share of the time_budget, or it would take all of it")
        if self.stages[-1].share is None and sum(shares) > 1 - 1e-9:
            raise ValueError(f"the shares {shares} leave nothing of the time budget for the last stage")


def read_pipeline(path: Path, **given: Any) -> Pipeline:
    """The pipeline of a YAML file, with what is given in place of what stands there.

    Raises:
        InputError: the file cannot be read, or does not describe a pipeline; names the stage and the field.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
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
            raise ValueError(f"settings {', '.join(taken)}: the pipeline gives these to its stages itself")
        return stage
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"stage {number}: {error}") from error


def run_pipeline(
    pipeline: Pipeline,
    recipes: Path,
    spent: float = 0.0,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the stages that are not done yet, and report on all of them. Returns the summary.

    Started again after an interruption it goes on in the stage where it was, with the time that is left.

    Args:
        recipes: the folder with the recipes' scripts.
        spent: seconds that this process took before.
        watch: called every second while a stage runs, and between two stages; what it raises ends the chain at once.

    Raises:
        InputError: the settings of a stage do not fit together, or a stage did not end well.
        Stopped: SIGTERM came; the stage has saved a checkpoint.
    """
    began = time.time() - spent
    folder = Path(pipeline.output_dir)
    record = record_of(folder, pipeline)
    earlier = record.get("overhead", {}).get("seconds", 0.0)

    def note_overhead() -> None:
        record["overhead"] = {"seconds": round(earlier + time.time() - began, 1)}
        _write_record(folder, record)

    todo = stages_left(pipeline, record)
    folder.mkdir(parents=True, exist_ok=True)
    if todo:
        note_overhead()  # the checks take long enough to be killed in
        _check_stages(pipeline, recipes)
    model = pipeline.model_name_or_path
    for number, stage in enumerate(pipeline.stages, start=1):
        name = _name(number, stage)
        if number in todo:
            if number == todo[0]:
                note_overhead()
            entry = record.pop(name, {"earlier": 0.0})
            if "time_budget" not in entry:
                entry["time_budget"] = _budget(pipeline, stage, record)  # by what the others have used
            record[name] = entry
            output, on_clock = where_it_was(folder / name)
            # seconds of processes that were interrupted; one that was killed has left how far it was
            entry["earlier"] = max(entry["earlier"] + entry.pop("running", 0.0), on_clock)
            _write_record(folder, record)
            print(f"stage {number} of {len(pipeline.stages)}: {stage.recipe}", flush=True)
            budget = _budget_of_process(entry, on_clock, _left(pipeline, stage, record))
            command = _command(pipeline, stage, recipes, output, model, budget)
            seconds = _run_timed(command, name, entry, lambda: _write_record(folder, record), watch)
            entry["folder"] = folder_of(output).name
            entry["seconds"] = round(entry["earlier"] + seconds, 1)
            _write_record(folder, record)
            if number < len(pipeline.stages):
                watch()
        model = str(folder / record[name]["folder"])
    return _report(folder, pipeline, record)


def _run_timed(
    command: Sequence[str], name: str, entry: dict[str, Any], write: Callable[[], None], watch: Callable[[], None]
) -> float:
    """Run a stage and return its seconds; on the way they are noted in its entry, lest a kill lose them."""
    began = time.time()

    def tick() -> None:
        entry["running"] = round(time.time() - began, 1)
        write()
        watch()

    try:
        run_stage(command, name, tick)
    except BaseException:
        entry["earlier"] = round(entry["earlier"] + time.time() - began, 1)
        raise
    finally:
        entry.pop("running", None)
        write()
    return time.time() - began


def _name(number: int, stage: Stage) -> str:
    return f"{number}_{stage.recipe}"


def record_of(folder: Path, pipeline: Pipeline) -> dict[str, Any]:
    """What earlier processes of this pipeline have done; of another one, whose stages were not done, what they took.

    Raises:
        InputError: a stage of another pipeline is done.
    """
    stages = [[s.recipe, s.config, _content_of(s.config), s.share, dict(s.settings)] for s in pipeline.stages]
    now = json.loads(json.dumps([*stages, pipeline.seed, pipeline.model_name_or_path, pipeline.time_budget]))
    record = read_record(folder)
    if record.get("stages") == now:
        return record
    begun = {name: entry for name, entry in record.items() if name not in _NOT_STAGES}
    if any("seconds" in entry for entry in begun.values()):
        raise InputError(f"{folder} {OTHER}")
    overhead = {"overhead": record["overhead"]} if "overhead" in record else {}
    return {"stages": now, **overhead, **{name: {"earlier": _used(entry)} for name, entry in begun.items()}}


def read_record(folder: Path) -> dict[str, Any]:
    """As it was written; empty where there is none."""
    path = folder / RECORD
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def stages_left(pipeline: Pipeline, record: Mapping[str, Any]) -> list[int]:
    """Numbers, from 1, of the stages that are not done."""
    return [n for n, stage in enumerate(pipeline.stages, start=1) if "seconds" not in record.get(_name(n, stage), {})]


def last_has_ended(pipeline: Pipeline) -> bool:
    """Whether the last stage has left its summary, and has nothing to do but to close down."""
    wanted = Path(pipeline.output_dir) / _name(len(pipeline.stages), pipeline.stages[-1])
    return any((place / "summary.json").exists() for place in _places(wanted))


def used(folder: Path) -> float:
    """Seconds that earlier processes of the chain have used, to within a second of a kill.

    A stage whose chain was killed is told to stop; what it took for that is on the clock of its checkpoint.
    """
    entries = {name: entry for name, entry in read_record(folder).items() if name != "stages"}
    return float(sum(max(_used(entry), where_it_was(folder / name)[1]) for name, entry in entries.items()))


def _used(entry: Mapping[str, float]) -> float:
    """Seconds of a stage, or of what is beside the stages."""
    return entry.get("seconds", entry.get("earlier", 0.0) + entry.get("running", 0.0))


def _content_of(config: str | None) -> str | None:
    """A hash of a YAML file's text, where there is one."""
    if config is None or not Path(config).is_file():
        return None
    return hashlib.sha256(Path(config).read_bytes()).hexdigest()[:16]


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")


def _left(pipeline: Pipeline, stage: Stage, record: Mapping[str, Any]) -> float:
    """Seconds of the budget that nothing has used, less those of the end where `stage` is the last one."""
    if pipeline.time_budget is None:
        return math.inf
    spent = sum(_used(entry) for name, entry in record.items() if name != "stages")
    return pipeline.time_budget - spent - (_END if stage is pipeline.stages[-1] else 0.0)


def _budget(pipeline: Pipeline, stage: Stage, record: Mapping[str, Any]) -> float | None:
    """Seconds that a stage may take: its share, and never more than is left.

    Raises:
        InputError: not even a second is left.
    """
    if pipeline.time_budget is None:
        return None
    left = _left(pipeline, stage, record)
    if left < 1:
        raise InputError(f"what was before has used up the time budget of {pipeline.time_budget:.0f} s")
    return round(min(left, stage.share * pipeline.time_budget) if stage.share else left, 1)


def _budget_of_process(entry: Mapping[str, Any], spent: float, left: float) -> float | None:
    """What is left to a stage, on the clock of its run, which goes on from `spent`; a second at least, to end well."""
    if entry["time_budget"] is None:
        return None
    return round(spent + max(min(entry["time_budget"] - entry["earlier"], left), 1.0), 1)


def _command(
    pipeline: Pipeline, stage: Stage, recipes: Path, output: Path, model: str | None, budget: float | None
) -> list[str]:
    launcher = ["-m", "accelerate.commands.launch", *pipeline.launch] if pipeline.launch else []
    command = [sys.executable, *launcher, str(recipes / RECIPES[stage.recipe])]
    command += [*stage.arguments(), "--output_dir", str(output), "--seed", str(pipeline.seed), "--resume", "auto"]
    command += ["--model_name_or_path", model] if model else []
    return [*command, "--time_budget", str(budget)] if budget is not None else command


def folder_of(wanted: Path) -> Path:
    """Where a recipe that was told to write to `wanted` has finished: there, or in `wanted-2`, `-3`, ..."""
    return next(place for place in _places(wanted) if (place / "summary.json").exists())


def where_it_was(wanted: Path) -> tuple[Path, float]:
    """Where a recipe that was told to write to `wanted` can go on, and the seconds that its checkpoint has used."""
    for place in _places(wanted):
        for checkpoint in checkpoints(place)[:1]:
            record = checkpoint / "run.json"
            if record.exists():
                return place, float(json.loads(record.read_text(encoding="utf-8"))["wall_clock_s"])
    return wanted, 0.0


def _places(wanted: Path) -> list[Path]:
    """`wanted-3`, `wanted-2`, `wanted`: the folders that a recipe may have chosen, the last one first."""
    later = wanted.parent.glob(f"{wanted.name}-*")
    return [*sorted(later, key=lambda place: (len(place.name), place.name), reverse=True), wanted]


def _check_stages(pipeline: Pipeline, recipes: Path) -> None:
    """Parse every stage's arguments before the first one runs, in a process of its own that leaves no device in use."""
    budget = [] if pipeline.time_budget is None else ["--time_budget", str(pipeline.time_budget)]
    plan = [
        [stage.recipe, str((recipes / RECIPES[stage.recipe]).with_suffix(".yaml")), [*stage.arguments(), *budget]]
        for stage in pipeline.stages
    ]
    rules = [pipeline.rules] if pipeline.rules else []
    command = [sys.executable, "-m", "trl_ext.check_arguments", json.dumps(plan), *rules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(done.stderr.strip().rpartition("\n")[2])


def _report(folder: Path, pipeline: Pipeline, record: Mapping[str, Any]) -> dict[str, Any]:
    """One curve and one summary of all stages, on the pipeline's clock and in optimizer steps of all stages."""
    curves: dict[str, list[dict[str, Any]]] = {}
    seconds, steps = record.get("overhead", {}).get("seconds", 0.0), 0
    for number, stage in enumerate(pipeline.stages, start=1):
        name = _name(number, stage)
        summary = json.loads((folder / record[name]["folder"] / "summary.json").read_text(encoding="utf-8"))
        curves[name] = [
            {
                **v,
                **{key: v[key] + steps for key in ("step", "weights_of_step") if key in v},
                "stage": name,
                "wall_clock_s": v["wall_clock_s"] + seconds,
            }
            for v in summary["validations"]
        ]
        seconds, steps = seconds + record[name]["seconds"], curves[name][-1]["step"]
    write_curve(folder / "curve.png", curves, title=folder.name, seconds=pipeline.time_budget)
    history = [entry for curve in curves.values() for entry in curve]
    more = {"seed": pipeline.seed, "stages": {k: v for k, v in record.items() if k not in _NOT_STAGES}, **provenance()}
    return write_summary(folder / "summary.json", history, seconds, more)
