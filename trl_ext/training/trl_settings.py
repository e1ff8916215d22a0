"""TRL's settings next to a preset or an axis: taken over into the axes' options, or refused by name.

`settings_table.py` says which; nothing here names a setting that the table does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from trl_ext.compat.given import given, reset
from trl_ext.registry import Registry, defaults_of, unknown
from trl_ext.setting import facts


@dataclass(frozen=True)
class Rule:
    """What is done with one setting: it is refused, taken over, or refused without what it needs."""

    note: str = ""  # why it is refused, or as what it is taken over
    refused: bool = False  # an error next to a preset or an axis
    needs: tuple[str, ...] = ()  # without which it would be ignored; `uses_axes` is a preset or an axis
    excludes: tuple[str, ...] = ()  # settings that, all set together, it does not go with; the note says why
    options: tuple[str, ...] = ()  # taken over as the first of these options that the chosen policy loss has
    # By value: the advantage that it is taken over as, with its options; the policy losses that replace others.
    advantages: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    keeps: Mapping[str, Callable[[str], bool]] = field(default_factory=dict)  # advantages that are that already
    losses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # policy losses that are not that


class AxesConfig(Protocol):
    """A config that chooses the axes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    advantage: str | None
    advantage_options: Any
    policy_loss: str | None
    policy_loss_options: Any


def rules(names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several settings, whose names are separated by spaces."""
    return dict.fromkeys(names.split(), rule)


def rules_of(settings: type) -> dict[str, Rule]:
    """The rules that our settings have at their fields: what each needs."""
    return {name: Rule(needs=needs) for name, needs in facts(settings, lambda known: known.needs).items()}


def check_needs(part: Any, table: Mapping[str, Rule]) -> None:
    """Refuse a setting that would be ignored because of another one, with both."""
    for name, value in given(part, table, off=False).items():
        missing = [need for need in table[name].needs if not getattr(part, need)]
        if missing:
            raise ValueError(f"{name}={value!r} needs {_words(missing[0])}; it would be ignored without")


def refuse_ignored(config: Any, table: Mapping[str, Rule]) -> None:
    """Refuse what the table refuses next to a preset or an axis, with what to use instead."""
    refused = []
    defaults = defaults_of(config)
    for name, value in given(config, table, off=False).items():
        others = [f"{other}={getattr(config, other)!r}" for other in table[name].excludes if getattr(config, other)]
        together = bool(others) and len(others) == len(table[name].excludes) and value != defaults[name]
        if table[name].refused or together:
            with_others = f" with {' and '.join(others)}" if together else ""
            refused.append(f"{name}={value!r}{with_others} next to a preset or an axis: {table[name].note}")
    if refused:
        raise ValueError("; ".join(refused))


def refuse_next_to(config: Any, setting: str, names: Sequence[str]) -> None:
    """Refuse settings of TRL next to one of ours that takes their place."""
    for name, value in given(config, names, off=False).items():
        raise ValueError(f"{name}={value!r} would be ignored next to {setting}={getattr(config, setting)!r}; set one")


def take_over_advantage(config: AxesConfig, table: Mapping[str, Rule], preset: str) -> None:
    """Choose the advantage that TRL's settings mean; refuse an unknown value, or another chosen advantage.

    Args:
        preset: the preset's advantage.
    """
    defaults = defaults_of(config)
    values = given(config, (name for name in table if table[name].advantages))
    for name, value in sorted(values.items(), key=lambda item: bool(item[1] == defaults[item[0]])):
        advantage, options = _member(name, value, config, table[name].advantages)
        if value in table[name].keeps and table[name].keeps[value](config.advantage or preset):
            continue
        if config.advantage not in (None, advantage):
            raise ValueError(f"{name}={value!r} means advantage {advantage!r}, but advantage is {config.advantage!r}")
        config.advantage = advantage
        config.advantage_options = {**options, **(config.advantage_options or {})}


def take_over_policy_loss(
    config: AxesConfig, table: Mapping[str, Rule], loss: str, options: Mapping[str, Any], losses: Registry
) -> None:
    """Choose the policy loss that TRL's settings mean, with its options; TRL's fields then are at their defaults.

    Args:
        loss, options: the preset's.
        losses: the members of the axis.
    """
    chosen = config.policy_loss or loss
    for name, value in given(config, (n for n in table if table[n].losses)).items():
        reset(config, name)
        if value in table[name].without:
            _refuse_one_without(name, value, chosen, table[name].without[value])
            continue
        instead = _member(name, value, config, table[name].losses)
        if chosen not in instead:
            raise ValueError(
                f"{name}={value!r} next to a preset or an axis: policy_loss {chosen!r} has no such form; "
                f"use {' or '.join(instead)}"
            )
        if instead[chosen] != chosen:  # with the clipping range of the loss whose place it takes
            inherited = {**losses.options(chosen), **(options if chosen == loss else {})}
            known = losses.options(instead[chosen])
            inherited = {option: v for option, v in inherited.items() if option in known}
            config.policy_loss_options = {
                **inherited,
                **_options(config, table, instead[chosen], known | inherited),
                **(config.policy_loss_options or {}),
            }
            config.policy_loss = chosen = instead[chosen]
    usual = {**losses.options(chosen), **(options if chosen == loss else {})}
    if taken := _options(config, table, chosen, usual):
        config.policy_loss_options = {**taken, **(config.policy_loss_options or {})}


def _refuse_one_without(name: str, value: object, chosen: str, those: Sequence[str]) -> None:
    if chosen in those:
        raise ValueError(
            f"{name}={value!r} next to a preset or an axis: policy_loss {chosen!r} has the ratio of a whole sequence; "
            f"use ppo_clip, or leave {name} out"
        )


def _options(config: AxesConfig, table: Mapping[str, Rule], chosen: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL's settings are among the options of the policy loss `chosen`; their fields then are at the defaults.

    Args:
        usual: the options that it has, with the values that hold where nothing else is given.
    """
    own = config.policy_loss_options or {}
    taken: dict[str, Any] = {}
    for name, value in given(config, (n for n in table if table[n].options)).items():
        option = next((option for option in table[name].options if option in usual), None)
        reset(config, name)
        if option is None and value is None:  # which asks for nothing
            continue
        if option is None:
            raise ValueError(
                f"{name}={value!r} next to a preset or an axis: policy_loss {chosen!r} has no option "
                f"{' or '.join(table[name].options)}. It has: {', '.join(usual) or 'none'}"
            )
        if name == "epsilon_high" and value is None:  # as epsilon, in TRL
            value = own.get(option, {**usual, **own, **taken}.get("eps_low", usual[option]))
        if own.get(option, value) != value:
            raise ValueError(
                f"{name}={value!r} and policy_loss_options {option}={own[option]!r} contradict each other; "
                "set one of them"
            )
        if name == "epsilon" and "eps_high" in usual:  # TRL's epsilon_high is epsilon unless given
            taken["eps_high"] = own.get("eps_high", value)
        taken[option] = value
    return taken


def _member(name: str, value: object, config: Any, members: Mapping[Any, Any]) -> Any:
    if value not in members:
        raise unknown(f"value of {name}", str(value), {str(defaults_of(config)[name]), *members})
    return members[value]


def _words(need: str) -> str:
    words = {"uses_axes": "a preset or an axis", "beta": "beta above 0", "has_teacher": "a teacher", "tools": "tools"}
    return words.get(need, f"{need}: true")
