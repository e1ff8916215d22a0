"""What a run's validations are measured with: two accuracies can be compared only where it is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Settings that are noted as they are used, so one that follows another setting is the same where the value is.
RESOLVED = (
    "validated_on", "validation_grader", "validation_max_tokens", "validation_problems", "validation_temperature",
)  # fmt: skip
YARDSTICK = {
    *RESOLVED, "answer_format", "generation_kwargs", "min_p", "prompt", "repetition_penalty", "sampling_min_tokens",
    "stop", "top_k", "top_p", "validation_split",
}  # fmt: skip


def yardstick(task: Any, config: Any, problems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`RESOLVED` of a run.

    Args:
        task: a `Task`.
        config: of its trainer.
        problems: of the validations on the way.
    """
    return {
        "validated_on": fingerprint(problems),
        "validation_grader": task.validation_grader,
        "validation_max_tokens": task.validation_max_tokens or config.max_completion_length,
        "validation_problems": len(problems),
        "validation_temperature": validation_temperature(task, config),
    }


def validation_temperature(task: Any, config: Any) -> float:
    """Of validations: that of training unless it is set."""
    found = config.temperature if task.validation_temperature is None else task.validation_temperature
    return float(found)


def fingerprint(problems: Iterable[Mapping[str, Any]]) -> str:
    """A hash of prompts and answers (or responses), in order: whether two runs train on the same."""
    digest = hashlib.sha256()
    for row in problems:
        digest.update(json.dumps([row["prompt"], row.get("response", row.get("answer"))], default=str).encode())
    return digest.hexdigest()[:16]
