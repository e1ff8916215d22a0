r"""Any math dataset -> rows `prompt`, `answer`, `level`, `subject`, `problem`, checked before a model loads."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.data.countdown import countdown
from trl_ext.data.mini_math import mini_math
from trl_ext.files import read_jsonl
from trl_ext.prompts import format_prompt, load_prompt
from trl_ext.registry import Registry
from trl_ext.rewards.extract import boxed
from trl_ext.rewards.truth import truths_of

if TYPE_CHECKING:
    from datasets import Dataset

ANSWER_SOURCES = Registry("answer source")
GENERATORS = {"mini_math": mini_math, "countdown": countdown}
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_LEVEL = re.compile(r"\d+")


@ANSWER_SOURCES.register
def as_is(text: str) -> str | None:
    """The column holds the answer."""
    return text.strip() or None


@ANSWER_SOURCES.register
def last_boxed(text: str) -> str | None:
    r"""The column holds a solution with a last `\boxed{answer}`, as in MATH; `\fbox{4}` and `\boxed 4` count too."""
    in_braces = boxed(text.replace(r"\fbox{", r"\boxed{"))
    _, bare, rest = text.rpartition(r"\boxed ")
    return in_braces or (rest.partition("$")[0].strip() or None if bare else None)


@ANSWER_SOURCES.register
def after_hashes(text: str) -> str | None:
    """The column holds a solution that ends in `#### answer`, as in GSM8K; thousands separators are dropped."""
    _, hashes, answer = text.rpartition("####")
    return answer.strip().replace(",", "") or None if hashes else None


def load_problems(
    dataset: str,
    split: str,
    prompt: str,
    *,
    n: int | None = None,
    seed: int = 0,
    problem_column: str = "problem",
    answer_column: str = "answer",
    answer_source: str = "as_is",
    dataset_config: str | None = None,
) -> Dataset:
    """Rows to train or validate on.

    Args:
        dataset: `mini_math`, `countdown`, a Hub id, or a .jsonl/.json/.csv/.parquet file, with `{split}` in its path
            for the split.
        dataset_config: of a Hub dataset; several, such as MATH's subjects, with commas between them.
        split: `train` or `validation` of a generated dataset, else the split's name.
        prompt: a shipped prompt's name or a template file.
        n: the first n rows; None for all (a generated dataset is endless, so it needs n).
        seed: of a generator.

    Raises:
        UnknownName: `answer_source` is not in its table.
        ValueError: a column is missing, or a row has no answer; the message has the file's line, or the row's number
            from 0, and the field.
    """
    template = load_prompt(prompt)
    extract = ANSWER_SOURCES.build(answer_source)
    if dataset in GENERATORS:
        if n is None:
            raise ValueError(f"{dataset} is endless: say how many rows")
        table = GENERATORS[dataset](split, n, seed)
    else:
        table = read_table(dataset, split, dataset_config)
    columns = table[0].keys() if len(table) else ()
    for column in (problem_column, answer_column):
        if column not in columns:
            raise ValueError(f"{dataset!r} has no column {column!r}. It has: {', '.join(columns) or 'no rows'}")
    place = f"{dataset.replace('{split}', split)!r}, " + ("line {line}" if dataset.endswith(".jsonl") else "row {row}")
    rows = [
        _row(row, place.format(line=i + 1, row=i), template, problem_column, answer_column, extract)
        for i, row in enumerate(itertools.islice(table, n))
    ]
    if any(isinstance(row["answer"], list) for row in rows):  # a column has one type
        rows = [
            {**row, "answer": row["answer"] if isinstance(row["answer"], list) else [row["answer"]]} for row in rows
        ]
    from datasets import Dataset

    return Dataset.from_list(rows)


def check_lengths(
    prompts: Sequence[str], split: str, tokenizer: Any, completion: int, context: int, setting: str
) -> None:
    """Refuse a prompt that leaves no room in the context for the longest completion.

    Args:
        split: what the rows are called in the message.
        completion: tokens of the longest completion.
        context: tokens of prompt and completion together.
        setting: where the context's length comes from, for the message.

    Raises:
        ValueError: names the first such row, its length, and how many there are.
    """
    lengths = [len(ids) for ids in tokenizer(text=list(prompts))["input_ids"]] if prompts else []
    too_long = [row for row, length in enumerate(lengths) if length + completion > context]
    if too_long:
        row = too_long[0]
        raise ValueError(
            f"{split}, row {row}: its prompt of {lengths[row]} tokens and a completion of up to {completion} "
            f"(sampling_max_tokens) do not fit into {context} ({setting}); {len(too_long)} of {len(lengths)} rows are "
            f"too long, the longest by {max(lengths) + completion - context}. Raise the context, lower "
            "sampling_max_tokens, or leave these rows out of the dataset."
        )


def read_table(dataset: str, split: str, config: str | None) -> Sequence[dict[str, Any]]:
    """The rows, each a dict."""
    from datasets import concatenate_datasets, load_dataset

    path = Path(dataset.replace("{split}", split))
    if path.suffix not in READERS:
        parts = [load_dataset(dataset, part.strip() or None, split=split) for part in (config or "").split(",")]
        return concatenate_datasets(parts)
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} (working directory: {Path.cwd().name!r})")
    if path.suffix == ".jsonl":
        return read_jsonl(path)  # names the line where `datasets` would not, and takes a number here and a text there
    return load_dataset(READERS[path.suffix], data_files=str(path), split="train")


def _row(
    row: dict[str, Any],
    place: str,
    template: str,
    problem_column: str,
    answer_column: str,
    extract: Callable[[str], str | None],
) -> dict[str, Any]:
    problem, answer = row.get(problem_column), row.get(answer_column)
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"{place}: {problem_column!r} is {problem!r}, not a text")
    truth = _truth(answer, extract, f"{place}: no answer in {answer_column!r}: {str(answer)[:80]!r}")
    level = _LEVEL.search(str(row.get("level", "")))
    return {
        "prompt": format_prompt(template, problem),
        "answer": truth,
        "problem": problem,
        "level": int(level[0]) if level else 0,  # 0: the dataset has no levels
        "subject": str(row.get("subject") or row.get("type") or ""),
    }


def _truth(answer: Any, extract: Callable[[str], str | None], refusal: str) -> str | list[str]:
    """The answer as a text, or as a list of accepted texts where the column holds lists."""
    if isinstance(answer, float) and not math.isfinite(answer):  # such as what a table has for a missing number
        raise ValueError(refusal)
    try:
        truths = [extract(text) for text in truths_of(answer)]
    except TypeError as error:
        raise ValueError(f"{refusal} ({error})") from error
    found = [truth for truth in truths if truth is not None]
    if not found or len(found) < len(truths):
        raise ValueError(refusal)
    return found if isinstance(answer, (list, tuple)) else found[0]
