"""Rules that a leaderboard's runs keep to, and what in a recipe's resolved settings breaks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rules:
    """What a result has to be measured on, with what, and in which time.

    Attributes:
        model: what the first stage starts from; None for the base policy that the machine makes.
        settings: of every stage, by name; those of sampling are the validation's.
        problems: of the final validation.
        seconds: at most, from the start of the process, over restarts.
        processes: of a stage at most; one for each GPU.
    """

    model: str | None
    settings: Mapping[str, Any]
    problems: int
    seconds: float
    processes: int


_SAMPLING = {"prompt": "r1_zero", "temperature": 1.0, "validation_grader": "compatible", "train_split": "train"}
RULES = {
    # the course's leaderboard
    "math_4h": Rules(
        model="Qwen/Qwen2.5-Math-1.5B",
        settings=_SAMPLING
        | {"dataset": "DigitalLearningGmbH/MATH-lighteval", "validation_split": "test", "max_tokens": 1024},
        problems=5000,
        seconds=4 * 3600,
        processes=2,
    ),
    # the same on a laptop
    "mini": Rules(
        model=None,
        settings=_SAMPLING | {"dataset": "mini_math", "validation_split": "validation", "max_tokens": 80},
        problems=5000,
        seconds=300,
        processes=2,
    ),
}


def violations(rules: Rules, task: Any, config: Any, is_last: bool) -> list[str]:
    """A line for each rule that a stage's settings break.

    Args:
        task: a `Task`.
        config: of its trainer.
        is_last: the stage whose final validation is the result.
    """
    found = {name: getattr(task, name, getattr(config, name, None)) for name in rules.settings}
    found["temperature"] = config.temperature if task.validation_temperature is None else task.validation_temperature
    found["max_tokens"] = task.validation_max_tokens or config.max_completion_length
    lines = [
        f"{name} must be {wanted!r}, is {found[name]!r}"
        for name, wanted in rules.settings.items()
        if found[name] != wanted
    ]
    problems = task.final_validation_problems or task.validation_problems
    if is_last and problems != rules.problems:
        lines.append(f"final_validation_problems must be {rules.problems}, is {problems}")
    if is_last and not task.restore_best:
        lines.append("restore_best must be true, or a run that has collapsed would end with what is left of it")
    if getattr(config, "top_p", 1.0) not in (None, 1.0):
        lines.append(f"top_p must be 1.0, is {config.top_p}")
    return lines
