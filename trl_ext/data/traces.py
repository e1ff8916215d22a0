r"""Reasoning traces to fine-tune on -> rows `prompt`, `response` and, where it is known, `answer`.

mini-MATH's own are its worked solutions in the r1_zero format. A fraction of them has an incorrect result, like
traces that a model wrote, so that `filter_correct` has something to remove.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

from trl_ext.data.load import GENERATED_PROBLEMS, read_table, refuse_missing_columns
from trl_ext.data.sample import stratified_sample
from trl_ext.mini.problems import mini_math
from trl_ext.prompts import format_prompt, load_prompt
from trl_ext.rewards.hooks import Grader

INCORRECT_FRACTION = 0.4
_NUMBER = re.compile(r"\d+")


def mini_math_traces(n: int, seed: int = 0, incorrect_fraction: float = INCORRECT_FRACTION) -> list[dict[str, Any]]:
    """`n` rows `prompt, response, answer` on mini-MATH's training split, `incorrect_fraction` of them incorrect.

    An incorrect trace goes astray at its end: one number of the answer is another one, there and in the working.
    """
    rng = Random(f"mini-MATH traces {seed}")
    template = load_prompt("r1_zero")
    rows = []
    for problem in mini_math("train", n, seed):
        solution, answer = problem["solution"], problem["answer"]
        if rng.random() < incorrect_fraction:
            incorrect = _with_incorrect_number(answer, rng)
            solution, answer = f"{solution.removesuffix(answer)}{incorrect}", incorrect
        response = f" {solution} </think> <answer> {answer} </answer>"
        prompt = format_prompt(template, problem["problem"])
        rows.append({"prompt": prompt, "response": response, "answer": problem["answer"]})
    return rows


def _with_incorrect_number(answer: str, rng: Random) -> str:
    """The answer with its last number changed by 1 to 9."""
    number = list(_NUMBER.finditer(answer))[-1]
    other = int(number[0]) + rng.choice([d for d in range(-9, 10) if d and int(number[0]) + d >= 2])
    return f"{answer[: number.start()]}{other}{answer[number.end() :]}"


def load_traces(
    dataset: str,
    split: str,
    *,
    prompt_column: str = "prompt",
    response_column: str = "response",
    answer_column: str = "answer",
    dataset_config: str | None = None,
    n: int | None = None,
    seed: int = 0,
    sample_seed: int = 0,
) -> list[dict[str, Any]]:
    """Traces of a file, of the Hub, or of mini-MATH; each only once.

    Args:
        dataset: `mini_math`, a Hub id, or a .jsonl/.json/.csv/.parquet file, with `{split}` in its path for the split.
        answer_column: of the reference answers; rows of a dataset without it have no `answer`.
        n: a sample of n rows, of mini-MATH its first n; None for all, of mini-MATH 4,096.
        seed: of mini-MATH.
        sample_seed: of the sample.

    Raises:
        ValueError: a column is missing, or a prompt or a response is no text; with the row's number from 0.
    """
    if dataset == "mini_math":
        return unique(mini_math_traces(n or GENERATED_PROBLEMS, seed))
    table = read_table(dataset, split, dataset_config)
    refuse_missing_columns(dataset, table, (prompt_column, response_column))
    numbers = range(len(table)) if n is None else stratified_sample(table, n, sample_seed)[0]
    columns = {"prompt": prompt_column, "response": response_column, "answer": answer_column}
    return unique(_trace(table[number], f"{dataset!r}, row {number}", columns) for number in numbers)


def _trace(row: Mapping[str, Any], place: str, columns: Mapping[str, str]) -> dict[str, Any]:
    for column in (columns["prompt"], columns["response"]):
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise ValueError(f"{place}: {column!r} is {row.get(column)!r}, not a text")
    return {name: row[column] for name, column in columns.items() if name != "answer" or row.get(column) is not None}


def unique(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those whose prompt and response are an earlier one's; the others in their order."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["prompt"], row["response"]), row)
    return list(found.values())


def with_answers(rows: Sequence[dict[str, Any]], answers: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Rows with an `answer` each, taken from the problem with the same prompt where they have none.

    Args:
        answers: the reference answer by prompt.
        where: what they are from, for the ValueError if a row's prompt is not among them.
    """
    lacking = [row for row in rows if "answer" not in row and row["prompt"] not in answers]
    if lacking:
        raise ValueError(
            f"{len(lacking)} of {len(rows)} traces have no answer to be graded by: no column with it (--trace_answer) "
            f"and no problem with the same prompt in {where}. The first begins {lacking[0]['prompt'][-80:]!r}"
        )
    return [row if "answer" in row else {**row, "answer": answers[row["prompt"]]} for row in rows]


def only_correct(rows: Sequence[dict[str, Any]], grader: Grader) -> list[dict[str, Any]]:
    """The rows whose response the grader accepts."""
    verdicts = grader([row["response"] for row in rows], [row["answer"] for row in rows])
    return [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct]


def first_unique(rows: Sequence[dict[str, Any]], count: str, seed: int) -> list[dict[str, Any]]:
    """`count` rows of a shuffled order, so that a smaller set is a part of a larger one; `full` for all.

    Raises:
        ValueError: there are fewer rows.
    """
    shuffled = list(rows)
    Random(seed).shuffle(shuffled)
    if count == "full":
        return shuffled
    if int(count) > len(rows):
        raise ValueError(f"num_unique_examples is {count} and there are {len(rows)} unique traces; or say full")
    return shuffled[: int(count)]
