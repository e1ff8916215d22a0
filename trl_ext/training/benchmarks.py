"""Benchmarks on the way: `--validation_benchmarks math500:problems=100,every=40 aime24:samples=8`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_ext.data.published import BENCHMARKS, names_of_benchmarks
from trl_ext.evaluation.benchmark_table import figures_of
from trl_ext.evaluation.evaluator import Report, grade_rows
from trl_ext.io import append_jsonl, print_line, read_jsonl
from trl_ext.ranks import run_on_main_and_broadcast
from trl_ext.registry import unknown
from trl_ext.rewards.graders import GRADERS, equality_of
from trl_ext.runs.layout import BENCHMARK_LOG

if TYPE_CHECKING:
    from trl_ext.training.trainer import ReliableTrainer

_OPTIONS = ("problems", "samples", "every")
_LOGGED = ("avg@k", "pass@k", "maj@k", "cons@k", "tokens", "truncated")


@dataclass(frozen=True)
class MeasuredBenchmark:
    """One of the benchmarks of a run.

    Attributes:
        problems: a sample of so many; None for all.
        samples: of each problem; None for the benchmark's usual number.
        every: optimizer steps; None as the run's validations.
    """

    name: str
    problems: int | None = None
    samples: int | None = None
    every: int | None = None


def parse_benchmarks(texts: Iterable[str]) -> list[MeasuredBenchmark]:
    """`NAME`, or `NAME:option=n,option=n`, each in a text of its own or separated by commas.

    Raises:
        UnknownName: there is no such benchmark or option.
        ValueError: an option is no number above 0.
    """
    given: dict[str, dict[str, int]] = {}
    options: dict[str, int] | None = None
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        name, colon, option = part.partition(":")
        if name.strip() and (colon or "=" not in part):
            options = given.setdefault(names_of_benchmarks([name])[0], {})
        elif not colon:
            option = part
        if options is None or not (name.strip() and (option or not colon)):
            raise ValueError(
                f"validation_benchmarks: {part!r}: an option, name=number, stands after a benchmark's name"
            )
        if option:
            options |= _option(option, part)
    return [MeasuredBenchmark(name, **asked) for name, asked in given.items()]


def _option(text: str, whole: str) -> dict[str, int]:
    name, _, value = text.partition("=")
    if name.strip() not in _OPTIONS:
        raise unknown("option of a benchmark", name.strip(), _OPTIONS)
    if not value.strip().isdecimal() or int(value) < 1:
        raise ValueError(f"validation_benchmarks: {whole!r}: {name} has to be a whole number above 0")
    return {name.strip(): int(value)}


class BenchmarkValidation(TrainerCallback):
    """Measures benchmarks before the first step, when they are due, and at the end, into `benchmarks.jsonl`.

    Args:
        rows: of each benchmark, with `prompt` and `answer`.
        grader: builds the strict grader with a benchmark's options.
        is_due: whether the run validates after a step, which a benchmark follows that does not say how often.
        sampling: of the run's validations.
    """

    def __init__(
        self,
        benchmarks: Sequence[MeasuredBenchmark],
        rows: Mapping[str, Sequence[Mapping[str, Any]]],
        grader: Callable[..., Any],
        is_due: Callable[[TrainerState], bool],
        sampling: Mapping[str, Any],
        folder: Path,
        trainer: ReliableTrainer,
    ) -> None:
        self.benchmarks, self.rows, self.grader, self.is_due = benchmarks, rows, grader, is_due
        self.sampling, self.log, self.trainer = dict(sampling), folder / BENCHMARK_LOG, trainer

    def on_train_begin(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure what is due at the step where the run begins or resumes, and was not before it was interrupted."""
        self._measure_those(state, self._is_due)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure what is due."""
        self._measure_those(state, self._is_due)

    def on_train_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Measure all that was not just measured, unless the run was stopped."""
        if self.trainer.stop_signal is None:
            self._measure_those(state, lambda benchmark, state: True, self.trainer.restored_step)

    def seconds_to_end(self) -> float:
        """Estimate the seconds that measuring all of them at the end takes: as long as each did at the longest."""
        longest: dict[str, float] = {}
        for row in self._measured():
            longest[row["benchmark"]] = max(row["seconds"], longest.get(row["benchmark"], 0.0))
        return sum(longest.values())

    def _measured(self) -> list[dict[str, Any]]:
        return _rows_of(self.log)

    def _is_due(self, benchmark: MeasuredBenchmark, state: TrainerState) -> bool:
        if benchmark.every:
            return state.global_step % benchmark.every == 0
        return state.global_step == 0 or self.is_due(state)

    def _measure_those(
        self,
        state: TrainerState,
        wanted: Callable[[MeasuredBenchmark, TrainerState], bool],
        restored: int | None = None,
    ) -> None:
        """Measure what is wanted, and was not with these weights: those of the step `restored`, if there is one."""
        due = [benchmark for benchmark in self.benchmarks if wanted(benchmark, state)]
        if not due:  # on all ranks alike
            return
        step = state.global_step
        of_step = step if restored is None else restored
        rows = run_on_main_and_broadcast(self._measured)
        done = {row["benchmark"] for row in rows if row["step"] == step and row.get("weights_of_step", step) == of_step}
        for benchmark in due:
            if benchmark.name not in done and self.trainer.stop_signal is None:
                with self.trainer.stopping_early():
                    self._measure(benchmark, state, {} if of_step == step else {"weights_of_step": of_step})

    def _measure(self, benchmark: MeasuredBenchmark, state: TrainerState, weights: Mapping[str, int]) -> None:
        began, name, facts = time.time(), benchmark.name, BENCHMARKS[benchmark.name]
        temperature = self.sampling["temperature"]
        is_greedy = (self.trainer.args.temperature if temperature is None else temperature) == 0
        k = benchmark.samples or (1 if is_greedy else facts.samples)
        asked = [
            {**row, "problem_id": number, "sample": sample}
            for number, row in enumerate(self.rows[name])
            for sample in range(k)
        ]
        completions = self.trainer.sample([row["prompt"] for row in asked], rows=asked, **self.sampling)
        grade = functools.partial(grade_rows, asked, completions, self.grader(GRADERS, "strict", **facts.grading))
        figures = run_on_main_and_broadcast(lambda: figures_of(Report(grade(), k), equality_of("strict")))
        seconds = round(time.time() - began, 2)
        logged = {f"benchmark/{name}/{key}": figures[key] for key in _LOGGED if figures[key] is not None}
        self.trainer.log_now(logged | {f"benchmark/{name}/seconds": seconds})
        if state.is_world_process_zero:
            known = {"step": state.global_step, **weights, "benchmark": name, "seconds": seconds}
            append_jsonl(self.log, [{**known, **figures}])
            if not self.trainer.args.disable_tqdm:
                print_line(
                    f"{name} at step {state.global_step:>4}/{state.max_steps}: avg@{k} {figures['avg@k']:.3f}  "
                    f"({figures['low']:.3f} to {figures['high']:.3f}; {figures['problems']} problems; {seconds:.0f} s)"
                )


def latest_benchmarks(folder: Path) -> dict[str, Any]:
    """The last figures of each benchmark of a run."""
    return {row["benchmark"]: row for row in _rows_of(folder / BENCHMARK_LOG)}


def _rows_of(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []
