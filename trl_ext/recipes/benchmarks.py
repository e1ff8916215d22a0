"""A model on published benchmarks by name: one evaluation each with one engine, and a table as papers have it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from accelerate import PartialState

from trl_ext.compat.given import recorded_names
from trl_ext.compat.startup import use_all_cores
from trl_ext.data.published import BENCHMARKS
from trl_ext.errors import InputError
from trl_ext.evaluation.benchmark_table import figures_of, text_table, write_tables
from trl_ext.evaluation.evaluator import Report
from trl_ext.generation.model_source import locate
from trl_ext.generation.samplers import Sampler
from trl_ext.hosts.process_group import join
from trl_ext.recipes.best_of_n import BestOfN, run_best_of_n, write_curves
from trl_ext.recipes.evaluate import PreparedEvaluation, measure, prepare, run_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.preflight import tokenizer_and_shape
from trl_ext.rewards.graders import equality_of


def default_config(recipe: Path, arguments: Sequence[str]) -> Path:
    """The YAML file of a recipe that is asked for benchmarks, or for a dataset."""
    flags = {argument.partition("=")[0] for argument in arguments}
    return recipe.with_name("evaluate_benchmarks.yaml") if "--benchmark" in flags else recipe.with_suffix(".yaml")


def run_evaluations(settings: Evaluation) -> dict[str, Report]:
    """Evaluate on the dataset, or on each benchmark; of benchmarks, write and print a table."""
    if not settings.benchmark:
        return {settings.dataset: run_evaluation(settings)}
    return on_each_benchmark(settings, lambda prepared, sampler_of: measure(prepared, sampler_of))


def run_best_of_ns(settings: BestOfN) -> dict[str, Any]:
    """Best-of-n on the dataset, or on each benchmark."""
    if not settings.benchmark:
        return run_best_of_n(settings)

    def evaluate(prepared: PreparedEvaluation, sampler_of: Callable[[PreparedEvaluation], Sampler]) -> Report:
        report = measure(prepared, sampler_of)
        write_curves(cast(BestOfN, prepared.settings), report)
        return report

    return on_each_benchmark(settings, evaluate)


def on_each_benchmark(
    settings: Evaluation, evaluate: Callable[[PreparedEvaluation, Callable[[PreparedEvaluation], Sampler]], Report]
) -> dict[str, Report]:
    """Evaluate on one benchmark after the other, all of whose inputs are checked before an engine starts.

    Args:
        evaluate: an evaluation, and what has the one engine for all of them -> its report.
    """
    use_all_cores()
    join(settings.ddp_timeout)
    prepared = [prepare(_of_benchmark(settings, name)) for name in settings.benchmark]
    contexts = [one.context for one in prepared if one.is_new]
    longest = None if None in contexts else max((int(context or 0) for context in contexts), default=None)
    made: list[Sampler] = []

    def sampler_of(one: PreparedEvaluation) -> Sampler:
        if not made:
            made.append(one.settings.sampler(one.model, longest))
        return made[0]

    reports = {}
    for name, one in zip(settings.benchmark, prepared, strict=True):
        if PartialState().is_main_process:
            print(f"\n{name}: {BENCHMARKS[name].answers}; {one.settings.samples} of each problem")
        reports[name] = evaluate(one, sampler_of)
    if PartialState().is_main_process:
        grader = _of_benchmark(settings, settings.benchmark[0]).grader
        figures = {name: figures_of(report, equality_of(grader)) for name, report in reports.items()}
        model = str(settings.model_name_or_path or "the base policy")
        print(f"\n{text_table(write_tables(Path(settings.output_dir), figures, model))}")
    return reports


def _of_benchmark(settings: Evaluation, name: str) -> Evaluation:
    """The settings of a benchmark's own evaluation: what nobody gave is as is usual for it."""
    benchmark, own = BENCHMARKS[name], copy.copy(settings)
    asked = recorded_names(settings)
    usual: dict[str, Any] = {"grader": "strict"}
    if settings.samples == 1:
        usual["samples"] = benchmark.samples if settings.temperature else 1
    if "grader" not in asked or settings.grader == "strict":
        usual |= benchmark.grading
    if "prompt" not in asked and _has_chat_template(settings):
        usual |= {"prompt": "chat", "answer_format": "boxed"}
    own.dataset, own.benchmark, own.output_dir = name, [name], str(Path(settings.output_dir) / name)
    for field, value in usual.items():
        if field not in asked:
            setattr(own, field, value)
    return own


def _has_chat_template(settings: Evaluation) -> bool:
    if not settings.model_name_or_path:
        return False
    try:
        return bool(tokenizer_and_shape(locate(settings.model_name_or_path))[0].chat_template)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
