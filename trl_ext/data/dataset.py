"""Which problems, in which words, and where the answers are: what training and evaluation have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trl_ext.data.load import ANSWER_SOURCES, GENERATORS, load_problems
from trl_ext.prompts import load_prompt, prompt_names
from trl_ext.registry import Registry
from trl_ext.rewards.extract import ANSWER_FORMATS


@dataclass
class DatasetSettings:
    """A dataset's place, columns and prompt, checked when it is made.

    Raises:
        UnknownName: a name that is not in its table.
        ValueError: a prompt template without `{question}`.
    """

    dataset: str = field(
        default="mini_math",
        metadata={
            "help": f"{', '.join(GENERATORS)}, a Hub id, or a .jsonl/.json/.csv/.parquet file, {{split}} in its path."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    problem_column: str = field(default="problem", metadata={"help": "Column with the problem."})
    answer_column: str = field(default="answer", metadata={"help": "Column with the answer or the solution."})
    answer_source: str = field(
        default="as_is",
        metadata={"help": f"Where in that column the answer is: {', '.join(sorted(ANSWER_SOURCES))}."},
    )
    prompt: str = field(
        default="r1_zero",
        metadata={"help": f"Template: {', '.join(prompt_names())}, or a file with {{question}}."},
    )
    answer_format: str | None = field(
        default=None,
        metadata={
            "help": f"Where a response has its answer: {', '.join(sorted(ANSWER_FORMATS))} "
            "(default: boxed for the question_only prompt, else r1_zero)."
        },
    )

    def __post_init__(self) -> None:
        load_prompt(self.prompt)
        ANSWER_SOURCES.build(self.answer_source)
        if self.answer_format is None:
            self.answer_format = "boxed" if self.prompt == "question_only" else "r1_zero"
        ANSWER_FORMATS.get_function(self.answer_format)

    def load(self, split: str, n: int | None, seed: int) -> Any:
        """The rows of a split, see `load_problems`."""
        return load_problems(
            self.dataset,
            split,
            self.prompt,
            n=n,
            seed=seed,
            problem_column=self.problem_column,
            answer_column=self.answer_column,
            answer_source=self.answer_source,
            dataset_config=self.dataset_config,
        )

    def build(self, table: Registry, name: str) -> Callable[..., Any]:
        """A reward or a grader for this answer format; a function of the user's own may do without one."""
        takes_format = "answer_format" in table.options(name)
        return table.build(name, **({"answer_format": self.answer_format} if takes_format else {}))
