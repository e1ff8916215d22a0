"""Settings by the names that the version before had for them: every way in takes them, and says the new one."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_ext.compat.renamed import RENAMED, RenamedWarning, accepts_earlier_names, current_flags, current_names
from trl_ext.discovery.problem import Polished, Problem, Verdict
from trl_ext.discovery.sandbox.limits import ProgramFailure
from trl_ext.experiments.pipeline.record import load_or_create, write_record
from trl_ext.experiments.pipeline.settings import Pipeline, Stage
from trl_ext.experiments.sweep import run_all
from trl_ext.expert_iteration.trainer import ExpertIterationConfig
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS, GRPOTask
from trl_ext.rewards import Grade
from trl_ext.runs.resume import SettingsKnowledge, differences
from trl_ext.sft.trainer import ExtSFTConfig

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "recipes" / "grpo_math.yaml"
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]
# A value of each that is not its default.
VALUES: dict[str, Any] = {
    "skip_idle_rows": False, "compact_micro_batches": False, "share_prompts": False, "settled_share": 0.25,
    "decay_share": 0.5, "stop_below_best": 0.5, "stop_without_spread": 7,
}  # fmt: skip


def found_in(parsed: tuple[Any, ...]) -> dict[str, Any]:
    return {old: getattr(part, new) for old, new in RENAMED.items() for part in parsed if hasattr(part, new)}


@pytest.mark.parametrize("as_typed", ["--{}", "--{}=", "dashes"])
def test_a_flag_works_by_its_old_name(as_typed: str) -> None:
    flags = []
    for old, value in VALUES.items():
        name, text = (old.replace("_", "-") if as_typed == "dashes" else old), json.dumps(value)
        flags += [f"--{name}={text}"] if as_typed.endswith("=") else [f"--{name}", text]
    with pytest.warns(RenamedWarning) as said:
        parsed = parse(GRPO_SETTINGS, None, DEFAULT, [*ON_A_CPU, "--time_budget", "9", *flags])
    assert found_in(parsed) == VALUES
    expected = [f"{old} is now called {RENAMED[old]}; the next release drops the old name" for old in VALUES]
    ours = [str(warning.message) for warning in said if warning.category is RenamedWarning]
    assert ours == expected
    assert issubclass(RenamedWarning, DeprecationWarning)


def test_a_yaml_field_works_by_its_old_name_and_a_new_flag_wins(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump({**VALUES, "time_budget": 9, "preset": "dapo"}))
    with pytest.warns(RenamedWarning):
        parsed = parse(GRPO_SETTINGS, None, path, [*ON_A_CPU, "--collapse_threshold", "0.75"])
    assert found_in(parsed) == {**VALUES, "stop_below_best": 0.75}


def test_a_yaml_with_both_names_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(yaml.safe_dump({"share_prompts": True, "share_prompt_prefix": False}))
    with pytest.raises(SystemExit):
        parse(GRPO_SETTINGS, None, path, ON_A_CPU)
    assert "share_prompts and share_prompt_prefix are one setting" in capsys.readouterr().err


def test_old_setting_name_works_in_constructors_and_attributes() -> None:
    run: dict[str, Any] = {
        "output_dir": "unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "time_budget": 9.0,
    }
    run["lr_scheduler_type"] = "constant"
    for kind in (ExtGRPOConfig, ExtSFTConfig, ExpertIterationConfig):
        given = {name: value for name, value in VALUES.items() if RENAMED[name] in kind.__dataclass_fields__}
        with pytest.warns(RenamedWarning):
            config = kind(**run, **given)
        assert {name: getattr(config, RENAMED[name]) for name in given} == given
        with pytest.warns(RenamedWarning, match="decay_share is now called lr_decay_fraction"):
            assert copy.deepcopy(config).decay_share == 0.5
        with pytest.raises(AttributeError, match="stop_below_best"):
            config.stop_below_best  # noqa: B018  another class's
    with pytest.warns(RenamedWarning), pytest.raises(ValueError, match="collapse_threshold must be between 0 and 1"):
        GRPOTask(stop_below_best=2.0)


def test_a_run_of_the_version_before_is_the_same_experiment() -> None:
    now = {RENAMED[old]: value for old, value in VALUES.items()}
    with warnings.catch_warnings(action="error"):
        known = SettingsKnowledge.of(GRPO_SETTINGS)
        assert differences(VALUES, now, known) == []
        found = differences(VALUES, {**now, "uninformative_keep_prob": 0.5, "collapse_threshold": 0.9}, known)
    assert [str(difference) for difference in found] == ["uninformative_keep_prob: was 0.25, is 0.5"]


def test_stages_and_runs_done_under_old_names_count_as_done(tmp_path: Path) -> None:
    before, now = (
        Pipeline([Stage("grpo", settings={name: 0.5})], "p") for name in ("decay_share", "lr_decay_fraction")
    )
    write_record(tmp_path, load_or_create(tmp_path, before) | {"1_grpo": {"seconds": 3.0}})
    assert load_or_create(tmp_path, now)["1_grpo"] == {"seconds": 3.0}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text('{"value": 1}')
    (tmp_path / "commands.json").write_text(json.dumps({"a": ["recipe.py", "--decay_share", "0.5"]}))
    assert run_all({"a": ["recipe.py", "--lr_decay_fraction", "0.5"]}, tmp_path) == {"a": {"value": 1}}


def test_what_was_not_renamed_stays_as_it_is() -> None:
    arguments = ["--policy_loss", "skip_idle_rows", "-x", "--stop", "--", "share_prompts", "--reward=settled_share"]
    with warnings.catch_warnings(action="error"):
        assert current_flags(arguments) == arguments
        assert current_names({"preset": "share_prompts"}) == {"preset": "share_prompts"}


def test_every_new_name_is_a_field_and_no_old_one_is() -> None:
    fields = {f.name for part in GRPO_SETTINGS for f in dataclasses.fields(part)}
    assert set(RENAMED.values()) <= fields
    assert not set(RENAMED) & fields

    @accepts_earlier_names
    @dataclasses.dataclass
    class Other:
        x: int = 1

    with pytest.raises(TypeError, match="share_prompts"):
        Other(share_prompts=False)  # type: ignore[call-arg]


def test_a_grade_has_its_earlier_names_too() -> None:
    with pytest.warns(RenamedWarning, match="Verdict is now called Grade"):
        from trl_ext.rewards import Verdict
    with pytest.warns(RenamedWarning, match="in_format is now called well_formed"):
        grade = Verdict(in_format=True, answer="4", right=False, reason="")
    assert grade == Grade(True, "4", False, "")
    with pytest.warns(RenamedWarning, match="right is now called correct"):
        assert (grade.in_format, grade.right) == (True, False)


def test_a_problem_of_ones_own_has_its_earlier_names_too() -> None:
    with pytest.warns(RenamedWarning, match="Finished is now called Polished"):
        from trl_ext.discovery.problem import Finished
    with pytest.warns(RenamedWarning, match="Failed is now called ProgramFailure"):
        from trl_ext.discovery.sandbox.limits import Failed
    assert (Finished, Failed) == (Polished, ProgramFailure)
    verdict = Verdict(True, (1.0,), "")
    with pytest.warns(RenamedWarning, match="finish is now called polish"):
        problem = Problem("toy", "", lambda _: verdict, finish=lambda *_: Finished("", verdict))
    assert problem.polish is not None
    with pytest.raises(ImportError, match="Polish"):
        from trl_ext.discovery.problem import Polish  # noqa: F401


@pytest.mark.slow  # a process with torch and trl
def test_a_person_sees_the_new_name(tmp_path: Path) -> None:
    flags = ["--decay_share", "2", "--time_budget", "9", "--output_dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "grpo_math.py"), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "RenamedWarning: decay_share is now called lr_decay_fraction" in done.stderr
    assert "error: lr_decay_fraction must be above 0 and at most 1, got 2.0" in done.stderr
