"""Rules that a leaderboard's runs keep to, and what in a recipe's resolved settings breaks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.validation_conditions import validation_temperature

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trl_ext.recipes.settings import TaskSettings


@dataclass(frozen=True)
class Rules:
    """What a result has to be measured on, with what, and in which time."""

    model: str | None  # what the first stage starts from; None for the base policy that is built locally
    settings: Mapping[str, Any]  # of every stage, by name; those of sampling are the validation's
    problems: int  # of the final validation
    seconds: float  # at most, from the start of the process, over restarts
    processes: int  # of a stage at most; one for each GPU
    # Other datasets that count as the one in `settings`, each with its validation split: a name of
    # `trl_ext.data.formats.PUBLISHED`, or the end of a path.
    copies: Mapping[str, str] = field(default_factory=dict)

    def has_model(self, given: str | None) -> bool:
        """Whether that is the model, on the Hub or in a folder that is called like it."""
        return given == self.model or bool(given and self.model and Path(given).name == Path(self.model).name)

    def wanted(self, dataset: str) -> Mapping[str, Any]:
        """The settings that a stage must have which reads that copy of the dataset."""
        for end, split in self.copies.items():
            if Path(dataset).parts[-len(Path(end).parts) :] == Path(end).parts:
                return {**self.settings, "dataset": dataset, "validation_split": split}
        return self.settings


_SAMPLING = {
    "prompt": "r1_zero", "answer_format": "r1_zero", "temperature": 1.0, "validation_grader": "compatible",
    "train_split": "train", "too_long": "refuse", "validation_samples": 1,
}  # fmt: skip
_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {}}  # nothing cut off
RULES = {
    # the course's leaderboard
    "math_4h": Rules(
        model="Qwen/Qwen2.5-Math-1.5B",
        settings=_SAMPLING
        | {"dataset": "DigitalLearningGmbH/MATH-lighteval", "validation_split": "test", "max_tokens": 1024},
        problems=5000,
        seconds=4 * 3600,
        processes=2,
        copies={"math": "test", "MATH/{split}.jsonl": "validation"},  # the latter is how the course hands it out
    ),
    # the same on a laptop
    "mini": Rules(
        model=None,
        settings=_SAMPLING | {"dataset": "mini_math", "validation_split": "validation", "max_tokens": 80},
        problems=5000,
        seconds=300,
        processes=2,
    ),
    # seconds to an accuracy on a task with headroom: trl_ext/tools/experiments/speedrun.py
    "speedrun": Rules(
        model=None,
        settings=_SAMPLING
        | {
            "dataset": "arithmetic",
            "dataset_options": {"incorrect": "longer", "longest": 12},
            "base_policy_seed": 0,  # those of other seeds start from 0.08 to 0.29
            "validation_split": "validation",
            "max_tokens": 80,
        },
        problems=2560,
        seconds=1800,
        processes=1,
    ),
}


def violations(rules: Rules, task: TaskSettings, config: TrainingArguments, is_last: bool) -> list[str]:
    """A line for each rule that the settings of a stage break; the last stage's final validation is the result."""
    values = {name: getattr(task, name, getattr(config, name, None)) for name in rules.settings}
    values["temperature"] = validation_temperature(task, config)
    values["max_tokens"] = task.validation_max_tokens or config.max_completion_length
    lines = [
        f"{name} must be {wanted!r}, is {values[name]!r}"
        for name, wanted in rules.wanted(task.dataset).items()
        if values[name] != wanted
    ]
    problems = task.final_validation_problems or task.validation_problems
    if is_last and problems != rules.problems:
        lines.append(f"final_validation_problems must be {rules.problems}, is {problems}")
    if is_last and not task.restore_best:
        lines.append("restore_best must be true, or a run that has collapsed would end with what is left of it")
    sampling = {name: getattr(config, name, None) for name in _PLAIN}
    lines += [f"{name} must be {_PLAIN[name]}, is {v}" for name, v in sampling.items() if v not in (None, _PLAIN[name])]
    traces = (getattr(task, "traces", None), getattr(task, "traces_split", None))
    if traces not in ((None, None), (task.dataset, task.train_split)):
        lines.append(f"traces must be those of {task.dataset!r}, split {task.train_split!r}, are {traces}")
    return lines
