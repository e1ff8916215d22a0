"""inspect's `match`, with which its GSM8K is scored."""

from __future__ import annotations

import asyncio

from inspect_ai.model import ModelName, ModelOutput
from inspect_ai.scorer import CORRECT, Target, match
from inspect_ai.solver import TaskState

_SCORER = match(numeric=True)


def numeric(response: str, reference: str) -> tuple[bool, str]:
    """The number at the end."""
    output = ModelOutput.from_content("none", response)
    state = TaskState(ModelName("none/none"), 0, 1, "", [], Target(reference), output=output)
    score = asyncio.run(_SCORER(state, Target(reference)))
    return score.value == CORRECT, str(score.answer)
