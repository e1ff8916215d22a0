"""A setting is written once: `setting()` makes a dataclass's field with all that is known of it.

Parser, help, reference pages, resuming and checks read it from the field; the only other places of a setting are its
use, its test, and what `docs/site/trl_settings.yaml` says of how its effect is known. Imports nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

_T = TypeVar("_T")


class Group(Enum):
    """The groups of settings, in the order in which help shows them."""

    MODEL = "Model, problems and prompts"
    TRACES = "Traces"
    ALGORITHM = "Algorithm"
    DISTILLATION = "Teachers and distillation"
    REWARD = "Reward and grading"
    OPTIMIZER = "Steps, batches and the optimizer"
    SAMPLING = "Sampling and its engine"
    SAVINGS = "Computation that a step saves"
    VALIDATION = "Validation"
    LIMITS = "Limits and early stopping"
    OTHERS = "Responses of others, harnesses of others"
    OUTPUT = "Output, checkpoints and the Hub"


class OnResume(Enum):
    """The meaning of a different value in a resumed run; without one it is another experiment."""

    MAY_CHANGE = "changes what is logged or saved, or when, but not what is learned"
    LENGTH = "may change if the learning rate's schedule has no end"
    VALIDATION = "changes how validations are measured"
    VALIDATION_AS_USED = "the same, recorded only when used; a record may lack it"
    OF_PROCESS = "belongs to the process, not to the run"


@dataclass(frozen=True)
class Interval:
    """Which numbers a setting may be, as mathematics writes it: `[0, 1)` has 0 and not 1."""

    low: float
    high: float
    has_low: bool
    has_high: bool

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Of a text such as `(0, inf)`."""
        low, comma, high = text[1:-1].partition(", ")
        if not (comma and text[0] in "[(" and text[-1] in "])"):
            raise ValueError(f"{text!r} is no interval, such as [0, 1)")
        return cls(float(low), float(high), text[0] == "[", text[-1] == "]")

    def __contains__(self, number: float) -> bool:
        above = self.low <= number if self.has_low else self.low < number
        return above and (number <= self.high if self.has_high else number < self.high)

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"at least {self.low:g}" if self.has_low else "positive" if not self.low else f"above {self.low:g}"
        if self.has_low == self.has_high:
            return f"between {self.low:g} and {self.high:g}"
        if self.has_high:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"at least {self.low:g} and below {self.high:g}"


@dataclass(frozen=True)
class Facts:
    """What is known of a setting in addition to its name, type, default and help."""

    group: Group
    on_resume: OnResume | None = None
    trl: str | None = None  # TRL's or transformers' name of the same thing, which it is resolved into
    also_called: tuple[
        str, ...
    ] = ()  # words that are no settings here and mean it: the handout's, an earlier version's
    needs: tuple[str, ...] = ()  # without which it would be ignored; `uses_axes` is a preset or an axis
    within: Interval | None = None
    unit: str = ""  # of the number, for a message
    rare: bool = False  # `--help` alone does not show it


class _Metadata(dict[str, Any]):
    """A field's metadata; a parser, which copies them to make an option, gets what argparse knows."""

    def copy(self) -> dict[str, Any]:
        return {name: value for name, value in self.items() if name != "facts"}


def setting(
    default: object,
    help: str,  # noqa: A002, as argparse has it
    group: Group,
    *,
    on_resume: OnResume | None = None,
    trl: str | None = None,
    also_called: str = "",
    needs: str = "",
    within: str | None = None,
    unit: str = "",
    rare: bool = False,
    aliases: str | None = None,
    **of_option: object,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: the value, or a function without arguments that makes a list or a mapping.
        help: what it does, in sentences; the first one alone stands in `--help`.
        on_resume: what another value means in a resumed run; the default is another experiment.
        trl: the field of TRL's or transformers' config that it is resolved into.
        also_called: words that are no settings and mean it, the handout's or an earlier version's, separated by spaces.
        needs: settings without which it would be ignored, separated by spaces.
        within: an interval, such as `(0, 1]`; None is always allowed where the type has it.
        rare: `--help NAME` and `--help all` show it, and `--help` alone does not.
        aliases: a second flag.
        of_option: more for argparse's `add_argument`.
    """
    text = f"{help.removesuffix('.')} (TRL: {trl})." if trl else help
    interval = None if within is None else Interval.parse(within)
    metadata = _Metadata(of_option, help=text)
    words = tuple(also_called.split()), tuple(needs.split())
    metadata["facts"] = Facts(group, on_resume, trl, *words, interval, unit, rare)
    if aliases is not None:
        metadata["aliases"] = aliases
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(settings: type[Any]) -> Mapping[str, Facts]:
    """What is known of each setting of a dataclass that `setting` made, by its name."""
    return {f.name: f.metadata["facts"] for f in dataclasses.fields(settings) if "facts" in f.metadata}


def facts(settings: type[Any], read: Callable[[Facts], _T | None]) -> dict[str, _T]:
    """One of the facts, for the settings that have it."""
    return {name: value for name, known in facts_of(settings).items() if (value := read(known))}


def check_intervals(settings: object) -> None:
    """Refuse a number outside of its setting's interval; None means that it is not set.

    Raises:
        ValueError: one is; the message has the name, what it may be, and its value.
    """
    for name, known in facts_of(type(settings)).items():
        value = getattr(settings, name)
        if known.within is not None and value is not None and value not in known.within:
            raise ValueError(f"{name} must be {known.within}{' ' * bool(known.unit)}{known.unit}, got {value}")
