"""A chain of recipes under rules, with a wall-clock budget that is never overrun and a result at every moment.

`result.json` in the chain's folder is whole at any time: it says how good the best model on the disk is, on how many
problems that was measured, and whether that is a result by the rules yet.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trl_ext.arguments import InputError, Stopped
from trl_ext.checkpoints import checkpoints
from trl_ext.files import write_text
from trl_ext.pipeline import RECORD, Pipeline, run_pipeline
from trl_ext.provenance import provenance
from trl_ext.registry import unknown
from trl_ext.rules import RULES, Rules
from trl_ext.run_folder import Clock

RESULT = "result.json"
_GRACE = 1.0  # seconds before the deadline at which a stage that is still running is killed


class OutOfTimeError(Exception):
    """The budget ends now, whatever is running."""


def check_pipeline(pipeline: Pipeline) -> Rules:
    """The chain's rules, which what it says of itself must keep to; its stages are checked when it runs.

    Raises:
        InputError: there are no such rules, or the chain breaks them.
    """
    name = pipeline.rules
    if name not in RULES:
        raise InputError(str(unknown("rules", str(name), RULES)))
    rules = RULES[name]
    broken = []
    if pipeline.model_name_or_path != rules.model:
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
    """How many processes options of `accelerate launch` ask for."""
    given = dict(itertools.pairwise(launch))
    if "--num_processes" in given:
        return int(given["--num_processes"])
    if "--config_file" in given:
        return int(yaml.safe_load(Path(given["--config_file"]).read_text(encoding="utf-8")).get("num_processes", 1))
    return 1


def run_leaderboard(pipeline: Pipeline, recipes: Path) -> dict[str, Any]:
    """Run the chain, or what is left of it, and return the result.

    Raises:
        InputError: a rule is broken, or a stage did not end well.
        Stopped: SIGTERM came.
    """
    rules, folder = check_pipeline(pipeline), Path(pipeline.output_dir)
    clock = Clock(used(folder))
    assert pipeline.time_budget is not None
    if clock.seconds() >= pipeline.time_budget and (folder / RESULT).exists():
        return write_result(folder, pipeline.rules, rules, clock, "out of time")
    seen: list[dict[str, Any]] = []

    def watch() -> None:
        if clock.seconds() > float(pipeline.time_budget or 0.0) - _GRACE:
            raise OutOfTimeError
        found = list(candidates(folder))
        if found != seen:
            seen[:] = found
            write_result(folder, pipeline.rules, rules, clock, "running")

    write_result(folder, pipeline.rules, rules, clock, "running")
    status = "interrupted"
    try:
        run_pipeline(pipeline, recipes, spent=Clock().seconds(), watch=watch)
        status = "complete"
    except OutOfTimeError:
        status = "out of time"
    except (InputError, Stopped, KeyboardInterrupt):
        write_result(folder, pipeline.rules, rules, clock, status)
        raise
    return write_result(folder, pipeline.rules, rules, clock, status)


def used(folder: Path) -> float:
    """Seconds that earlier processes of the chain have used, to within a second of a kill."""
    path = folder / RECORD
    if not path.exists():
        return 0.0
    record = json.loads(path.read_text(encoding="utf-8"))
    entries = [entry for name, entry in record.items() if name != "stages"]
    return float(sum(e.get("seconds", e.get("earlier", 0.0) + e.get("running", 0.0)) for e in entries))


def candidates(folder: Path) -> Iterator[dict[str, Any]]:
    """Every model on the disk that was validated: accuracy, problems, step, stage and where it is."""
    for stage in sorted(path for path in folder.glob("[0-9]*_*") if path.is_dir()):
        for checkpoint in checkpoints(stage):
            record = checkpoint / "run.json"
            if record.exists():
                for entry in json.loads(record.read_text(encoding="utf-8"))["validations"]:
                    if checkpoint.name == f"checkpoint-{entry['step']}":
                        yield _candidate(folder, stage, checkpoint, entry)
        if (stage / "summary.json").exists():
            summary = json.loads((stage / "summary.json").read_text(encoding="utf-8"))
            yield _candidate(folder, stage, stage, summary["validations"][-1])


def _candidate(folder: Path, stage: Path, model: Path, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "accuracy": entry["accuracy"],
        "problems": entry["problems"],
        "step": entry.get("weights_of_step", entry["step"]),
        "stage": stage.name,
        "model": model.relative_to(folder).as_posix(),
    }


def best(found: list[dict[str, Any]], problems: int) -> dict[str, Any] | None:
    """What was measured on all problems comes first, then the best accuracy; None where there is nothing."""
    return max(found, key=lambda one: (one["problems"] == problems, one["accuracy"]), default=None)


def write_result(folder: Path, name: str | None, rules: Rules, clock: Clock, status: str) -> dict[str, Any]:
    """Write `result.json`, whole or not at all, and return it."""
    chosen = best(list(candidates(folder)), rules.problems) or {
        "accuracy": None, "problems": 0, "step": None, "stage": None, "model": None,
    }  # fmt: skip
    is_whole = chosen["problems"] == rules.problems
    result = {
        "rules": name,
        "status": status,
        "is_by_the_rules": is_whole,
        "why_not": None if is_whole else f"measured on {chosen['problems']} of {rules.problems} problems",
        **chosen,
        "seconds": round(clock.seconds(), 1),
        "seconds_allowed": rules.seconds,
        **provenance(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULT, json.dumps(result, indent=1) + "\n")
    return result
