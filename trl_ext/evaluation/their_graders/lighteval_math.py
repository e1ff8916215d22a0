"""lighteval's `gsm8k` and `math_500`: the metrics that their tables of tasks name."""

from __future__ import annotations

from typing import Any

from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc
from lighteval.tasks.tasks import gsm8k as gsm8k_task
from lighteval.tasks.tasks import math_500 as math_500_task


def gsm8k(response: str, reference: str) -> tuple[bool, str]:
    """The reference as GSM8K has it."""
    return _grade(gsm8k_task.TASKS_TABLE[0].metrics[0], response, f" #### {reference}")


def math_500(response: str, reference: str) -> tuple[bool, str]:
    """The reference as a boxed answer."""
    return _grade(math_500_task.TASKS_TABLE[0].metrics[0], response, rf"\boxed{{{reference}}}")


def _grade(metric: Any, response: str, gold: str) -> tuple[bool, str]:
    doc = Doc(query="", choices=[gold], gold_index=0)
    scores = metric.compute_sample(doc=doc, model_response=ModelResponse(text=[response]))
    return bool(max(scores.values())), str((doc.specific or {}).get("extracted_predictions", ""))
