"""The speedrun: seconds on two cores to a validated accuracy on a task with headroom, next to a reference run.

An entry is the settings of a recipe, and ends its runs when it likes. Every seed is run by the entry and by the
reference, one after the other, so that both meet the same machine in the same hour. The score is the ratio of their
seconds, the geometric mean over the seeds, which machines can compare; an entry counts if its accuracy, the mean
over all seeds on problems that chose no weights, is the goal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from trl_ext.errors import InputError
from trl_ext.evaluation.statistics import paired_interval
from trl_ext.io import digest_of, read_json, read_yaml, write_json
from trl_ext.redaction import redact
from trl_ext.runs.layout import SUMMARY, finished
from trl_ext.runs.provenance import provenance
from trl_ext.tools.experiments.preflight import check_runs
from trl_ext.tools.experiments.rules import RULES
from trl_ext.tools.experiments.runspec import RunSpec, from_fields, named_in_errors, refuse_taken
from trl_ext.tools.experiments.sweep import run_all

RECORD = "record.json"
SPEEDRUN = "speedrun"  # of `RULES`
GOAL = 0.6  # accuracy
LEAST_SEEDS, MOST_THREADS = 3, 2
MAX_GAP = 3600.0  # seconds between the ends of a seed's two runs, at most
TOLERANCE = 1.1  # a repeated ratio may be larger than the record's by this factor
# What the program gives every run; `time_budget` bounds one that never ends.
FIXED = {
    "validation_problems": 512, "final_validation_problems": RULES[SPEEDRUN].problems, "restore_best": True,
    "time_budget": RULES[SPEEDRUN].seconds, "save_total_limit": 1, "disable_tqdm": True, "base_policy_seed": 0,
}  # fmt: skip
Summary = Mapping[str, Any]


REFERENCE = RunSpec("grpo", "grpo_arithmetic.yaml", {"target_accuracy": GOAL + 0.02})  # above what luck reaches first


@dataclass(frozen=True)
class Pair:
    """Both runs of a seed."""

    seed: int
    seconds: float  # from the start of the process to the end of the last validation, without making the base policy
    accuracy: float  # on problems that chose no weights
    reference_seconds: float
    reference_accuracy: float
    apart: float  # seconds between their ends
    threads: int  # at most, of both
    gpus: int

    @property
    def log_ratio(self) -> float:
        """Below 0 where the entry is faster."""
        return math.log(self.seconds / self.reference_seconds)


def read_entry(path: Path, recipes: Path) -> RunSpec:
    """The entry of a YAML file; an InputError with the file and the field."""
    with named_in_errors(path):
        return entry_of(read_yaml(path) or {}, recipes)


def entry_of(content: Any, recipes: Path) -> RunSpec:
    """The entry with these fields, or the reference's; a ValueError if one is unknown or wrong."""
    entry = from_fields(content, RunSpec, recipe=REFERENCE.recipe, config=REFERENCE.config)
    refuse_taken(entry.settings, "the speedrun", (*FIXED, "model_name_or_path"))
    entry.located(recipes)
    return entry


def run_of(entry: RunSpec, recipes: Path) -> RunSpec:
    """What its runs are: with what the program gives them."""
    return dataclasses.replace(entry.located(recipes), settings={**entry.settings, **FIXED})


def race(entry: RunSpec, seeds: int, recipes: Path, folder: Path) -> dict[str, Any]:
    """Run what is missing, write the record and return it.

    Raises:
        InputError: the entry breaks the rules, or a run failed.
    """
    if seeds < LEAST_SEEDS:
        raise InputError(f"--seeds must be at least {LEAST_SEEDS}, got {seeds}")
    arms = {"entry": run_of(entry, recipes), "reference": run_of(REFERENCE, recipes)}
    check_runs(arms, SPEEDRUN)
    commands = {
        f"{name}_{seed}": arm.command(recipes, seed)
        for seed in range(seeds)
        for name, arm in (list(arms.items()) if seed % 2 else list(arms.items())[::-1])
    }
    summaries = run_all(commands, folder / "runs")
    ends = {name: _end_of(folder / "runs" / name) for name in commands}
    pairs = [pair_of(seed, summaries, ends) for seed in range(seeds)]
    commits = sorted({str(run["commit"]) for run in summaries.values()})
    record = {
        "entry": redact({"recipe": entry.recipe, "config": entry.config, "settings": entry.settings}),
        "config_digest": digest_of(recipes / str(entry.config)), **score(pairs),
        **provenance(), **{name: summaries["entry_0"][name] for name in ("commit", "versions", "hardware")},
    }  # fmt: skip
    if len(commits) > 1:
        record["why_not"] = f"the runs are of several commits ({', '.join(commits)}): choose another --output_dir"
    write_json(folder / RECORD, record, indent=2)
    return record


def _end_of(wanted: Path) -> float:
    run = finished(wanted)
    assert run is not None  # `run_all` has its summary
    return (run.path / SUMMARY).stat().st_mtime


def pair_of(seed: int, summaries: Mapping[str, Summary], ends: Mapping[str, float]) -> Pair:
    """Both runs of a seed, from their summaries and the times at which they ended."""
    entry, reference = summaries[f"entry_{seed}"], summaries[f"reference_{seed}"]
    hardware = [run["hardware"] for run in (entry, reference)]
    return Pair(
        seed,
        *_seconds_and_accuracy(entry),
        *_seconds_and_accuracy(reference),
        apart=round(abs(ends[f"entry_{seed}"] - ends[f"reference_{seed}"]), 1),
        threads=max(used["cpu_threads"] * used["processes"] for used in hardware),
        gpus=max(len(used["gpus"]) for used in hardware),
    )


def _seconds_and_accuracy(run: Summary) -> tuple[float, float]:
    last = run["validations"][-1]
    return round(last["wall_clock_s"] - run["seconds_to_make_policy"], 2), last["selection"]["accuracy_on_others"]


def score(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Ratio with its 95 % interval over seeds, means, every seed, and why it does not count, if it does not."""
    logs = [pair.log_ratio for pair in pairs]
    return {
        "rules": SPEEDRUN,
        "goal": GOAL,
        "ratio": round(math.exp(mean(logs)), 4),
        "interval": [round(math.exp(end), 4) for end in paired_interval(logs)],
        "seconds": round(mean(pair.seconds for pair in pairs), 1),
        "accuracy": round(mean(pair.accuracy for pair in pairs), 4),
        "reference_seconds": round(mean(pair.reference_seconds for pair in pairs), 1),
        "reference_accuracy": round(mean(pair.reference_accuracy for pair in pairs), 4),
        "why_not": why_not(pairs),
        "seeds": [asdict(pair) for pair in pairs],
    }


def why_not(pairs: Sequence[Pair]) -> str | None:
    """The first rule that the runs break, in a sentence; None if they count."""
    for words, value in {
        "the entry": mean(pair.accuracy for pair in pairs), "the reference": mean(p.reference_accuracy for p in pairs),
    }.items():  # fmt: skip
        if value < GOAL:
            return f"the mean accuracy of {words} is {value:.4f}, below {GOAL}: have it train longer"
    for pair in pairs:
        if pair.apart > MAX_GAP:
            gap = f"its two runs ended {pair.apart:.0f} s apart, more than {MAX_GAP:.0f}"
            return f"seed {pair.seed}: {gap}: run both again"
        if pair.gpus or pair.threads > MOST_THREADS:
            used = f"{pair.gpus} GPUs" if pair.gpus else f"{pair.threads} threads"
            return f"seed {pair.seed}: took {used}, {MOST_THREADS} threads are allowed: set OMP_NUM_THREADS"
    return None


def compared(record: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Whether a record beats another, by the paired differences of the seeds that both have."""
    if record["why_not"]:
        return f"no record: {record['why_not']}"
    known = {pair["seed"]: Pair(**pair) for pair in best["seeds"]}
    pairs = [Pair(**pair) for pair in record["seeds"]]
    gains = [pair.log_ratio - known[pair.seed].log_ratio for pair in pairs if pair.seed in known]
    if len(gains) < 2:
        return "not comparable: fewer than two seeds in common"
    low, high = paired_interval(gains)
    shown = f"{math.exp(mean(gains)):.3f} of its ratio ({math.exp(low):.3f} to {math.exp(high):.3f})"
    return f"a new record: {shown}" if high < 0 else f"no new record: {shown}"


def read_record(path: Path) -> dict[str, Any]:
    """A record's file; an InputError if it is none."""
    with named_in_errors(path):
        record: dict[str, Any] = read_json(path)
        if not isinstance(record, dict) or not {"entry", "config_digest", "ratio", "seeds"} <= set(record):
            raise ValueError("not the record of a speedrun: entry, config_digest, ratio and seeds are needed")
    return record


def verify(path: Path, recipes: Path, folder: Path) -> tuple[bool, str]:
    """Repeat a record from its file; whether it holds here, and a sentence.

    Raises:
        InputError: the file is no record, its recipe's YAML file has changed since, the folder has a record already,
            or a run failed.
    """
    record = read_record(path)
    if (folder / RECORD).exists():
        raise InputError(f"{folder / RECORD}: what was run before repeats nothing: choose another --output_dir")
    with named_in_errors(f"{path}: entry"):
        entry = entry_of(record["entry"], recipes)
    if digest_of(recipes / str(entry.config)) != record["config_digest"]:
        raise InputError(f"{path}: {entry.config} is not what it was at commit {record.get('commit')}: check that out")
    again = race(entry, len(record["seeds"]), recipes, folder)
    return repeats(again, record)


def repeats(again: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a repeated record is one by the rules, and its ratio no larger than `TOLERANCE` allows."""
    if again["why_not"]:
        return False, f"not repeated: {again['why_not']}"
    holds = again["ratio"] <= TOLERANCE * record["ratio"]
    ratios = f"a ratio of {again['ratio']} here, {record['ratio']} in the record, at most {TOLERANCE} times it"
    return holds, f"{'repeated' if holds else 'not repeated'}: {ratios}"
