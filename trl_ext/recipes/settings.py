"""The settings that every recipe has in addition to the model's and the trainer's: the task and its validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.files import READERS
from trl_ext.data.load import GENERATED_PROBLEMS, GENERATORS, Problems
from trl_ext.data.published import BENCHMARKS
from trl_ext.data.source import Source
from trl_ext.rewards.graders import GRADERS
from trl_ext.setting import Group, OnResume, setting
from trl_ext.training.benchmarks import MeasuredBenchmark, parse_benchmarks


@dataclass
class Data:
    """What a run trains on and is measured on."""

    train: Any  # rows with `prompt` and with `answer`, or with `response` where they are traces
    validation: Any  # rows with `prompt` and `answer`
    sources: dict[str, Source] = field(default_factory=dict)  # by role; a caller's own rows may have none
    counts: dict[str, int] = field(default_factory=dict)  # numbers of traces after each filter
    note: str = ""  # what is to be known of the prompts
    benchmarks: dict[str, Problems] = field(default_factory=dict)  # that are measured on the way, by name

    def lines(self) -> list[str]:
        """What is to be known of the rows, as a person reads it."""
        measured = {name: problems.source for name, problems in self.benchmarks.items()}
        known = [*self.sources.items(), *measured.items()]
        lines = [source.line(role) for role, source in known if source.available is not None or source.too_long]
        if "correct" in self.counts:
            lines.insert(0, "{correct} of {unique} traces have the correct answer".format_map(self.counts))
        return [*lines, self.note] if self.note else lines


@dataclass
class TaskSettings(DatasetSettings):
    """What to learn and how it is measured; every recipe has its own."""

    train_split: str = setting("train", "The split of the dataset for it.", Group.MODEL)
    validation_split: str = setting(
        "validation",
        "The split of the dataset for it.",
        Group.MODEL,
        on_resume=OnResume.VALIDATION,
        aliases="--split",
    )
    train_problems: int | None = setting(
        None,
        (
            "Train on a sample of this many problems. The default is all, and "
            f"{GENERATED_PROBLEMS} of a generated dataset."
        ),
        Group.MODEL,
        within="[1, inf)",
    )
    validation_problems: int | None = setting(
        None,
        "Validate on a sample of this many problems. The default is all.",
        Group.VALIDATION,
        on_resume=OnResume.VALIDATION_AS_USED,
        within="[1, inf)",
    )
    validation_grader: str = setting(
        "compatible",
        f"The validations' grader: {', '.join(sorted(GRADERS))}, or file.py:function.",
        Group.VALIDATION,
        on_resume=OnResume.VALIDATION_AS_USED,
        also_called="reward_fn",
    )
    validate_every: int = setting(
        20,
        "Validate every N optimizer steps.",
        Group.VALIDATION,
        on_resume=OnResume.MAY_CHANGE,
        also_called="eval_interval eval_step",
        within="[1, inf)",
    )
    validation_batch_size: int = setting(
        256,
        "Sample this many prompts per batch in a validation.",
        Group.VALIDATION,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
    )
    validation_temperature: float | None = setting(
        None,
        "The sampling temperature of validations; 0 means greedy decoding. The default is that of training.",
        Group.VALIDATION,
        on_resume=OnResume.VALIDATION_AS_USED,
        within="[0, inf)",
    )
    validation_max_tokens: int | None = setting(
        None,
        "The maximum response length in validations, in tokens. The default is that of training.",
        Group.VALIDATION,
        on_resume=OnResume.VALIDATION_AS_USED,
        within="[1, inf)",
    )
    validation_samples: int = setting(
        1,
        "Sample each problem of a validation N times, and measure pass@k for k = 2, 4, ... up to N.",
        Group.VALIDATION,
        on_resume=OnResume.VALIDATION,
        within="[1, inf)",
    )
    final_validation_problems: int | None = setting(
        None,
        (
            "The number of problems in the final validation. They include those of the other "
            "validations, which is the default."
        ),
        Group.VALIDATION,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
    )
    validation_benchmarks: list[str] = setting(
        list,
        (
            "Benchmarks to measure before, on the way and at the end, such as math500:every=40. Others are "
            f"{', '.join(BENCHMARKS)}; each may have options: problems=100,samples=8,every=40."
        ),
        Group.VALIDATION,
        on_resume=OnResume.MAY_CHANGE,
    )
    restore_best: bool = setting(
        False,
        (
            "End with the weights of the best validation instead of the last ones. Of validations "
            "within one standard error of the best, the latest counts."
        ),
        Group.VALIDATION,
        on_resume=OnResume.MAY_CHANGE,
    )
    check_memory: str = setting(
        "auto",
        (
            "Estimate the run's memory and refuse what would not fit: auto, true or false. auto does so with a GPU; "
            "trl-ext estimate does so without."
        ),
        Group.LIMITS,
        also_called="foresee",
        on_resume=OnResume.OF_PROCESS,
    )
    collapse_threshold: float | None = setting(
        None,
        "End the run when two validations in a row are below this fraction of the best.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="(0, 1)",
    )
    target_accuracy: float | None = setting(
        None,
        "End the run when a validation has this accuracy.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="(0, 1]",
    )
    validation_patience: int | None = setting(
        None,
        "End the run after N validations in a row without a new best accuracy.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
    )
    stop_after_zero_variance_steps: int | None = setting(
        None,
        "End the run after N logged steps in a row without reward variance in any group.",
        Group.LIMITS,
        on_resume=OnResume.MAY_CHANGE,
        within="[1, inf)",
        rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grader()
        parse_benchmarks(self.validation_benchmarks)  # refuses what there is not
        self.reward_functions()
        self.check_grading(self.validation_grader, *self.rewards)
        if self.train_problems is None and self.trains_on[0] in GENERATORS:
            self.train_problems = GENERATED_PROBLEMS
        self._refuse_to_validate_on_what_is_trained_on()
        self.checks_memory()  # refuses an unknown choice

    def checks_memory(self) -> bool:
        """Whether memory is estimated before the model loads."""
        choice = str(self.check_memory).lower()
        if choice not in ("auto", "true", "false"):
            raise ValueError(f"check_memory must be auto, true or false, got {self.check_memory!r}")
        if choice == "true" and not torch.cuda.is_available():
            raise ValueError("check_memory: true needs a GPU; trl-ext estimate is for a run on another machine's")
        return choice != "false" and torch.cuda.is_available()

    @property
    def rewards(self) -> list[str]:
        """The names of the rewards; none where responses are imitated."""
        return []

    def reward_functions(self) -> list[Callable[..., Any]]:
        """The rewards, in TRL's signature."""
        return []

    def grader(self) -> Callable[..., Any]:
        """Validation's grader: responses and reference answers to grades."""
        return self.build(GRADERS, self.validation_grader)

    def data(self, seed: int) -> Data:
        """Rows with `prompt` and `answer`, to train on and to validate on."""
        train, validation = self.read(self.train_split, self.train_problems, seed), self.held_out(seed)
        return Data(train.rows, validation.rows, {"train": train.source, "validation": validation.source})

    @property
    def benchmarks(self) -> list[MeasuredBenchmark]:
        """The benchmarks that are measured on the way."""
        return parse_benchmarks(self.validation_benchmarks)

    def benchmark_problems(self) -> dict[str, Problems]:
        """The problems of the benchmarks that are measured on the way, by name."""
        return {one.name: self.read_benchmark(one.name, one.problems) for one in self.benchmarks}

    def held_out(self, seed: int) -> Problems:
        """The problems of all validations together; the first `validation_problems` are those on the way."""
        counts = (self.validation_problems, self.final_validation_problems)
        n = self.validation_problems if None in counts else max(count for count in counts if count)
        return self.read(self.validation_split, n, seed, in_sample_order=counts != (None, None))

    @property
    def trains_on(self) -> tuple[str, str]:
        """The dataset and the split that are trained on."""
        return self.dataset, self.train_split

    def _refuse_to_validate_on_what_is_trained_on(self) -> None:
        dataset, split = self.trains_on
        if dataset != self.dataset:
            return
        if Path(dataset).suffix in READERS and "{split}" not in dataset:
            name = Path(dataset)
            raise ValueError(
                f"dataset {dataset!r} is one file, which training and validation would both read: put {{split}} in "
                f"its path, such as {name.stem}_{{split}}{name.suffix} for {name.stem}_{split}{name.suffix} and "
                f"{name.stem}_{self.validation_split}{name.suffix}"
            )
        if split == self.validation_split:
            raise ValueError(
                f"training and validation are both on the split {split!r} of {dataset!r}: choose another "
                "--validation_split"
            )

    @property
    def graders(self) -> dict[str, str]:
        """What grades the rows that are sampled for, by what they are for."""
        return {"validation": self.validation_grader}
