"""The course handout's evaluation of a model in a vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.evaluation.evaluator import Report, evaluate
from trl_ext.generation.samplers import vllm_sample
from trl_ext.io import write_jsonl
from trl_ext.rewards.graders import Grade

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def evaluate_vllm(
    vllm_model: LLM,
    reward_fn: Callable[[str, Any], dict[str, float]],
    prompts: Sequence[str],
    eval_sampling_params: SamplingParams,
    ground_truths: Sequence[Any],
    output_path: Path | None = None,
) -> Report:
    """Sample one response per prompt, grade it, and write the rows as JSONL if a path is given.

    Args:
        reward_fn: (response, ground truth) -> dict with `format_reward` and `answer_reward`: `r1_zero_reward_fn`.
        eval_sampling_params: the handout keeps the stop string, `include_stop_str_in_output=True`.
        ground_truths: one per prompt.
    """
    problems = [{"prompt": p, "answer": truth} for p, truth in zip(prompts, ground_truths, strict=True)]

    def grade(responses: Sequence[str], truths: Sequence[Any]) -> list[Grade]:
        rewards = [reward_fn(response, truth) for response, truth in zip(responses, truths, strict=True)]
        return [Grade(r["format_reward"] > 0, None, r["answer_reward"] > 0, "reward_fn's verdict") for r in rewards]

    report = evaluate(problems, lambda texts: vllm_sample(vllm_model, texts, eval_sampling_params), grade)
    if output_path is not None:
        write_jsonl(output_path, report.rows)
    return report
