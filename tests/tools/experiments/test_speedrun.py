"""The speedrun: entries, rules, the record and its repetition."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from trl_ext.errors import InputError
from trl_ext.io import read_json
from trl_ext.tools.experiments import speedrun
from trl_ext.tools.experiments.preflight import check_in_this_process
from trl_ext.tools.experiments.rules import RULES
from trl_ext.tools.experiments.speedrun import (
    FIXED,
    GOAL,
    MAX_GAP,
    RECORD,
    REFERENCE,
    SPEEDRUN,
    Pair,
    compared,
    race,
    read_entry,
    read_record,
    repeats,
    run_of,
    score,
    verify,
    why_not,
)

RECIPES = Path(__file__).parents[3] / "recipes"
# A recipe that trains nothing: an entry with a target of 0.7 takes half of the reference's seconds.
SCRIPT = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
output, seed = given["--output_dir"], int(given["--seed"])
seconds = (50.0 if given["--target_accuracy"] == "0.7" else 100.0) + seed
last = {"accuracy": 0.9, "wall_clock_s": seconds + 30.0, "selection": {"accuracy_on_others": 0.65}}
os.makedirs(output)
json.dump({"validations": [last], "seconds_to_make_policy": 30.0,
           "commit": os.environ.get("COMMIT", "abc"), "versions": {},
           "hardware": {"cpu_threads": 2, "processes": 1, "gpus": []}}, open(f"{output}/summary.json", "w"))
"""


def pair(seed: int = 0, **changes: Any) -> Pair:
    known = {"seconds": 50.0, "accuracy": 0.65, "reference_seconds": 100.0, "reference_accuracy": 0.61, "apart": 60.0,
             "threads": 2, "gpus": 0}  # fmt: skip
    return Pair(seed, **(known | changes))


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(speedrun, "check_runs", check_in_this_process)  # the same check, in this process
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo_math.py").write_text(SCRIPT)
    text = (RECIPES / "grpo_arithmetic.yaml").read_text()
    (tmp_path / "recipes" / "grpo_arithmetic.yaml").write_text(f"{text}\nbf16: false\n")
    return tmp_path / "recipes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: gpro", r"unknown recipe 'gpro'\. Did you mean 'grpo'"),
        ("config: none.yaml", r"config: no file '.*none\.yaml'"),
        ("settings: [1]", r"settings must be a mapping, got \[1\]"),
        ("settings: {validation_problems: 64}", "settings: validation_problems is set by the speedrun; remove it"),
        ("settings: {model_name_or_path: x}", "settings: model_name_or_path is set by the speedrun; remove it"),
        ("setting: {}", r"unknown field 'setting'\. Did you mean 'settings'"),
        ("- a", "not a mapping"),
    ],
)
def test_an_entry_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "entry.yaml").write_text(text)
    with pytest.raises(InputError, match=message) as refused:
        read_entry(tmp_path / "entry.yaml", RECIPES)
    assert str(refused.value).startswith(f"{tmp_path / 'entry.yaml'}: ")


def test_the_shipped_entry_and_the_reference_keep_the_rules() -> None:
    entry = read_entry(RECIPES / "speedrun.yaml", RECIPES)
    assert float(entry.settings["target_accuracy"]) > GOAL
    for arm in (entry, REFERENCE):
        run = dataclasses.replace(run_of(arm, RECIPES), more=["--bf16", "false"])
        check_in_this_process({"arm": run}, SPEEDRUN)
    assert FIXED["final_validation_problems"] == RULES[SPEEDRUN].problems > FIXED["validation_problems"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_options": {"longest": 5}}, r"dataset_options must be .*'longest': 12.*, is .*'longest': 5"),
        ({"validation_max_tokens": 200}, "max_tokens must be 80, is 200"),
        ({"sampling_temperature": 0.5}, "temperature must be 1.0, is 0.5"),
        ({"validation_samples": 4}, "validation_samples must be 1, is 4"),
    ],
)
def test_an_entry_against_the_rules_does_not_run(settings: dict[str, Any], message: str, recipes: Path) -> None:
    entry = dataclasses.replace(REFERENCE, settings=settings)
    with pytest.raises(InputError, match=f"entry: the rules 'speedrun' are broken: .*{message}"):
        race(entry, 3, recipes, recipes / "out")
    assert not (recipes / "out").exists()
    with pytest.raises(InputError, match="--seeds must be at least 3, got 2"):
        race(entry, 2, recipes, recipes / "out")


@pytest.mark.moderate
def test_a_race_leaves_a_record_that_can_be_repeated(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dataclasses.replace(REFERENCE, settings={"target_accuracy": 0.7})
    record = race(entry, 3, recipes, recipes / "out")
    assert record == json.loads((recipes / "out" / RECORD).read_text())
    ratios = [50 / 100, 51 / 101, 52 / 102]
    assert record["ratio"] == pytest.approx(math.prod(ratios) ** (1 / 3), abs=1e-4)
    assert (record["seconds"], record["reference_seconds"]) == (51.0, 101.0)  # without making the base policy
    assert (record["accuracy"], record["why_not"]) == (0.65, None)
    assert [of["seed"] for of in record["seeds"]] == [0, 1, 2]
    assert {"hardware", "versions", "command", "config_digest"} <= set(record)
    assert record["commit"] == "abc"  # of the runs
    logged = list(read_json(recipes / "out" / "runs" / "commands.json"))
    assert logged == ["reference_0", "entry_0", "entry_1", "reference_1", "reference_2", "entry_2"]  # neither is first
    assert verify(recipes / "out" / RECORD, recipes, recipes / "again")[0]
    with pytest.raises(InputError, match=r"again.record\.json: what was run before repeats nothing"):
        verify(recipes / "out" / RECORD, recipes, recipes / "again")
    monkeypatch.setenv("COMMIT", "def")
    assert race(entry, 4, recipes, recipes / "out")["why_not"] == (
        "the runs are of several commits (abc, def): choose another --output_dir"
    )
    (recipes / "grpo_arithmetic.yaml").write_text("max_steps: 3\n")
    with pytest.raises(InputError, match=r"record\.json: grpo_arithmetic\.yaml is not what it was at commit"):
        verify(recipes / "out" / RECORD, recipes, recipes / "later")


def test_runs_that_break_a_rule_are_no_record() -> None:
    good = [pair(seed) for seed in range(3)]
    assert why_not(good) is None
    assert why_not([*good[:2], pair(2, accuracy=0.49)]) == (  # (0.65 + 0.65 + 0.49) / 3
        "the mean accuracy of the entry is 0.5967, below 0.6: have it train longer"
    )
    low = [pair(seed, reference_accuracy=GOAL - 0.01) for seed in range(3)]
    assert str(why_not(low)).startswith("the mean accuracy of the reference is 0.5900")
    assert str(why_not([*good, pair(3, apart=MAX_GAP + 1)])).startswith("seed 3: its two runs ended 3601 s apart")
    assert str(why_not([*good, pair(3, threads=8)])).startswith("seed 3: took 8 threads, 2 threads are allowed")
    assert str(why_not([*good, pair(3, gpus=1)])).startswith("seed 3: took 1 GPUs")


def test_a_record_is_beaten_by_an_interval_over_its_seeds() -> None:
    best = score([pair(seed, seconds=50.0 + seed) for seed in range(3)])
    faster = score([pair(seed, seconds=40.0 + seed) for seed in range(3)])
    assert compared(faster, best).startswith("a new record: 0.80")
    assert compared(best, faster).startswith("no new record: 1.24")
    assert compared(score([pair(seed, seconds=49.0 + 3 * (seed % 2)) for seed in range(3)]), best)[:2] == "no"
    assert compared(score([pair(seed, accuracy=0.1) for seed in range(3)]), best).startswith("no record: the mean")
    other = score([pair(seed) for seed in range(5, 8)])
    assert compared(other, best) == "not comparable: fewer than two seeds in common"


def test_a_repetition_may_be_a_tenth_slower() -> None:
    record = {"ratio": 0.5}
    assert repeats({"ratio": 0.549, "why_not": None}, record)[0]
    assert not repeats({"ratio": 0.551, "why_not": None}, record)[0]
    assert repeats({"ratio": 0.4, "why_not": "below"}, record) == (False, "not repeated: below")


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "record.json").write_text(text)
        with pytest.raises(InputError, match=r"record\.json: "):
            read_record(tmp_path / "record.json")
    with pytest.raises(InputError, match=f"none{os.sep}record"):
        read_record(tmp_path / "none" / "record.json")
