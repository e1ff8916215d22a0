"""A judge's file and its rubric: read, and checked field by field before anything is asked."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trl_ext.errors import InputError
from trl_ext.io import read_yaml
from trl_ext.registry import defaults_of, unknown
from trl_ext.setting import Interval

T = TypeVar("T")
DEFAULT_RUBRIC = Path(__file__).with_name("rubric.yaml")
_WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Mapping: "a mapping of fields",
}


def _within(interval: str, default: float) -> Any:
    """A field with a number in an interval."""
    return field(default=default, metadata={"within": Interval.parse(interval)})


@dataclass(frozen=True)
class Criterion:
    """What is scored, and how much it counts."""

    description: str
    weight: float = _within("(0, inf)", 1.0)


@dataclass(frozen=True)
class Rubric:
    """What a response is judged by; `rubric.yaml` next to this file says what each field means."""

    criteria: Mapping[str, Criterion]
    instruction: str = "Grade the response to the problem."
    reference: bool = True
    scale: int = _within("[1, 100]", 5)
    threshold: float = _within("(0, 1]", 0.5)
    reason: bool = True

    def score(self, scores: Mapping[str, int]) -> float:
        """The weighted mean of the criteria's scores, from 0 to 1."""
        weights = {name: criterion.weight for name, criterion in self.criteria.items()}
        return sum(weights[name] * scores[name] for name in weights) / (sum(weights.values()) * self.scale)


@dataclass(frozen=True)
class JudgeSampling:
    """How the judge's answers are drawn.

    Attributes:
        seed: sent with every request; `null` for servers that refuse one.
        extra_body: further fields of a request, such as `chat_template_kwargs` of vLLM.
    """

    temperature: float = _within("[0, inf)", 0.0)
    seed: int | None = 0
    max_tokens: int = _within("[1, inf)", 512)
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgeLimits:
    """What a run may spend on its judge, and what it survives.

    Attributes:
        calls: requests of one start of the program, retries included, on all ranks together; `null` for no limit.
        failures: responses in a row without a verdict at which the run ends.
        tries: of a request that gets no answer, with exponential backoff.
        asks: for one verdict; an answer that is no verdict is asked for again.
        timeout: seconds for one try.
        concurrency: requests at a time, of each rank.
    """

    calls: int | None = _within("[1, inf)", 100_000)
    failures: int = _within("[1, inf)", 64)
    tries: int = _within("[1, inf)", 5)
    asks: int = _within("[1, inf)", 3)
    timeout: float = _within("(0, inf)", 60.0)
    concurrency: int = _within("[1, inf)", 8)


@dataclass(frozen=True)
class JudgeSettings:
    """A judge's file.

    Attributes:
        api_key_env: the environment variable that holds the key; the key itself is in no file.
        rubric: as read, or the path of its file, seen from the judge's file.
        cache: the folder of verdicts, seen from the working directory; by default `judge` in `$TRL_EXT_CACHE` or
            `~/.cache/trl_ext`.
    """

    url: str
    model: str
    api_key_env: str | None = None
    rubric: Rubric = field(default_factory=lambda: read_rubric(DEFAULT_RUBRIC))
    sampling: JudgeSampling = JudgeSampling()
    limits: JudgeLimits = JudgeLimits()
    cache: str | None = None

    @property
    def key(self) -> str:
        """The key, of the environment; empty where none is asked for."""
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    @property
    def cache_folder(self) -> Path:
        """Where verdicts are kept."""
        root = os.environ.get("TRL_EXT_CACHE") or Path.home() / ".cache" / "trl_ext"
        return Path(self.cache) if self.cache else Path(root) / "judge"


def read_judge(path: Path) -> JudgeSettings:
    """The settings in a judge's file.

    Raises:
        InputError: in one line, with file and field, for what cannot be used.
    """
    where = f"judge {path}"
    given = _mapping(_read(path, "judge"), where)
    for name in ("api_key", "key", "token"):
        if name in given:
            raise InputError(
                f"{where}: {name}: a key does not belong into a file: put it into an environment variable and name "
                "that in api_key_env"
            )
    rubric = given.get("rubric")
    if isinstance(rubric, str):
        given["rubric"] = read_rubric(path.parent / rubric)
    elif rubric is not None:
        given["rubric"] = _rubric(rubric, f"{where}: rubric")
    else:
        given.pop("rubric", None)
    for name, kind in (("sampling", JudgeSampling), ("limits", JudgeLimits)):
        if name in given:
            given[name] = _made(kind, given[name], f"{where}: {name}")
    made = _made(JudgeSettings, given, where)
    if not made.url.startswith(("http://", "https://")):
        raise InputError(
            f"{where}: url must begin with http:// or https://, as http://localhost:8000/v1; got {made.url!r}"
        )
    if made.api_key_env and not made.key:
        raise InputError(f"{where}: api_key_env: the environment has no variable {made.api_key_env!r}: export it first")
    return made


def read_rubric(path: Path) -> Rubric:
    """The rubric in a YAML or JSON file; an InputError for what cannot be used."""
    return _rubric(_read(path, "rubric"), f"rubric {path}")


def _rubric(given: object, where: str) -> Rubric:
    fields = _mapping(given, where)
    criteria = fields.get("criteria")
    if not criteria:
        raise InputError(
            f"{where}: criteria: a rubric needs at least one, such as criteria: {{correct: {{description: ..., weight: "
            "1}}"
        )
    fields["criteria"] = {
        str(name): _made(Criterion, of_one, f"{where}: criteria: {name}")
        for name, of_one in _mapping(criteria, f"{where}: criteria").items()
    }
    return _made(Rubric, fields, where)


def _read(path: Path, kind: str) -> object:
    if not path.is_file():
        raise InputError(f"{kind} {path}: there is no such file (working directory: {Path.cwd().name!r})")
    try:
        return read_yaml(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{kind} {path}: {' '.join(str(error).split())}") from error


def _mapping(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{where}: expected a mapping of fields, got {given!r}")
    return {str(name): value for name, value in given.items()}


def _made(kind: type[T], given: object, where: str) -> T:
    """A dataclass of given fields, each of the type and in the interval that it says."""
    fields, defaults = _mapping(given, where), defaults_of(kind)
    for name in fields:
        if name not in defaults:
            raise InputError(f"{where}: {unknown('field', name, defaults)}")
    if missing := [name for name, default in defaults.items() if default is dataclasses.MISSING and name not in fields]:
        raise InputError(f"{where}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    hints = typing.get_type_hints(kind)
    for known in dataclasses.fields(kind):  # type: ignore[arg-type]
        if known.name in fields:
            fields[known.name] = _checked(fields[known.name], hints[known.name], f"{where}: {known.name}")
            _check_interval(fields[known.name], known.metadata.get("within"), f"{where}: {known.name}")
    return kind(**fields)


def _checked(value: Any, hint: Any, where: str) -> Any:
    choices = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    if value is None and type(None) in choices:
        return None
    kind = next(choice for choice in choices if choice is not type(None))
    kind = typing.get_origin(kind) or kind
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)) or value == "":
        raise InputError(f"{where} must be {_WORDS.get(kind, kind.__name__)}, got {value!r}")
    return value


def _check_interval(value: Any, within: Interval | None, where: str) -> None:
    if within is not None and value is not None and (value not in within or not math.isfinite(value)):
        raise InputError(f"{where} must be {within}, got {value}")
