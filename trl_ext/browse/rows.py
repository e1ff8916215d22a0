"""Rows of generations, samples and rollouts, read from a run's folder one by one and brought to one form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.evaluation.evaluator import OUTCOMES, SAMPLES
from trl_ext.io import read_json, read_jsonl, read_yaml
from trl_ext.runs.layout import GENERATIONS, RESOLVED

ROLLOUTS, KEPT = "expert_iteration/step_*/rollouts.jsonl", "kept.jsonl"
_SETTINGS: tuple[tuple[str, Callable[[Path], Any]], ...] = ((RESOLVED, read_json), ("settings.yaml", read_yaml))
_USED = set(
    "step prompt response ground_truth answer reward rewards format_reward answer_reward correct outcome reason "
    "extracted tokens finish_reason entropy_estimate token_entropy advantage per_token logp problem kept turns".split()
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A JSONL file of rollouts.

    Attributes:
        name: as the page shows it.
        step: of all rows, where the rows do not say it themselves.
        answer_format: a name in `ANSWER_FORMATS`, by which graders read the responses; None if no settings say so.
    """

    path: Path
    name: str
    step: int | None = None
    answer_format: str | None = None


def sources_in(place: Path) -> list[Source]:
    """What there is to show in a run's or an evaluation's folder, or the file itself.

    Raises:
        FileNotFoundError: no such place, or nothing to show in it; says what was looked for.
    """
    if place.is_file():
        return [_source(place, place.parent.resolve().name + "/" + place.name, place.parent)]
    sources = [_source(path, path.name, place) for name in (GENERATIONS, SAMPLES) if (path := place / name).is_file()]
    steps = sorted(place.glob(ROLLOUTS), key=_step_of)
    sources += [_source(path, "expert iteration", place, _step_of(path)) for path in steps]
    if sources:
        return sources
    what = "has nothing to show" if place.is_dir() else "does not exist"
    raise FileNotFoundError(
        f"{str(place)!r} {what}; give the folder of a run or an evaluation, with {GENERATIONS}, {SAMPLES} or "
        f"{ROLLOUTS}, or a .jsonl file of one of these kinds"
    )


def _step_of(path: Path) -> int:
    name = path.parent.name
    if not name.removeprefix("step_").isdecimal():
        raise ValueError(f"{str(path)!r}: the folder {name!r} names no step; rename it or give its file")
    return int(name.removeprefix("step_"))


def _source(path: Path, name: str, folder: Path, step: int | None = None) -> Source:
    for file, read in _SETTINGS:
        if (folder / file).is_file():
            return Source(path, name, step, (read(folder / file) or {}).get("answer_format"))
    return Source(path, name, step)


def read_rows(source: Source) -> Iterator[Row]:
    """The source's rows in the form of `plain_row`. A torn last line, as a running program leaves it, is skipped.

    Raises:
        ValueError: a line is no JSON object with a response; says which.
    """
    kept = _kept_of(source)
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{str(source.path)!r}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict) or "response" not in row:
                raise ValueError(f"{where}: not a rollout, which is a JSON object with the field 'response'")
            try:
                if kept is not None:
                    row["kept"] = _kept_key(row) in kept
                plain = plain_row(row, source)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from error
            yield plain


def _kept_of(source: Source) -> set[str] | None:
    """The question and response of what expert iteration has kept of these rollouts; None of other rows."""
    path = source.path.with_name(KEPT)
    if source.path.name != Path(ROLLOUTS).name or not path.is_file():
        return None
    try:
        rows = read_jsonl(path)
    except RecursionError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error
    for number, row in enumerate(rows, start=1):
        if "response" not in row:
            raise ValueError(f"{str(path)!r}, line {number}: not a rollout, which has the field 'response'")
    return {_kept_key(row) for row in rows}


def _kept_key(row: Row) -> str:
    """What tells a rollout from others: a question may be a number, a text or a conversation."""
    return json.dumps([row.get("question"), row["response"]])


def plain_row(row: Mapping[str, Any], source: Source) -> Row:
    """One rollout with the fields that the page reads; what it does not know goes to `more`, NaN becomes text.

    Raises:
        ValueError: `rewards` has no names.
    """
    rewards = row.get("rewards") or {name: row[name] for name in ("format_reward", "answer_reward") if name in row}
    if not isinstance(rewards, Mapping):
        raise ValueError(f"'rewards' is {str(rewards)[:80]}, not an object of each reward function's value")
    cut = {"length": True, "stop": False}.get(str(row.get("finish_reason")))
    fields = {
        "source": source.name,
        "step": row.get("step", source.step),
        "prompt": _text(row.get("prompt", "")),
        "response": _text(row["response"]),
        "truth": row["ground_truth"] if "ground_truth" in row else row.get("answer"),
        "reward": row.get("reward"),
        "rewards": rewards,
        "verdict": verdict_of(row, rewards),
        "cut": cut,
        "entropy": row["token_entropy"] if row.get("token_entropy") is not None else row.get("entropy_estimate"),
        **{name: row.get(name) for name in ("reason", "extracted", "tokens", "advantage", "per_token", "kept")},
        "turns": turns_of(row),
        "more": {name: value for name, value in row.items() if name not in _USED | set(rewards)},
    }
    plain: Row = finite(fields)
    return plain


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The turns of a response that called tools; None of one that did not.

    Raises:
        ValueError: a turn lacks what one has.
    """
    turns = row.get("turns")
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    try:
        return [
            {"role": "assistant", "text": str(turn["text"]), "tokens": int(turn["tokens"])}
            if turn["role"] != "tool"
            else {
                "role": "tool",
                "text": str(turn["text"]),
                "tokens": int(turn["tokens"]),
                "tool": [str(name) for name in turn["tool"]],
                "outcome": [str(outcome) for outcome in turn["outcome"]],
            }
            for turn in turns
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"'turns' is {str(turns)[:80]}: a turn has role, text and tokens, a tool's tool and outcome"
        ) from error


def verdict_of(row: Mapping[str, Any], rewards: Mapping[str, Any]) -> str:
    """`correct`, `format_only`, `neither`, or `unknown` where the row does not say.

    Args:
        rewards: the row's, by the reward function's name.
    """
    if row.get("outcome") in OUTCOMES:
        return str(row["outcome"])
    correct = row.get("correct", rewards.get("answer_reward"))
    well_formed = rewards.get("format_reward", row.get("format_reward"))
    if correct is None and well_formed is None:
        return "unknown"
    if correct == 1 and well_formed != 0:
        return "correct"
    return "unknown" if well_formed is None else "format_only" if well_formed == 1 else "neither"


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as text: JSON in a browser has none of them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def _text(value: object) -> str:
    """A prompt or response as text; a conversation as its messages, one after the other."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in value)
    return str(value)
