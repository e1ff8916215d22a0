"""Responses that someone else drew: a JSONL file of any field names -> rows to grade, checked before any is graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_ext.data.load import ANSWER_SOURCES, reference_answer, strata_of
from trl_ext.generation.completion import Completion
from trl_ext.io import read_jsonl
from trl_ext.registry import unknown

NEEDED = ("prompt", "response", "truth")
_KNOWN: dict[str, tuple[Callable[[Any], bool], str]] = {  # what else is used: its check, and its words for a message
    "tokens": (lambda value: type(value) is int and value >= 0, "a whole number"),
    "finish_reason": (lambda value: value in ("stop", "length"), "stop or length"),
    "verdict": (lambda value: value in (0, 1), "true, false, 1 or 0"),
}
OPTIONAL = ("problem", "level", "subject", *_KNOWN)


def fields_of(given: Sequence[str]) -> dict[str, str]:
    """`name=path` pairs to the path of every field, by default its own name.

    Raises:
        ValueError: a pair has no `=`, or a name is not one of ours.
    """
    paths = {name: name for name in (*NEEDED, *OPTIONAL)}
    for pair in map(str, given):
        name, equals, path = pair.partition("=")
        if not equals or not path:
            raise ValueError(f"response_fields: {pair!r} is not of the form name=field, such as response=output")
        if name not in paths:
            raise unknown("response field", name, paths)
        paths[name] = path
    return paths


def read_responses(path: Path, given: Sequence[str], answer_source: str) -> list[dict[str, Any]]:
    """One row per line: `prompt`, `response`, `answer`, `problem`, what is there of the rest, and its numbers.

    Lines with the same prompt are samples of one problem; `problem_id` and `sample` count both in the file's order.

    Args:
        given: `name=path` pairs of fields that have other names; a path goes into objects and lists by dots.
        answer_source: how the answer is found in the field `truth`.

    Raises:
        ValueError: the file is missing or empty, or a line lacks a field; the message has line and field.
    """
    paths = fields_of(given)
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} (working directory: {Path.cwd().name!r})")
    stored = read_jsonl(path, any_text=True)
    if not stored:
        raise ValueError(f"{str(path)!r} has no rows")
    asked = {*NEEDED, *(pair.partition("=")[0] for pair in given)}
    rows = [_row(line, f"{str(path)!r}, line {n}", paths, asked, answer_source) for n, line in enumerate(stored, 1)]
    problems: dict[str, int] = {}
    drawn: dict[int, int] = {}
    for number, row in enumerate(rows):
        problem = problems.setdefault(row["prompt"], len(problems))
        row |= {"number": number, "problem_id": problem, "sample": drawn.get(problem, 0)}
        drawn[problem] = row["sample"] + 1
    return rows


def completion_of(row: Mapping[str, Any]) -> Completion:
    """What is known of a row's response."""
    return Completion(row["response"], row["tokens"] or 0, row["finish_reason"] != "length")


def _row(
    line: Mapping[str, Any], place: str, paths: Mapping[str, str], asked: set[str], answer_source: str
) -> dict[str, Any]:
    values = {name: _printable(_at(line, path, place, name, name in asked)) for name, path in paths.items()}
    for name in ("prompt", "response"):
        if not isinstance(values[name], str):
            raise ValueError(f"{place}: {_named(name, paths[name])} is {str(values[name])[:80]!r}, not a text")
    row = {
        "prompt": values["prompt"],
        "response": values["response"],
        "answer": _answer(values["truth"], answer_source, f"{place}: {_named('truth', paths['truth'])}"),
        "problem": values["problem"] if isinstance(values["problem"], str) else values["prompt"],
        **strata_of(values),
        **{name: _known(values[name], name, f"{place}: {_named(name, paths[name])}") for name in _KNOWN},
    }
    if "verdict" in asked and row["verdict"] is None:
        raise ValueError(f"{place}: {_named('verdict', paths['verdict'])} is null, and not true, false, 1 or 0")
    return row


def _answer(truth: Any, answer_source: str, place: str) -> str | list[str]:
    try:
        return reference_answer(truth, ANSWER_SOURCES.build(answer_source))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} is {str(truth)[:80]!r}, in which answer_source {answer_source} finds no answer"
            + (f" ({error})" if str(error) else "")
        ) from error


def _known(value: Any, name: str, place: str) -> Any:
    """An optional value of the right kind; None stays None."""
    if value is None or _KNOWN[name][0](value):
        return bool(value) if name == "verdict" and value is not None else value
    raise ValueError(f"{place} is {str(value)[:80]!r}, and not {_KNOWN[name][1]}")


def _printable(value: Any) -> Any:
    """Half of a surrogate pair, which JSON can write and UTF-8 cannot, becomes a replacement character."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _at(line: Mapping[str, Any], path: str, place: str, name: str, needed: bool) -> Any:
    """What stands at a path; None of a field that is not there and not needed."""
    if path in line:
        return line[path]
    value: Any = line
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif needed:
            there = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            hint = f"--response_fields {name}=FIELD names it"
            raise ValueError(f"{place}: no field {_named(name, path)}; there is: {there[:200]}. {hint}")
        else:
            return None
    return value


def _named(name: str, path: str) -> str:
    return f"{path!r} (the {name})" if path != name else repr(path)
