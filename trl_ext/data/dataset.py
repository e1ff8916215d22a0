"""The settings of a dataset, for training and evaluation: where it is, its columns, prompt and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.compat.given import RecordsGiven, given
from trl_ext.data.lengths import TOO_LONG
from trl_ext.data.load import (
    ANSWER_SOURCES,
    GENERATORS,
    Problems,
    check_options,
    chosen_rows,
    generated_table,
    problems_of,
    read_table,
)
from trl_ext.data.published import PUBLISHED, Copy, read_published
from trl_ext.data.source import Source
from trl_ext.generation.prompts import Asking, prompt_names
from trl_ext.mini.policy import make_base_policy
from trl_ext.mini.tasks import TASKS
from trl_ext.registry import Registry, parse_options
from trl_ext.rewards.extract import ANSWER_FORMATS
from trl_ext.rewards.judge.grader import NEEDS_A_FILE
from trl_ext.rewards.judge.judging import judge_of
from trl_ext.rewards.judge.prompt import fingerprint
from trl_ext.rewards.judge.settings import read_judge
from trl_ext.setting import Group, OnResume, check_intervals, setting

# A resumed run may name them otherwise, since its record has a fingerprint of the rows that they led to.
_COLUMNS = {"problem_column": "problem", "answer_column": "answer", "answer_source": "answer_source"}
JUDGE = "judge"  # the reward and the grader that ask a language model
FIRST_ROWS = "the first rows"  # also what records say nothing of, since versions before knew no sample


@dataclass
class DatasetSettings(RecordsGiven):
    """A dataset's place, columns and prompt; a ValueError for a name or a choice that there is not."""

    dataset: str = setting(
        "mini_math",
        (
            f"The problems: {', '.join(GENERATORS)}, gsm8k, a Hub id or a file. Published "
            f"sets are {', '.join(PUBLISHED)}; a file is .jsonl, .json, .csv or .parquet, with {{split}} in its path. "
            "GSM8K, MATH, Countdown and chats are read as they are published."
        ),
        Group.MODEL,
    )
    dataset_config: str | None = setting(
        None, "The configuration of a Hub dataset; several are separated by commas.", Group.MODEL
    )
    benchmark_dir: str | None = setting(
        None,
        (
            "A folder with local copies of published datasets and benchmarks. They are NAME.jsonl or NAME/SPLIT.jsonl "
            "(.json, .csv, .parquet), in any layout of the Hub's, and read instead of those."
        ),
        Group.MODEL,
        on_resume=OnResume.MAY_CHANGE,
        rare=True,
    )
    dataset_options: dict[str, Any] | str | None = setting(
        None,
        (
            f"Options of {', '.join(name for name in TASKS if TASKS.options(name))}, such as longest=12. "
            "The base policy that is made for such a dataset has read it with the same options."
        ),
        Group.MODEL,
    )
    problem_column: str = setting(
        "problem",
        "The column that holds it. Unset, known layouts are recognized.",
        Group.MODEL,
        on_resume=OnResume.MAY_CHANGE,
    )
    answer_column: str = setting(
        "answer",
        "The column that holds it. Unset, known layouts are recognized.",
        Group.MODEL,
        on_resume=OnResume.MAY_CHANGE,
    )
    answer_source: str = setting(
        "as_is",
        f"How the answer is read: {', '.join(sorted(ANSWER_SOURCES))}.",
        Group.MODEL,
        on_resume=OnResume.MAY_CHANGE,
    )
    prompt: str = setting(
        "r1_zero",
        (
            f"The prompt is {', '.join(prompt_names())}, or a file with {{question}} in it. chat and a .yaml "
            "file of messages are put into the model's own chat template."
        ),
        Group.MODEL,
        on_resume=OnResume.VALIDATION,
    )
    system_prompt: str | None = setting(
        None,
        "The system message of every conversation. The default is the template's own, if any.",
        Group.MODEL,
        on_resume=OnResume.VALIDATION_AS_USED,
    )
    answer_format: str | None = setting(
        None,
        (
            f"Where a response states its answer: {', '.join(sorted(ANSWER_FORMATS))}. The default "
            "is r1_zero, and boxed for the question_only prompt and for conversations."
        ),
        Group.MODEL,
        on_resume=OnResume.VALIDATION,
    )

    numeric_tolerance: float = setting(
        0.0,
        "The relative error that the strict grader accepts in a number; 0 means exact.",
        Group.REWARD,
        within="[0, 1)",
    )
    worked_out: bool | None = setting(
        None,
        (
            "The strict grader refuses what is equal and not worked out: 17+25 for 42. Its measure is how far the "
            "reference answer is worked out. The default is true, and false for --responses that someone else drew."
        ),
        Group.REWARD,
    )
    judge: str | None = setting(
        None,
        (
            "The file of the judge. The reward and the grader judge need it: YAML with url and model of an "
            "OpenAI-compatible endpoint, rubric, sampling and limits."
        ),
        Group.REWARD,
        on_resume=OnResume.MAY_CHANGE,
    )
    too_long: str = setting(
        "refuse",
        f"What happens to prompts that leave no room for the longest response: {', '.join(TOO_LONG)}.",
        Group.MODEL,
    )
    sample_seed: int = setting(
        0,
        (
            "The seed of dataset subsampling, independent of --seed. A number of problems is a "
            "sample stratified by level and subject; runs with other seeds are therefore measured "
            "on the same problems."
        ),
        Group.MODEL,
    )

    gguf_file: str | None = setting(
        None, "The GGUF file of the model's folder, where it has several.", Group.MODEL, rare=True
    )
    base_policy_seed: int | None = setting(
        None,
        (
            "The seed of the base policy that is made without --model_name_or_path. The default is --seed; with one "
            "number for all seeds, runs differ in what they train and not in where they begin."
        ),
        Group.MODEL,
        rare=True,
    )

    def __post_init__(self) -> None:
        check_intervals(self)
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long must be one of {', '.join(TOO_LONG)}, got {self.too_long!r}")
        self.dataset_options = parse_options("dataset_options", self.dataset_options)
        check_options(self.dataset, self.dataset_options)
        asking = self.asking
        ANSWER_SOURCES.build(self.answer_source)
        if self.answer_format is None:
            self.answer_format = "boxed" if asking.is_chat or self.prompt == "question_only" else "r1_zero"
        ANSWER_FORMATS.get_function(self.answer_format)

    def read(self, split: str, n: int | None, seed: int, in_sample_order: bool = False) -> Problems:
        """The rows of a split and their source.

        Args:
            split: `train` or `validation` of a generated dataset, else the split's name.
            n: a sample of n rows, in proportion to levels and subjects, of which the first m are the sample of m; None
                for all rows. A generated dataset is endless, so it needs n, and gives its first n.
            seed: of a generator.
            in_sample_order: all rows in the order in which a sample takes them, also without n.

        Raises:
            ValueError: there is no such file, split or column, or a row has no answer.
        """
        asked = {_COLUMNS[name]: str(value) for name, value in given(self, _COLUMNS).items()}
        if self.dataset in GENERATORS:
            chosen = generated_table(self.dataset, split, n, seed, self._options)
            return problems_of(*chosen, asked, self.asking)
        copy = self._copy(split)
        chosen = chosen_rows(copy.table, copy.dataset, copy.split, n, self.sample_seed, in_sample_order)
        chosen[2].differs, chosen[2].passed_over = copy.differs, list(copy.passed_over)
        return problems_of(*chosen, asked, self.asking, None if asked else copy.columns)

    def read_benchmark(self, name: str, n: int | None) -> Problems:
        """A sample of n problems of a benchmark, or all, asked as this dataset's are; a ValueError if it has none."""
        copy = read_published(name, "validation", None, self.benchmark_dir)
        chosen = chosen_rows(copy.table, copy.dataset, copy.split, n, self.sample_seed, in_sample_order=False)
        chosen[2].differs, chosen[2].passed_over = copy.differs, list(copy.passed_over)
        return problems_of(*chosen, {}, self.asking, copy.columns)

    def _copy(self, split: str) -> Copy:
        if self.dataset in PUBLISHED:
            return read_published(self.dataset, split, self.dataset_config, self.benchmark_dir)
        return Copy(read_table(self.dataset, split, self.dataset_config), self.dataset, split, None)

    @property
    def asking(self) -> Asking:
        """How a problem is put to the model; a ValueError for a template that there is not."""
        return Asking.named(self.prompt, self.system_prompt)

    @property
    def _options(self) -> dict[str, Any] | None:
        assert not isinstance(self.dataset_options, str)  # parsed when the settings were made
        return self.dataset_options

    def base_policy(self, seed: int) -> str:
        """The folder of the policy that is made here: one that has read the dataset, or mini-MATH if it is no task.

        Args:
            seed: of the run, which is the policy's unless the settings have another.
        """
        task = self.dataset if self.dataset in TASKS else "mini_math"
        own = seed if self.base_policy_seed is None else self.base_policy_seed
        return str(make_base_policy(seed=own, task=task, options=self._options))

    def build(self, table: Registry, name: str, **options: object) -> Callable[..., Any]:
        """A reward or a grader for this answer format and tolerance; a function of the user's own may do without.

        Args:
            options: of the function, in place of these settings.
        """
        known = table.options(name)
        ours: dict[str, object] = {"answer_format": self.answer_format}
        if self.numeric_tolerance:
            ours["numeric_tolerance"] = self.numeric_tolerance
        if not self.wants_worked_out:
            ours["worked_out"] = False
        if self.judge is not None:
            ours["judge_file"] = self.judge
        if name == JUDGE and self.judge is None:
            raise ValueError(NEEDS_A_FILE)
        return table.build(name, **{option: value for option, value in ours.items() if option in known} | options)

    @property
    def judge_is(self) -> str | None:
        """A fingerprint of the judge, which a resumed run has to have too; None without one."""
        return None if self.judge is None else fingerprint(read_judge(Path(self.judge)))[:16]

    def check_judge(self) -> None:
        """Refuse, by an `InputError`, a judge that does not answer."""
        if self.judge is not None:
            judge_of(self.judge).check()

    @property
    def wants_worked_out(self) -> bool:
        """Whether the strict grader wants an answer worked out; not by default of responses that someone else drew."""
        return self.worked_out if self.worked_out is not None else getattr(self, "responses", None) is None

    def check_grading(self, *graders: str) -> None:
        """Raise a ValueError for a tolerance or a judge's file that none of the run's graders has, or a faulty file."""
        if self.judge is not None:
            read_judge(Path(self.judge))
            if JUDGE not in graders:
                raise ValueError(
                    f"judge {self.judge} is for the reward or the grader judge, and this run has "
                    f"{' and '.join(filter(None, graders))}: choose judge, or leave it out"
                )
        if self.numeric_tolerance and "strict" not in graders:
            raise ValueError(
                f"numeric_tolerance {self.numeric_tolerance} is for the grader strict, and this run has "
                f"{' and '.join(filter(None, graders))}: choose strict, or leave it out"
            )


def problems_are(sources: Iterable[Source]) -> str:
    """Which rows of a dataset are used, for a run's record: a resumed run must use the same."""
    sampled = any(source.order == "sampled" for source in sources)
    return "a stratified sample" if sampled else FIRST_ROWS
