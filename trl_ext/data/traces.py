r"""Reasoning traces to fine-tune on -> rows `prompt`, `response` and, where it is known, `answer`.

mini-MATH's own are its worked solutions in the r1_zero format. A fraction of them has an incorrect result, like
traces that a model wrote, so that `filter_correct` has something to remove.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from trl_ext.data.load import ANSWER_SOURCES, GENERATED_PROBLEMS, read_table, refuse_missing_columns
from trl_ext.data.published import PUBLISHED, read_published
from trl_ext.data.sample import stratified_sample
from trl_ext.data.solutions import solution_columns, trace_of_messages, trace_of_solution
from trl_ext.generation.conversation import conversation, is_conversation
from trl_ext.generation.prompts import Asking, format_prompt, load_prompt
from trl_ext.mini.problems import mini_math
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
    asking: Asking | None = None,
    answer_format: str = "r1_zero",
) -> list[dict[str, Any]]:
    """Traces of a file, of the Hub, or of mini-MATH; each only once.

    Without the columns of a prompt and a response, a table may have conversations (`messages`, whose last is the
    response) or problems with solutions (GSM8K's `question` and `answer`, MATH's `problem` and `solution`).

    Args:
        dataset: `mini_math`, a Hub id, or a .jsonl/.json/.csv/.parquet file, with `{split}` in its path for the split.
        answer_column: of the reference answers; rows of a dataset without it have no `answer`.
        n: a sample of n rows, of mini-MATH its first n; None for all, of mini-MATH 4,096.
        seed: of mini-MATH.
        sample_seed: of the sample.
        asking: how the problems of solutions and the prompts of conversations are put; by default as r1_zero.
        answer_format: that solutions are stated in.

    Raises:
        ValueError: a column is missing, or a prompt or a response is no text; with the row's number from 0.
    """
    if dataset == "mini_math":
        return unique(mini_math_traces(n or GENERATED_PROBLEMS, seed))
    if dataset in PUBLISHED:
        table = read_published(dataset, split, dataset_config).table
    else:
        table = read_table(dataset, split, dataset_config)
    columns = {"prompt": prompt_column, "response": response_column, "answer": answer_column}
    read = _reader(table[0] if len(table) else {}, columns, asking or Asking.named("r1_zero"), answer_format)
    if read is None:
        refuse_missing_columns(dataset, table, (prompt_column, response_column))
    numbers = range(len(table)) if n is None else stratified_sample(table, n, sample_seed)[0]
    return unique(_trace(table[number], f"{dataset!r}, row {number}", read) for number in numbers)


def _reader(
    first: Mapping[str, Any], columns: Mapping[str, str], asking: Asking, answer_format: str
) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
    """What makes a trace of a row of such a table; None if it has nothing to make one of."""
    if {columns["prompt"], columns["response"]} <= first.keys():
        return functools.partial(_written_out, columns=columns, asking=asking)
    if is_conversation(first.get("messages")):
        return lambda row: trace_of_messages(row["messages"], asking)
    if own_columns := solution_columns(first):
        extract = ANSWER_SOURCES.build(own_columns.answer_source)
        return lambda row: trace_of_solution(row, own_columns, asking, answer_format, extract)
    return None


def _trace(
    row: Mapping[str, Any], place: str, read: Callable[[Mapping[str, Any]], dict[str, Any]] | None
) -> dict[str, Any]:
    assert read is not None
    try:
        return read(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _written_out(row: Mapping[str, Any], columns: Mapping[str, str], asking: Asking) -> dict[str, Any]:
    """A trace whose prompt and response are columns: texts as the model reads them, or messages."""
    values = {name: row[column] for name, column in columns.items() if row.get(column) is not None}
    if is_conversation(values.get("prompt")):
        values["prompt"] = asking.prompt(conversation(values["prompt"]))
    if is_conversation(values.get("response")):
        values["response"] = "\n".join(said["content"] for said in conversation(values["response"], "assistant"))
    for name, kinds in (("prompt", (str, list)), ("response", (str,))):
        text = values.get(name)
        if not isinstance(text, kinds) or not (text.strip() if isinstance(text, str) else text):
            raise ValueError(f"{columns[name]!r} is {row.get(columns[name])!r}, not a text")
    return values


def unique(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those whose prompt and response are an earlier one's; the others in their order."""
    first_rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        first_rows.setdefault((prompt_key(row["prompt"]), row["response"]), row)
    return list(first_rows.values())


def prompt_key(prompt: Any) -> str:
    """A text that two prompts share only if they are the same."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def with_answers(rows: Sequence[dict[str, Any]], answers: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Rows with an `answer` each, taken from the problem with the same prompt where they have none.

    Args:
        answers: the reference answer by the `prompt_key` of its problem's prompt.
        where: what they are from, for the ValueError if a row's prompt is not among them.
    """
    lacking = [row for row in rows if "answer" not in row and prompt_key(row["prompt"]) not in answers]
    if lacking:
        begins = prompt_key(lacking[0]["prompt"])[-80:]
        raise ValueError(
            f"{len(lacking)} of {len(rows)} traces have no answer to be graded by: no column with it (--trace_answer) "
            f"and no problem with the same prompt in {where}. The first begins {begins!r}"
        )
    return [row if "answer" in row else {**row, "answer": answers[prompt_key(row["prompt"])]} for row in rows]


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
