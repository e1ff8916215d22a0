"""`--help`: two screens that are there at once, more on one setting, all of them, and the reference page."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.docs_pages import RECIPES as SCRIPTS
from scripts.docs_pages import help_page, settings_of, settings_reference
from trl_ext.recipes.cli import parse
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.settings_help import THEIRS, Setting, help_on, kept_help, settings_in, short_help, topic_of
from trl_ext.setting import Group

RECIPES = Path(__file__).parents[2] / "recipes"
DEFAULT = RECIPES / "grpo_math.yaml"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(GRPO_SETTINGS, "what this recipe is for", DEFAULT, arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_that_is_kept_is_what_the_settings_say(script: str) -> None:
    text = kept_help(RECIPES / script).read_text(encoding="utf-8")
    assert text == help_page(script), "run: python -m scripts.docs_pages"
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def test_help_is_answered_without_torch_and_trl() -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{str(RECIPES / 'grpo_math.py')!r}, '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'trl', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == help_page("grpo_math.py") + "[]\n"


def test_a_fork_has_the_same_help_made_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(said(capsys, "--help").split())
    for words in ("what this recipe is for", "--preset", "dr_grpo", "--policy_loss", "cispo", "--kl_estimator_options",
                  "--rollout_batch_size [128]", "--validate_every", "--learning_rate [0.0003]", "--config"):  # fmt: skip
        assert words in text, words
    assert said(capsys, "--preset", "dapo", "-h", "--seed", "1").split() == text.split()


@pytest.mark.parametrize("asked", [["--help", "all"], ["--help=all"]])
def test_all_settings_are_listed_when_all_are_asked_for(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *asked)
    for kind in GRPO_SETTINGS:
        assert all(f"--{f.name}" in text for f in dataclasses.fields(kind) if f.init)


def test_one_setting_is_told_with_all_that_is_known_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    whole = said(capsys, "--help", "uninformative_keep_prob")
    assert whole.startswith("--uninformative_keep_prob [1.0]\n    Revisit problems")
    assert "judged by their subject and level" in whole
    assert whole == said(capsys, "--help=--uninformative-keep-prob")
    several = said(capsys, "--help", "adam_")
    assert [line for line in several.splitlines() if line.startswith("--")] == [
        "--adam_beta1 [0.9]", "--adam_beta2 [0.999]", "--adam_epsilon [1e-08]",
    ]  # fmt: skip
    assert "Did you mean learning_rate" in said(capsys, "--help", "lerning_rate")


@pytest.mark.parametrize(
    ("arguments", "topic"),
    [
        (["--seed", "1"], None),
        (["--seed", "1", "--help"], ""),
        (["-h", "--seed", "1"], ""),
        (["--help", "seed"], "seed"),
        (["--help=seed"], "seed"),
    ],
)
def test_what_help_is_asked_for(arguments: list[str], topic: str | None) -> None:
    assert topic_of(arguments) == topic


def test_every_own_setting_is_in_one_group_with_a_sentence() -> None:
    every = {setting for script in SCRIPTS for setting in settings_of(script)}
    assert set(THEIRS) <= {setting.name for setting in every if not setting.is_ours}
    groups: dict[str, set[Group | None]] = {}
    for setting in every:
        if setting.is_ours:
            groups.setdefault(setting.name, set()).add(setting.group)
            first = setting.text.partition(". ")[0]
            assert first[0].isupper(), setting
            assert first.partition(" ")[0] not in ("Of", "Default:", "True:", "No", "TRL:"), setting
            assert setting.text.endswith("."), setting
            assert len(first.split()) >= 3, setting
    assert [name for name, found in groups.items() if len(found) > 1 or None in found] == []


def test_settings_with_one_text_share_it() -> None:
    def shown(name: str, default: str, text: str) -> Setting:
        return Setting(name, default, text, Group.MODEL, True)

    settings = [shown("model_name_or_path", "m", "Same text."), shown("use_peft", "x" * 68, "Same text. More.")]
    assert short_help(settings).splitlines() == [
        "Model, problems and prompts:", f"  --model_name_or_path [m], --use_peft [{'x' * 68}] Same text.",
    ]  # fmt: skip
    settings[1] = shown("use_peft", "x" * 69, "Same text. More.")  # without room for it next to the flags
    assert short_help(settings).splitlines() == [
        "Model, problems and prompts:", f"  --model_name_or_path [m], --use_peft [{'x' * 69}]", " " * 36 + "Same text.",
    ]  # fmt: skip
    assert help_on("peft", settings).splitlines()[1] == "    Same text. More."


def test_a_default_is_the_yaml_files_where_it_has_one() -> None:
    found = {s.name: s for s in settings_in(GRPO_SETTINGS, {"seed": 7, "stop": ["a", "b"]})}
    assert (found["seed"].default, found["stop"].default, found["restore_best"].default) == ("7", "a b", "false")
    assert found["temperature"].group is None  # TRL's own
    assert not found["seed"].is_ours


def test_reference_has_every_own_setting() -> None:
    page = settings_reference()
    shown = {setting.name for script in SCRIPTS for setting in settings_of(script) if setting.group}
    assert all(f"| `{name}` | " in page for name in shown)
    assert "| `seed` | The seed of everything that is random. | `0` grpo_math, sft_math, expert_iteration |" in page
    assert page.count("| `rollout_batch_size` | ") == 2
    assert "The rank of" not in page
