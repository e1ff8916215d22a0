"""What a run's validations are measured with; two accuracies can be compared only if it is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def validation_conditions(task: Any, config: Any, problems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values that validations on `problems` have in use, whether set or derived from other settings."""
    return {
        "validated_on": fingerprint(problems),
        "validation_grader": task.validation_grader,
        "validation_max_tokens": task.validation_max_tokens or config.max_completion_length,
        "validation_problems": len(problems),
        "validation_temperature": validation_temperature(task, config),
    }


def validation_temperature(task: Any, config: Any) -> float:
    """The sampling temperature of validations: that of training unless it is set."""
    return float(config.temperature if task.validation_temperature is None else task.validation_temperature)


def fingerprint(problems: Iterable[Mapping[str, Any]]) -> str:
    """A hash of prompts and answers (or responses), in order."""
    digest = hashlib.sha256()
    for row in problems:
        digest.update(json.dumps([row["prompt"], row.get("response", row.get("answer"))], default=str).encode())
    return digest.hexdigest()[:16]
