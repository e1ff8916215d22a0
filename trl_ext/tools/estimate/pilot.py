"""A finished run as a pilot: its rates and workload, and what it says of a machine."""

from __future__ import annotations

from pathlib import Path

from trl_ext.io import read_json, read_jsonl
from trl_ext.runs.layout import CONFIG, METRICS, RESOLVED, SUMMARY, RunFolder
from trl_ext.tools.estimate.plan import Rates, Workload, measured, workload


def read_run(folder: Path, first: int | None = None) -> tuple[Rates, Workload]:
    """Rates and workload of a run.

    Args:
        first: optimizer steps that are looked at, as if the run had been no longer; None for all.

    Raises:
        ValueError: it is no run of recipes/grpo_math.py, or too short.
    """
    missing = [name for name in (CONFIG, RESOLVED, METRICS, SUMMARY) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: no {', '.join(missing)}; a finished run of recipes/grpo_math.py has them")
    settings, metrics = read_json(folder / RESOLVED), read_jsonl(folder / METRICS)
    summary = RunFolder(folder).summary()
    if first is not None:
        metrics = [entry for entry in metrics if entry["step"] <= first]
        summary["validations"] = [entry for entry in summary["validations"] if entry["step"] <= first]
    try:
        return measured(metrics, summary, settings), workload(metrics, settings)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder}: {error}") from error
