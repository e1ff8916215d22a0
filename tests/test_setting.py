"""A setting is written once: what `setting()` says at a field is what parser, checks and tables have."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import pytest
from transformers import TrainingArguments
from trl import TrlParser

from trl_ext.compat import on_resume
from trl_ext.recipes import run
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.runs.recipes import RECIPES
from trl_ext.setting import Group, Interval, OnResume, check_intervals, facts, facts_of, setting
from trl_ext.tools.estimate.memory import trainers
from trl_ext.tools.experiments import rules, runspec, speedrun
from trl_ext.tools.experiments.pipeline import arms
from trl_ext.tools.experiments.pipeline import settings as pipeline_settings
from trl_ext.training import settings

EVERY = [*dict.fromkeys(part for recipe in RECIPES.values() for part in recipe.settings()), BestOfN]


@dataclass
class Settings:
    """One of each kind."""

    rate: float | None = setting(
        None, "The rate.", Group.LIMITS, within="(0, 1]", unit="of all", on_resume=OnResume.MAY_CHANGE, trl="lr"
    )
    names: list[str] = setting(list, "The names.", Group.MODEL, aliases="--words", needs="rate", also_called="a b")
    engine: str = setting("auto", "The engine.", Group.SAMPLING, nargs="?", const="true")
    plain: int = 3


@pytest.mark.parametrize(
    ("text", "inside", "outside", "words"),
    [
        ("[1, inf)", [1, 7.5], [0, 0.99, -1], "at least 1"),
        ("(0, inf)", [1e-9, 3], [0, -1], "positive"),
        ("(2, inf)", [2.1], [2], "above 2"),
        ("[0, 1]", [0, 1], [-0.1, 1.1], "between 0 and 1"),
        ("(0, 1)", [0.5], [0, 1], "between 0 and 1"),
        ("(0, 1]", [0.1, 1], [0, 1.1], "above 0 and at most 1"),
        ("[0, 1)", [0, 0.9], [1, -0.1], "at least 0 and below 1"),
    ],
)
def test_an_interval_has_what_its_notation_says(
    text: str, inside: list[float], outside: list[float], words: str
) -> None:
    interval = Interval.parse(text)
    assert all(number in interval for number in inside)
    assert not any(number in interval for number in [*outside, math.nan])
    assert str(interval) == words


@pytest.mark.parametrize("text", ["", "0, 1", "[0 1]", "[0; 1)"])
def test_a_text_that_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no interval"):
        setting(None, "x", Group.LIMITS, within=text)


def test_a_number_outside_of_its_interval_is_refused_by_name() -> None:
    for rate in (None, 1.0, 0.5):
        check_intervals(Settings(rate))
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"^rate must be above 0 and at most 1 of all, got {rate}$"):
            check_intervals(Settings(rate))


def test_trls_own_parser_makes_an_option_of_a_setting() -> None:
    (parsed,) = TrlParser((Settings,)).parse_args_and_config(["--rate", "0.5", "--words", "x", "y", "--engine"])
    assert parsed == Settings(0.5, ["x", "y"], "true")
    assert "(TRL: lr)" in TrlParser((Settings,)).format_help()


def test_facts_are_those_at_the_field() -> None:
    assert list(facts_of(Settings)) == ["rate", "names", "engine"]
    assert facts(Settings, lambda known: known.on_resume) == {"rate": OnResume.MAY_CHANGE}
    assert facts(Settings, lambda known: known.needs) == {"names": ("rate",)}
    assert facts(Settings, lambda known: known.also_called) == {"names": ("a", "b")}
    assert facts(Settings, lambda known: known.trl) == {"rate": "lr"}


@pytest.mark.parametrize("part", EVERY, ids=lambda part: part.__name__)
def test_every_name_that_a_field_gives_is_a_setting(part: type) -> None:
    fields = {field.name for field in dataclasses.fields(part)}
    assert set(facts(part, lambda known: known.trl).values()) <= fields
    for name, needs in facts(part, lambda known: known.needs).items():
        assert all(need in fields or isinstance(getattr(part, need, None), property) for need in needs), name


TABLES = {  # of names of settings as texts, next to those that test_settings_table.py holds
    "read by the engine": settings._TRLS_ENGINE,
    "derived": run._DERIVED,
    "set by an experiment": [name for name in runspec.TAKEN if name != "config"],  # a flag
    "set by a pipeline": pipeline_settings.TAKEN_TOO,
    "of a pipeline's end": arms._OF_THE_END,
    "sampled plainly": [*rules._SAMPLING, *rules._PLAIN],
    "fixed in a speedrun": speedrun.FIXED,
    "not of a fake step": trainers._LEFT_OUT,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_names_settings_that_there_are(table: str) -> None:
    fields = {field.name for part in EVERY for field in dataclasses.fields(part)}
    assert set(TABLES[table]) - fields == set()


def test_what_is_said_of_trls_settings_is_said_of_their_fields() -> None:
    fields = {field.name for part in EVERY for field in dataclasses.fields(part)}
    named = {name for names in on_resume._THEIRS.values() for name in names.split()}
    assert named - fields == set()
    for prefix in on_resume._THEIR_BOOKKEEPING:
        assert any(name.startswith(prefix) for name in fields), prefix


@pytest.mark.parametrize("part", EVERY, ids=lambda part: part.__name__)
def test_no_recipe_takes_a_number_outside_of_its_interval(part: type) -> None:
    config = {"output_dir": "unused", "use_cpu": True, "bf16": False} if issubclass(part, TrainingArguments) else {}
    for name, interval in facts(part, lambda known: known.within).items():
        for number in [interval.low - 1, *[interval.low] * (not interval.has_low), math.nan]:
            with pytest.raises(ValueError, match=rf"^{name} must be {interval}"):
                part(**config, **{name: number})
