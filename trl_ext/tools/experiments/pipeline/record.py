"""What a pipeline of recipes has done so far, and for how long: its record, and what its stages' folders say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_ext.errors import InputError
from trl_ext.io import digest_of, read_json, write_json
from trl_ext.redaction import redact
from trl_ext.runs.checkpoints import checkpoints
from trl_ext.runs.fingerprint import fingerprints_of_named_files
from trl_ext.runs.layout import attempts, finished, record_in
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage

RECORD = "pipeline.json"
NOT_STAGES = ("stages", "inputs", "overhead", "decision")  # names of the record next to the stages'
OTHER = (
    "holds a pipeline of other stages, another seed, model or time budget; set them back or choose another --output_dir"
)


def name_of(number: int, stage: Stage) -> str:
    """A stage's folder, and its entry in the record."""
    return f"{number}_{stage.recipe}"


def load_or_create(folder: Path, pipeline: Pipeline) -> dict[str, Any]:
    """What earlier processes of this pipeline have done; of another one what they took, or an InputError.

    It is an error if a stage of the other pipeline is done, which could be lost.
    """
    contents = [digest_of(Path(s.config)) if s.config and Path(s.config).is_file() else None for s in pipeline.stages]
    stages = [
        [s.recipe, s.config, content, s.share, dict(s.settings), *([s.arm] if s.arm else [])]
        for s, content in zip(pipeline.stages, contents, strict=True)
    ]
    of_all = [pipeline.seed, pipeline.model_name_or_path, pipeline.time_budget]
    pilots = [pipeline.pilot_seconds] if pipeline.pilot_seconds else []
    now = redact(json.loads(json.dumps([*stages, *of_all, *pilots])))
    record = read_record(folder)
    inputs = fingerprints_of_named_files(
        [pipeline.model_name_or_path, *([s.config, dict(s.settings)] for s in pipeline.stages)]
    )
    noted = {"inputs": inputs} if inputs else {}
    begun = {name: entry for name, entry in record.items() if name not in NOT_STAGES}
    if record.get("stages") == now:
        _refuse_changed_inputs(folder, record, inputs)
        return {**{name: entry for name, entry in record.items() if name != "inputs"}, **noted}
    if any("seconds" in entry for entry in begun.values()):
        raise InputError(f"{folder} {OTHER}")
    overhead = {"overhead": record["overhead"]} if "overhead" in record else {}
    return {
        "stages": now,
        **noted,
        **overhead,
        **{name: {"earlier": entry_seconds(entry)} for name, entry in begun.items()},
    }


def _refuse_changed_inputs(folder: Path, record: Mapping[str, Any], inputs: Mapping[str, str]) -> None:
    """Refuse to skip a finished stage that was run with other files; earlier versions did not note them."""
    known = record.get("inputs", inputs)
    changed = [name for name in {**known, **inputs} if known.get(name) != inputs.get(name)]
    done = [name for name, entry in record.items() if name not in NOT_STAGES and "seconds" in entry]
    if changed and done:
        raise InputError(
            f"{folder} holds the finished stage {done[0]}, and {', '.join(changed)} changed since it began: it would "
            "be skipped though it was of something else. Choose another --output_dir, or remove it"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """As it was written; empty where there is none."""
    path = folder / RECORD
    return dict(read_json(path)) if path.exists() else {}


def stages_left(pipeline: Pipeline, record: Mapping[str, Any]) -> list[int]:
    """Numbers, from 1, of the stages that are not done."""
    return [n for n, stage in enumerate(pipeline.stages, start=1) if "seconds" not in record.get(name_of(n, stage), {})]


def last_stage_finished(pipeline: Pipeline) -> bool:
    """Whether the last stage has left its summary, and has nothing to do but to close down."""
    return bool(finished(Path(pipeline.output_dir) / name_of(len(pipeline.stages), pipeline.stages[-1])))


def elapsed_seconds(folder: Path) -> float:
    """Seconds that earlier processes of the pipeline have used, to within a second of a kill.

    A stage whose pipeline was killed is told to stop; what it took for that is on the clock of its checkpoint.
    """
    entries = {name: entry for name, entry in read_record(folder).items() if name not in ("stages", "inputs")}
    return float(sum(max(entry_seconds(entry), resume_point(folder / name)[1]) for name, entry in entries.items()))


def entry_seconds(entry: Mapping[str, float]) -> float:
    """Seconds of a stage, or of everything outside the stages."""
    return entry.get("seconds", entry.get("earlier", 0.0) + entry.get("running", 0.0))


def resume_point(wanted: Path) -> tuple[Path, float]:
    """Where a recipe that was told to write to `wanted` can resume, and the seconds that its checkpoint has used."""
    for run in attempts(wanted):
        for checkpoint in checkpoints(run.path)[:1]:
            if (record := record_in(checkpoint)) is not None:
                return run.path, float(record["wall_clock_s"])
    return wanted, 0.0


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the record atomically."""
    write_json(folder / RECORD, record)
