"""A finished run as a pilot: its rates and workload, and what it says of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trl_ext.foresight.plan import Rates, Workload, measured, workload
from trl_ext.io import read_json, read_jsonl
from trl_ext.runs.layout import CONFIG, METRICS, RESOLVED, SUMMARY, RunFolder


def read_run(folder: Path, first: int | None = None) -> tuple[Rates, Workload]:
    """Rates and workload of a run.

    Args:
        first: optimizer steps that are looked at, as if the run had been no longer; None for all.

    Raises:
        ValueError: it is no run of recipes/grpo_math.py, or too short.
    """
    missing = [name for name in (CONFIG, METRICS, SUMMARY) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: no {', '.join(missing)}; a finished run of recipes/grpo_math.py has them")
    settings, metrics, summary = resolved(folder), read_jsonl(folder / METRICS), RunFolder(folder).summary()
    if first is not None:
        metrics = [entry for entry in metrics if entry["step"] <= first]
        summary["validations"] = [entry for entry in summary["validations"] if entry["step"] <= first]
    try:
        return measured(metrics, summary, settings), workload(metrics, settings)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder}: {error}") from error


def resolved(folder: Path) -> dict[str, Any]:
    """All settings of a run, those at their defaults as well; earlier versions wrote these as comments only."""
    if (folder / RESOLVED).is_file():
        return dict(read_json(folder / RESOLVED))
    text = (folder / CONFIG).read_text(encoding="utf-8")
    defaults = "\n".join(line[2:] for line in text.splitlines() if line.startswith("# ") and ":" in line)
    found: dict[str, Any] = yaml.safe_load(text) or {}
    known = yaml.safe_load(defaults.partition("settings above:")[2]) or {}
    return {**known, **found}
