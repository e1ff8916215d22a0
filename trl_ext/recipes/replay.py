"""`recipes/evaluate.py --replay summary.json`: the same evaluation again, and whether it says the same."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from trl_ext.compat.startup import use_all_cores
from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import SAMPLES, Report
from trl_ext.hosts.process_group import join
from trl_ext.io import as_yaml, read_json, read_jsonl, write_text
from trl_ext.recipes.evaluate import PreparedEvaluation, measure, prepare
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.measured import FINGERPRINTS
from trl_ext.runs.fingerprint import in_words
from trl_ext.setting import facts

FLAG = "--replay"
_SETTINGS = {field.name for field in dataclasses.fields(Evaluation)} - {"benchmark"}  # whose name is the dataset's too
_NEEDS = facts(Evaluation, lambda known: known.needs)


def summary_asked_for(arguments: list[str]) -> Path | None:
    """The file that `--replay FILE` or `--replay=FILE` names, which is taken away; None without it."""
    place = next((i for i, argument in enumerate(arguments) if argument.partition("=")[0] == FLAG), None)
    if place is None:
        return None
    argument = arguments.pop(place)
    if "=" not in argument and (place == len(arguments) or arguments[place].startswith("--")):
        raise InputError(f"{FLAG} needs the summary.json of an evaluation")
    return Path(argument.partition("=")[2] if "=" in argument else arguments.pop(place))


def replay_of(path: Path) -> tuple[Callable[[Evaluation], Report], Path]:
    """What runs an evaluation again, and a YAML file with its settings, which flags may change.

    Raises:
        InputError: the file is no summary of an evaluation, or one of a version that did not put its settings down.
    """
    try:
        summary = read_json(path)
        there = {name: value for name, value in summary["settings"].items() if name in _SETTINGS}
    except OSError as error:
        raise InputError(f"{FLAG} {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{FLAG} {path}: no summary of an evaluation, or one of an earlier version") from error
    settings = {name: value for name, value in there.items() if all(map(there.get, _NEEDS.get(name, ())))}
    config = Path(tempfile.mkdtemp(prefix="replay-")) / f"{path.resolve().parent.name}-replayed.yaml"
    write_text(config, as_yaml(settings))

    def run(asked: Evaluation) -> Report:
        use_all_cores()
        join(asked.ddp_timeout)
        prepared = prepare(asked)
        _refuse_other_inputs(path, summary, prepared)
        report = measure(prepared)
        if PartialState().is_main_process:
            print(_comparison(path, summary, report))
        return report

    return run, config


def _refuse_other_inputs(path: Path, summary: dict[str, Any], prepared: PreparedEvaluation) -> None:
    there, mine = summary[FINGERPRINTS], prepared.decisive[FINGERPRINTS]
    if changed := [name for name in {**there, **mine} if there.get(name) != mine.get(name)]:
        raise InputError(
            f"{FLAG} {path}: what was measured had another {in_words(changed)}: give --model_name_or_path, --dataset "
            "or --benchmark_dir of the same"
        )


def _comparison(path: Path, summary: dict[str, Any], report: Report) -> str:
    line = f"replayed {path}: accuracy {report.accuracy:.4f}, and {summary['accuracy']:.4f} there"
    samples = path.parent / SAMPLES
    if not samples.is_file():
        return line
    before = read_jsonl(samples)
    same = sum(one["response"] == other["response"] for one, other in zip(before, report.rows, strict=False))
    return f"{line}; {same} of {len(before)} responses are the same"
