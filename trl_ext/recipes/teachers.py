"""How good the teachers of a run are, on its own validation problems."""

from __future__ import annotations

from typing import Any

from trl_ext.evaluation.validation_conditions import validation_conditions
from trl_ext.generation.adapter_models import load_tokenizer
from trl_ext.generation.completion import Sampling
from trl_ext.generation.model_source import locate
from trl_ext.grpo.teacher_validation import TeacherValidation
from trl_ext.io import plain, read_json, write_json
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.recipes.preflight import Prepared
from trl_ext.runs.folder import Run
from trl_ext.runs.layout import TEACHERS


def teachers_of(prepared: Prepared, run: Run) -> dict[str, Any]:
    """How good each teacher is, where that is asked for, by its name; measured once, and kept in the run's folder."""
    task, config, data, path = prepared.task, prepared.config, prepared.data, run.folder / TEACHERS
    if not getattr(config, "validate_teachers", False):
        return {}
    problems = list(data.validation)[: task.validation_problems]
    conditions = validation_conditions(task, config, problems)
    measured_as = {"teachers": run.settings["teachers_are"], **plain(conditions)}
    kept = run_on_main_and_broadcast(lambda: read_json(path) if path.exists() else {})
    if kept.get("measured_as") == measured_as:
        return dict(kept["found"])
    temperature, limit = conditions["validation_temperature"], conditions["validation_max_tokens"]
    shortest, stop = config.sampling_min_tokens or 0, tuple(config.stop or ())
    sampling = Sampling(temperature, config.top_p, limit, shortest, stop, config.seed)
    tokenizer = load_tokenizer(locate(prepared.policy))
    how = TeacherValidation(problems, task.grader(), sampling, tokenizer, task.validation_batch_size)
    of_each = how.of(config)
    if not config.process_index:
        write_json(path, {"measured_as": measured_as, "found": of_each})
    for name, found in of_each.items():
        low, high = found["accuracy_interval"]
        prepared.say(
            f"teacher {name}: {found['accuracy']:.3f} ({low:.3f} to {high:.3f}) on {found['problems']} problems"
        )
    return of_each
