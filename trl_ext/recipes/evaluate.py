"""The evaluation recipe: a model, a dataset and sampling settings to graded samples in a folder, and what they say."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from tqdm import tqdm
from transformers.utils import logging

from trl_ext.compat.given import given
from trl_ext.compat.on_resume import on_resume
from trl_ext.compat.startup import use_all_cores
from trl_ext.data.dataset import problems_are
from trl_ext.data.lengths import Room, context_of, engine_context, rows_that_fit
from trl_ext.data.references import Checker, check_references, first_rank
from trl_ext.data.responses import completion_of, read_responses
from trl_ext.data.source import Source
from trl_ext.errors import InputError, Stopped
from trl_ext.evaluation.disagreements import agreement
from trl_ext.evaluation.evaluator import SAMPLES, Report, grade_rows, is_correct
from trl_ext.evaluation.export import ExportedTask, write_tasks
from trl_ext.generation.adapter_models import generation_config_of
from trl_ext.generation.determinism import check_model
from trl_ext.generation.engine_choice import dtype_to_sample_in
from trl_ext.generation.hf import eos_ids_of
from trl_ext.generation.interruption import SamplingStopped, StopRequest
from trl_ext.generation.model_source import loadable, locate
from trl_ext.generation.progress import reporting
from trl_ext.hosts.process_group import join
from trl_ext.io import (
    append_jsonl,
    as_yaml,
    digest_of,
    drop_torn_line,
    read_jsonl,
    read_yaml,
    write_json,
    write_jsonl,
    write_text,
)
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.recipes.chat import Chat, ShownTools
from trl_ext.recipes.contamination import contamination, contamination_line
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.measured import (
    FINGERPRINTS,
    SETTINGS,
    fingerprint_of_judge,
    fingerprints,
    refuse_other_inputs,
    shown_line,
)
from trl_ext.recipes.preflight import check_vocabulary, tokenizer_and_shape
from trl_ext.redaction import redact
from trl_ext.rewards.graders import GRADERS
from trl_ext.rewards.workers.pool import PoolError
from trl_ext.runs.fingerprint import fingerprints_of_named_files
from trl_ext.runs.layout import PARTS, SUMMARY
from trl_ext.runs.provenance import provenance
from trl_ext.runs.resume import SettingsKnowledge
from trl_ext.runs.tables_and_plots import evaluation_summary, evaluation_table, examples
from trl_ext.setting import OnResume

if TYPE_CHECKING:
    from datasets import Dataset

    from trl_ext.generation.samplers import Sampler


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation whose inputs were checked, before an engine starts.

    Attributes:
        settings: with the model's stop strings, if it is asked by its chat template.
        model: a folder or a Hub id.
        problems: the rows, whose prompts are texts.
        decisive: what decides the samples and their grades.
        is_new: whether it has not ended before.
        fitting: places of the problems whose prompts leave room for a response; of one that has ended, none.
        context: the tokens that the longest of them needs with its response; None where it does not matter.
        contamination: which of the problems the model's run was trained on; None where no run of ours left the model.
    """

    settings: Evaluation
    model: str
    problems: Dataset
    source: Source
    decisive: dict[str, Any]
    is_new: bool
    fitting: set[int]
    context: int | None
    contamination: dict[str, Any] | None

    @property
    def folder(self) -> Path:
        """Where everything is written to."""
        return Path(self.settings.output_dir)


# Settings that decide nothing by themselves, since there are fingerprints of what they lead to.
_READ_BY = ("problem_column", "answer_column", "answer_source", "benchmark_dir", "judge")
SamplerOf = Callable[[PreparedEvaluation], "Sampler"]


def run_evaluation(
    settings: Evaluation, take_over: Callable[[Mapping[str, Any]], None] = lambda decisive: None
) -> Report:
    """Sample what is not there yet, grade it, write samples and summary, print the table.

    An `InputError` refuses a dataset that cannot be used, or a folder with an evaluation of other settings, of another
    model or of other rows.

    Args:
        take_over: called on the main process with what decides the samples, before the folder is looked at.
    """
    use_all_cores()
    logging.disable_progress_bar()  # of transformers: a bar of half a second before the evaluation's own
    state = join(settings.ddp_timeout)
    if settings.responses:
        return Report(run_on_main_and_broadcast(lambda: _grade_responses(settings).rows, InputError))
    if settings.export:
        return _export(settings, state.is_main_process)
    return measure(prepare(settings, take_over))


def prepare(
    settings: Evaluation, take_over: Callable[[Mapping[str, Any]], None] = lambda decisive: None
) -> PreparedEvaluation:
    """Read and check everything that an evaluation needs, as `run_evaluation` says."""
    folder = Path(settings.output_dir)
    is_new = not (folder / SUMMARY).exists()
    problems, source = _load(settings, is_new)
    with PartialState().main_process_first():
        named = settings.model_name_or_path
        model = loadable(named) if named else settings.base_policy(settings.seed)
    problems = _as_texts(settings, model, problems)
    made_from = run_on_main_and_broadcast(lambda: fingerprints(settings, model, problems), InputError)
    decisive = _decisive(settings, source) | {FINGERPRINTS: made_from}
    run_on_main_and_broadcast(lambda: take_over(decisive), InputError)
    _refuse_other_settings(folder, decisive)
    fitting, context = _rows_that_fit(settings, model, problems, source) if is_new else (set(), None)
    seen = contamination(named, problems["problem"]) if is_new and PartialState().is_main_process else None
    return PreparedEvaluation(settings, model, problems, source, decisive, is_new, fitting, context, seen)


def measure(prepared: PreparedEvaluation, sampler_of: SamplerOf | None = None) -> Report:
    """Sample what is not there yet, grade it, write samples and summary, and print the table.

    Args:
        sampler_of: makes the engine, or has it from an evaluation before; called only where something is to sample.
    """
    began, settings, folder, source = time.time(), prepared.settings, prepared.folder, prepared.source
    state = PartialState()
    _claim(folder, prepared.decisive)
    rows = run_on_main_and_broadcast(lambda: _rows_in(folder))
    if prepared.is_new:
        if state.is_main_process:
            print(source.line(settings.split))
            if prepared.contamination:
                print(contamination_line(prepared.contamination, len(prepared.problems)))
            with_vllm, why = settings.engine()
            dtype = dtype_to_sample_in(settings.dtype, locate(prepared.model).dtype)
            stored = "" if dtype == "auto" else f", weights in {dtype}"
            print(f"responses by {'vLLM' if with_vllm else 'HF generate'}{stored}: {why}")
        todo = [
            n for n in range(len(prepared.problems) * settings.samples) if n // settings.samples in prepared.fitting
        ]
        sampling = _sample(prepared, [n for n in todo if n not in rows], rows, sampler_of or _own_sampler)
        state.wait_for_everyone()
        rows = run_on_main_and_broadcast(lambda: _rows_in(folder))
    report = Report([rows[n] for n in sorted(rows)])
    if state.is_main_process:
        if prepared.is_new:
            engine = "vLLM" if settings.engine()[0] else "HF generate"
            of_model = settings.model_name_or_path or "the base policy"
            drawn = {"model": of_model, "engine": engine, **sampling, **_to_reproduce(prepared)}
            _write(folder, report, drawn, source, time.time() - began)
        else:
            print(shown_line(folder))
        _show(folder, report, settings)
    state.wait_for_everyone()
    return report


def _to_reproduce(prepared: PreparedEvaluation) -> dict[str, Any]:
    """What it takes to measure the same: a prompt as rendered, what ends a response, settings and fingerprints."""
    source, settings = locate(prepared.model), prepared.settings
    tokenizer, _ = tokenizer_and_shape(source)
    ends = eos_ids_of(generation_config_of(source), tokenizer.eos_token_id)
    decisive = dict(prepared.decisive)
    made_from = decisive.pop(FINGERPRINTS)
    first = prepared.problems[0]["prompt"] if len(prepared.problems) else None
    return {
        "first_prompt": first,
        **({"contamination": prepared.contamination} if prepared.contamination else {}),
        "end_tokens": {str(token): tokenizer.convert_ids_to_tokens(token) for token in ends},
        "settings": decisive | redact(given(settings, _READ_BY)),
        FINGERPRINTS: made_from,
    }


def _own_sampler(prepared: PreparedEvaluation) -> Sampler:
    return prepared.settings.sampler(prepared.model, prepared.context)


def _show(folder: Path, report: Report, settings: Evaluation) -> None:
    print(evaluation_table(report))
    if missing := report.without_verdict:
        print(f"{missing} of {len(report.rows)} responses have no verdict of the judge, and count as incorrect")
    if any(row.get("verdict") is not None for row in report.rows):
        print(agreement(report.rows))
    print("\n".join(examples(report, settings.show, settings.category)))
    print(f"everything is in {folder}: {SAMPLES}, {SUMMARY}")


def _grade_responses(settings: Evaluation) -> Report:
    """Grade the responses of a file, all of which is checked before; no model is loaded."""
    began, folder, path = time.time(), Path(settings.output_dir), Path(str(settings.responses))
    try:
        rows = read_responses(path, settings.response_fields, settings.answer_source)
        for row in rows:
            if settings.response_stop not in row["response"] and row["finish_reason"] != "length":
                row["response"] += settings.response_stop
        first = f"{rows[0]['problem'][:60]!r} -> {repr(rows[0]['answer'])[:60]}"
        source = Source(str(path), "", len(rows), len(rows), "stored", columns="responses", first=first)
        checker = Checker(settings.grader, str(settings.answer_format), settings.answer_source)
        answers = {"answer": [row["answer"] for row in rows], "row": range(len(rows))}
        check_references(answers, "responses", source, checker, quiet=False)
        made_from = fingerprints_of_named_files(settings.grader) | fingerprint_of_judge(settings)
        decisive = _decisive(settings, source) | {"responses_are": digest_of(path), FINGERPRINTS: made_from}
    except (ValueError, OSError, PoolError) as error:
        raise InputError(str(error)) from error
    _refuse_other_settings(folder, decisive)
    if not (folder / SUMMARY).exists():
        settings.check_judge()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SETTINGS, as_yaml(decisive))
        print(f"{len(rows)} responses of {path}; the first problem and answer: {first}")
        graded = grade_rows(rows, list(map(completion_of, rows)), settings.build(GRADERS, settings.grader))
        known = [{name: row[name] for name in ("tokens", "finish_reason")} for row in rows]  # None where not known
        report = Report([{**row, **more} for row, more in zip(graded, known, strict=True)])
        drawn = {"model": settings.model_name_or_path or "not known", "engine": "drawn by someone else"}
        _write(folder, report, drawn, source, time.time() - began)
    else:
        print(shown_line(folder))
    report = Report(read_jsonl(folder / SAMPLES))
    _show(folder, report, settings)
    return report


def _export(settings: Evaluation, is_main: bool) -> Report:
    """Write the evaluation as tasks of other harnesses; nothing is sampled."""
    problems, _ = _load(settings, is_new=True)
    problems = _as_texts(settings, str(settings.model_name_or_path), problems)
    options: dict[str, Any] = settings.build(GRADERS, settings.grader).keywords  # type: ignore[attr-defined]
    name = Path(settings.dataset.replace("{split}", settings.split)).stem
    task = ExportedTask(name, settings.grader, options, settings.samples, settings.sampling())
    if is_main:
        model = loadable(settings.model_name_or_path) if settings.model_name_or_path else None
        print(write_tasks(Path(str(settings.export)), task, problems.to_list(), model))
    return Report([])


def _load(settings: Evaluation, is_new: bool) -> tuple[Dataset, Source]:
    """The problems and where they are from; of a new evaluation, the reference answers are checked."""
    try:
        if settings.model_name_or_path:
            settings.check_model(locate(settings.model_name_or_path))
        read = settings.read(settings.split, settings.problems, settings.seed)
        if is_new:
            first_rank(settings.check_judge)
            checker = Checker(settings.grader, str(settings.answer_format), settings.answer_source)
            first_rank(lambda: check_references(read.rows, settings.split, read.source, checker, quiet=False))
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    return read.rows, read.source


def _as_texts(settings: Evaluation, model: str, problems: Dataset) -> Dataset:
    """The problems with texts as prompts, by the model's chat template where they are conversations."""
    if not (settings.asking.is_chat or settings.tools):
        return problems
    try:
        source = locate(model)
        tokenizer = tokenizer_and_shape(source)[0]
        tools = ShownTools.of(settings, tokenizer, settings.asking.is_chat) if settings.tools else None
        if not settings.asking.is_chat:
            return problems if tools is None else tools.in_texts(problems)
        chat = Chat.with_model(source, tokenizer, settings.chat_template_kwargs, tools)
        settings.stop = list(dict.fromkeys([*settings.stop, *chat.more_stops]))
        texts: Dataset = chat.texts(problems)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if PartialState().is_main_process:
        print(chat.line(texts))
    return texts


def _rows_that_fit(settings: Evaluation, model: str, problems: Dataset, source: Source) -> tuple[set[int], int | None]:
    """The problems whose prompts leave room for the longest response, by their place, and the context for them."""
    try:
        tokenizer, shape = tokenizer_and_shape(locate(model))
        check_vocabulary(tokenizer, shape, model)
        if settings.covered is not None:
            check_model(settings.covered, shape.get_text_config().model_type, None)
        context, setting = context_of(shape, settings.engine()[0], settings.vllm_max_model_length)
        rows = problems.add_column("place", range(len(problems)))
        if context is not None:
            room = Room(context, setting, settings.max_tokens, "max_tokens")
            rows = rows_that_fit(rows, settings.split, source, tokenizer, room, settings.too_long)
        needed = engine_context([(rows["prompt"], settings.max_tokens)], tokenizer, context)
        return set(rows["place"]), needed
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


def _refuse_other_settings(folder: Path, mine: dict[str, Any]) -> None:
    there = read_yaml(folder / SETTINGS) if (folder / SETTINGS).exists() else mine
    left_out = [FINGERPRINTS]
    if there.get(FINGERPRINTS) == mine[FINGERPRINTS]:
        left_out.append("model_name_or_path")  # its folder was moved, or is written otherwise
    settings = {name: value for name, value in mine.items() if name not in left_out}
    if other := differing(SettingsKnowledge.of([Evaluation]).completed(there, settings), settings):
        raise InputError(
            f"{folder} holds an evaluation of other settings ({other}). Give another --output_dir, or remove it."
        )
    refuse_other_inputs(folder, there.get(FINGERPRINTS), mine[FINGERPRINTS])


def differing(there: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """The settings of an evaluation that are others now, in a line."""
    return "; ".join(f"{k}: {there.get(k)!r} there, {v!r} now" for k, v in mine.items() if there.get(k) != v)


def _decisive(settings: Evaluation, source: Source) -> dict[str, Any]:
    """What decides the samples and their grades."""
    meaning = on_resume([Evaluation])
    mine = redact({k: v for k, v in dataclasses.asdict(settings).items() if meaning.get(k) is not OnResume.MAY_CHANGE})
    return mine | {"problems_are": problems_are([source])}


def _claim(folder: Path, decisive: dict[str, Any]) -> None:
    """Take the folder, which is new or has samples of the same settings."""
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(PARTS):
            drop_torn_line(part)
        write_text(folder / SETTINGS, as_yaml(decisive))
    state.wait_for_everyone()


def _rows_in(folder: Path) -> dict[int, dict[str, Any]]:
    """What has been sampled, by the sample's number, from all ranks of all attempts."""
    return {row["number"]: row for path in sorted(folder.glob("samples*.jsonl")) for row in read_jsonl(path)}


def _sample(
    prepared: PreparedEvaluation, todo: Sequence[int], rows: Mapping[int, dict[str, Any]], sampler_of: SamplerOf
) -> dict[str, Any]:
    """Sample this rank's part of `todo` in batches, each written once it is graded.

    Returns what the engine was told about sampling, and its dtype; nothing if there was nothing to do.
    """
    if not todo:
        return {}
    state, settings, problems = PartialState(), prepared.settings, prepared.problems
    grader: Callable[..., Any] = settings.build(GRADERS, settings.grader)
    sampler = sampler_of(prepared)
    mine = todo[state.process_index :: state.num_processes]
    correct, done = sum(map(is_correct, rows.values())), len(rows)
    part = Path(settings.output_dir) / f"samples.rank{state.process_index}.jsonl"
    is_quiet = None if state.is_main_process else True  # None: a bar in a terminal
    with (
        _stopping_on_sigterm(alone=state.num_processes == 1),
        reporting("sampling", len(mine), settings.max_tokens),
        tqdm(total=len(mine), disable=is_quiet) as bar,
    ):
        for start in range(0, len(mine), settings.batch_size):
            numbers = mine[start : start + settings.batch_size]
            chosen = [problems[n // settings.samples] for n in numbers]
            try:
                completions = sampler([problem["prompt"] for problem in chosen], numbers, chosen)
            except FloatingPointError as error:
                raise InputError(f"model {settings.model_name_or_path!r}: {error}") from error
            graded = grade_rows(chosen, completions, grader)
            places = [{"problem_id": n // settings.samples, "sample": n % settings.samples} for n in numbers]
            append_jsonl(part, [{"number": n, **p, **r} for n, p, r in zip(numbers, places, graded, strict=True)])
            correct, done = correct + sum(map(is_correct, graded)), done + len(graded)
            bar.set_postfix_str(f"accuracy {correct / done:.3f}")
            bar.update(len(numbers))
    return {"sampling": sampler.parameters(), "dtype": sampler.dtype}


@contextlib.contextmanager
def _stopping_on_sigterm(alone: bool) -> Iterator[None]:
    """SIGTERM ends the batch that is being sampled; one that is being graded is written first.

    Args:
        alone: of several processes, each is ended by the signal itself, since none can wait for the others.

    Raises:
        Stopped: the signal came.
    """
    if not alone:
        yield
        return
    request = StopRequest()
    try:
        with request.listening(), request.ending_sampling():
            yield
    except SamplingStopped:
        raise Stopped(signal.SIGTERM) from None


def _write(folder: Path, report: Report, drawn: Mapping[str, Any], source: Source, seconds: float) -> None:
    """All ranks' samples in one file, in order, and the summary; `drawn` says by what."""
    write_jsonl(folder / SAMPLES, report.rows)
    for part in folder.glob(PARTS):
        part.unlink()
    more = {**drawn, "data": source.summary(), "wall_clock_s": round(seconds, 1), **provenance()}
    write_json(folder / SUMMARY, redact({**evaluation_summary(report), **more}), indent=2)
