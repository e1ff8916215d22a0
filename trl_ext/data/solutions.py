r"""A dataset's solutions and conversations as traces: a prompt, and the response that a model is to give to it.

A solution is rewritten into the answer format: its reasoning, then its answer where the format wants it. GSM8K's
calculator annotations, `<<48/2=24>>`, are for a calculator that is not there, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trl_ext.data.formats import Columns, columns_of, value_at
from trl_ext.generation.conversation import conversation, is_conversation
from trl_ext.generation.prompts import Asking

SOLUTIONS = ("after_hashes", "last_boxed")  # sources of an answer that stands at the end of its solution
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def solution_columns(first: Mapping[str, Any]) -> Columns | None:
    """Where a table has problems and their solutions; None if it has none, or only answers."""
    columns = columns_of(first, {})
    is_there = value_at(first, columns.problem) is not None and value_at(first, columns.answer) is not None
    return columns if is_there and columns.read is None and columns.answer_source in SOLUTIONS else None


def trace_of_solution(
    row: Mapping[str, Any],
    columns: Columns,
    asking: Asking,
    answer_format: str,
    extract: Callable[[str], str | None],
) -> dict[str, Any]:
    """`prompt`, `response` and `answer` of a problem and its solution; a ValueError if there is no answer in it."""
    problem, solution = value_at(row, columns.problem), str(value_at(row, columns.answer))
    answer = extract(solution)
    if answer is None:
        raise ValueError(f"{columns.answer!r} has no answer ({columns.answer_source}): {solution[-80:]!r}")
    asked = conversation(problem) if is_conversation(problem) else str(problem)
    return {"prompt": asking.prompt(asked), "response": stated(solution, answer, answer_format), "answer": answer}


def trace_of_messages(messages: Any, asking: Asking) -> dict[str, Any]:
    """`prompt` and `response` of a conversation that the assistant ends; a ValueError for another."""
    *before, last = conversation(messages, ends_with="assistant")
    return {"prompt": asking.prompt(conversation(before)), "response": last["content"]}


def stated(solution: str, answer: str, answer_format: str) -> str:
    """A solution in an answer format: `r1_zero`, whose prompt ends with `<think>`, or `boxed`.

    Raises:
        ValueError: another format.
    """
    reasoning = _ANNOTATION.sub("", solution.rpartition("####")[0] or solution).strip()
    if answer_format == "r1_zero":
        return f" {reasoning} </think> <answer> {answer} </answer>"
    if answer_format == "boxed":
        return reasoning if "\\boxed{" in reasoning else f"{reasoning}\nThe answer is $\\boxed{{{answer}}}$."
    raise ValueError(f"solutions can be stated in r1_zero or boxed, not in {answer_format!r}: give traces as responses")
