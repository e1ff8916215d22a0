r"""Any math dataset -> rows `prompt`, `answer`, `level`, `subject`, `problem`, `row`, checked before a model loads."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.data.countdown import countdown
from trl_ext.data.files import READERS, control_character, read_file
from trl_ext.data.formats import Columns, Row, columns_of, value_at
from trl_ext.data.sample import Table, stratified_sample
from trl_ext.data.source import Source
from trl_ext.generation.conversation import Conversation, conversation, is_conversation
from trl_ext.generation.prompts import Asking
from trl_ext.mini.task import first_rows
from trl_ext.mini.tasks import TASKS
from trl_ext.registry import Registry
from trl_ext.rewards.extract import boxed
from trl_ext.rewards.ground_truth import accepted_answers

if TYPE_CHECKING:
    from datasets import Dataset

ANSWER_SOURCES = Registry("answer source")
GENERATORS = (*TASKS, "countdown")
GENERATED_PROBLEMS = 4096  # to train on, where a generated dataset is used and no number is given
_SHOWN = 60  # characters of a problem in a message
_LEVEL = re.compile(r"\d{1,9}")
_FINAL = re.compile(r"final answer is:?\s*(.+?)\.?(?:\s*I hope it is correct\.?)?\s*$", re.IGNORECASE | re.MULTILINE)
_WHOLE = re.compile(r"(-?\d{1,18})(?:\.0*)?(?:\^\{?\\circ\}?)?")
_BOX = re.compile(r"\\(?:boxed|fbox)(?=[ {])")


@ANSWER_SOURCES.register
def as_is(text: str) -> str | None:
    """The column holds the answer."""
    return text.strip() or None


@ANSWER_SOURCES.register
def whole_number(text: str) -> str | None:
    r"""The column holds a whole number in any form, as copies of AIME and AMC have it: `025`, `27.0`, `336^\circ`."""
    number = _WHOLE.fullmatch(text.strip().strip("$").strip())
    return str(int(number[1])) if number else None


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


@ANSWER_SOURCES.register
def final_answer(text: str) -> str | None:
    r"""The column holds a text with a last `\boxed{answer}` or "the final answer is ...", as in Tulu 3."""
    said = _FINAL.findall(text)
    return last_boxed(text) or (said[-1].strip().strip("$").strip() or None if said else None)


@dataclass(frozen=True)
class Problems:
    """Rows to train or validate on, and what they are."""

    rows: Dataset
    source: Source


def problems_of(
    table: Table,
    numbers: Sequence[int],
    source: Source,
    columns_asked: Mapping[str, str],
    asking: Asking,
    known: Columns | None = None,
) -> Problems:
    """The chosen rows of a table, with prompts and answers, each with its number in the split as `row`.

    Args:
        columns_asked: fields of `Columns` that the settings give.
        known: how the table is laid out, where its columns do not have to say so.

    Raises:
        ValueError: a column is missing, or a row has no answer or no problem; the message has the file's line, or the
            row's number from 0, and the field.
    """
    columns = known or columns_of(table[0] if len(table) else {}, columns_asked)
    refuse_missing_columns(source.dataset, table, columns.needed or (columns.problem, columns.answer))
    rows = _rows(table, numbers, columns, asking, source)
    if rows and source.available is not None:
        source.columns, source.first = (
            str(columns),
            f"{_begin(rows[0]['problem'])!r} -> {_begin(repr(rows[0]['answer']))}",
        )
    if any(isinstance(row["answer"], list) for row in rows):  # a column has one type
        rows = [row if isinstance(row["answer"], list) else {**row, "answer": [row["answer"]]} for row in rows]
    from datasets import Dataset

    return Problems(Dataset.from_list(rows), source)


def _rows(
    table: Table, numbers: Sequence[int], columns: Columns, asking: Asking, source: Source
) -> list[dict[str, Any]]:
    """The rows with prompts and answers; notes in `source` which have several boxes to take the answer from."""
    extract, rows = ANSWER_SOURCES.build(columns.answer_source), []
    for number, stored in zip(numbers, table, strict=True):
        place = f"{source.file()!r}, {source.place(number)}"
        made = _made(stored, columns.read, place) if columns.read else {}
        row = {**stored, **made}
        own = {"row": number} | {name: made[name] for name in ("tolerance",) if name in made}
        rows.append(_row(row, place, asking, columns, extract) | own)
        if columns.answer_source == "last_boxed" and len(_BOX.findall(str(value_at(row, columns.answer)))) > 1:
            source.several_boxes.append(source.place(number))
    return rows


def _made(stored: Row, read: Callable[[Row], dict[str, Any]], place: str) -> dict[str, Any]:
    """The columns that a recognized format makes of others."""
    try:
        return read(stored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place}: not a row of this format ({type(error).__name__}: {error})") from error


def check_options(dataset: str, options: Mapping[str, Any] | None) -> None:
    """Refuse options that a dataset does not have, or values that they cannot have."""
    if dataset in TASKS:
        TASKS.build(dataset, **(options or {}))()
    elif options:
        raise ValueError(f"dataset_options is for {', '.join(TASKS)}, and the dataset is {dataset!r}: leave it out")


def generated_table(
    dataset: str, split: str, n: int | None, seed: int, options: Mapping[str, Any] | None
) -> tuple[Table, Sequence[int], Source]:
    """The first rows of a generator."""
    check_options(dataset, options)
    if n is None:
        raise ValueError(f"{dataset} is endless: say how many rows")
    source = Source(dataset, split, None, n, "generated")
    if dataset == "countdown":
        return countdown(split, n, seed), range(n), source
    return first_rows(TASKS.build(dataset, **(options or {}))().problems(split, seed), split, n), range(n), source


def chosen_rows(
    table: Table, dataset: str, split: str, n: int | None, sample_seed: int, in_sample_order: bool
) -> tuple[Table, Sequence[int], Source]:
    """The rows that are asked for, as the dataset has them, and their numbers in it."""
    if n is None and not in_sample_order:
        return table, range(len(table)), Source(dataset, split, len(table), len(table), "stored")
    numbers, named = stratified_sample(table, n, sample_seed)
    source = Source(dataset, split, len(table), len(numbers), "sampled", named, sample_seed)
    return [table[i] for i in numbers] if isinstance(table, list) else table.select(numbers), numbers, source


def read_table(dataset: str, split: str, config: str | None, revision: str | None = None) -> Table:
    """The rows: a list of a file, else a `datasets.Dataset`; a ValueError if there is no such file or split."""
    from datasets import concatenate_datasets, load_dataset

    path = Path(dataset.replace("{split}", split))
    if path.suffix not in READERS:
        parts = [part.strip() or None for part in (config or "").split(",")]
        try:
            return concatenate_datasets([load_dataset(dataset, part, split=split, revision=revision) for part in parts])
        except ValueError as error:
            if "Unknown split" not in str(error):
                raise
            raise ValueError(f"{dataset!r}: {' '.join(str(error).split())}") from error
        except ConnectionError as error:
            raise ValueError(f"{error}; a local copy works as well: --dataset 'FOLDER/{{split}}.jsonl'") from error
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} (working directory: {Path.cwd().name!r}){_splits_there(dataset)}")
    return read_file(path)


def refuse_missing_columns(dataset: str, table: Table, needed: Sequence[str]) -> None:
    """Raise a ValueError, with the columns that there are, if a table's first row lacks a needed one."""
    columns = table[0].keys() if len(table) else ()
    for column in needed:
        if column.partition(".")[0] not in columns and column not in columns:
            raise ValueError(f"{dataset!r} has no column {column!r}. It has: {', '.join(columns) or 'no rows'}")


def _splits_there(dataset: str) -> str:
    """The splits for which there are files, for a message."""
    before, _, after = Path(dataset).name.partition("{split}")
    if not after:
        return ""
    names = [p.name for p in sorted(Path(dataset).parent.glob(f"{glob.escape(before)}*{glob.escape(after)}"))]
    splits = [name[len(before) : len(name) - len(after)] for name in names]
    return f"; there are files for the splits: {', '.join(splits) or 'none'}"


def _row(
    row: dict[str, Any], place: str, asking: Asking, columns: Columns, extract: Callable[[str], str | None]
) -> dict[str, Any]:
    problem, answer = (
        _problem(row, columns.problem, f"{place}: {columns.problem!r}"),
        value_at(row, columns.answer),
    )
    try:
        reference = reference_answer(answer, extract)
    except (TypeError, ValueError) as error:
        detail = _found_by(answer) + (_not_there(row, columns.answer) or (f" ({error})" if str(error) else ""))
        raise ValueError(f"{place}: no answer in {columns.answer!r}: {str(answer)[:80]!r}{detail}") from error
    text = problem if isinstance(problem, str) else problem[-1]["content"]
    return {"prompt": asking.prompt(problem), "answer": reference, "problem": text, **strata_of(row)}


def _not_there(row: Row, column: str) -> str:
    """What tells a field that a row lacks from one that is null, for a message."""
    if column.partition(".")[0] in row or column in row:
        return ""
    return f" (the row has no such field; it has: {', '.join(row)})"


def _problem(row: Row, column: str, place: str) -> str | Conversation:
    """A problem as the dataset has it, a text or a conversation, or a ValueError."""
    value = value_at(row, column)
    if is_conversation(value):
        try:
            return conversation(value)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place} is {value!r}, not a text{_not_there(row, column)}")
    if "\0" in value:
        raise ValueError(f"{place} {control_character(value)}")
    return value


def strata_of(row: Row) -> dict[str, int | str]:
    """The row's level, 0 where it has none, and its subject."""
    level = _LEVEL.search(str(row.get("level", "")))
    return {"level": int(level[0]) if level else 0, "subject": str(row.get("subject") or row.get("type") or "")}


def _begin(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _found_by(answer: object) -> str:
    """The sources of answers that would find one in a solution, for a message."""
    if not isinstance(answer, str):
        return ""
    sources = [name for name in sorted(set(ANSWER_SOURCES) - {"as_is"}) if ANSWER_SOURCES[name](answer)]
    return f" (--answer_source {' or '.join(sources)} finds one)" if sources else ""


def reference_answer(answer: Any, extract: Callable[[str], str | None]) -> str | list[str]:
    """The answer as a text, or as a list where the column holds lists; a TypeError or ValueError without one."""
    if isinstance(answer, float) and not math.isfinite(answer):  # such as what a table has for a missing number
        raise ValueError
    if any(isinstance(item, bool) for item in (answer if isinstance(answer, (list, tuple)) else [answer])):
        raise ValueError("true and false are no texts: write the words that an answer should have, in quotes")
    answers = [extract(text) for text in accepted_answers(answer)]
    extracted = [text for text in answers if text is not None]
    if not extracted or len(extracted) < len(answers):
        raise ValueError
    if bad := next(filter(None, map(control_character, extracted)), None):
        raise ValueError(f"it {bad}")
    return extracted if isinstance(answer, (list, tuple)) else extracted[0]
