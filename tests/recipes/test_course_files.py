"""The course's own files with every shipped setting, and the commands of docs/course.md."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.recipes.test_grpo import ON_A_CPU, ROOT
from trl_ext.errors import SettingsError
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import read_settings
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.runs.recipes import RECIPES

COURSE = (ROOT / "docs" / "course.md").read_text()
PROGRAMS: dict[str, tuple[type, ...]] = {
    **{Path(recipe.script).stem: recipe.settings() for recipe in RECIPES.values()},
    "evaluate": (Evaluation,),
    "best_of_n": (BestOfN,),
}
LAYOUTS: dict[str, dict[str, Any]] = {  # one row of each, whose answer is 3/4
    "course": {"problem": "What is 6/8?", "answer": r"\frac{3}{4}", "level": 2, "subject": "Algebra", "unique_id": "a"},
    "course with solution": {
        "problem": "What is 6/8?", "solution": r"So $\boxed{6/8}$.", "answer": r"\frac{3}{4}", "level": "Level 2",
    },
    "MATH": {"problem": "What is 6/8?", "solution": r"It is $\boxed{\frac{3}{4}}$.", "level": "Level 2", "type": "A"},
    "GSM8K": {"question": "What is 6/8?", "answer": "It is so.\n#### \\frac{3}{4}"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # commands name files from there


def settings_of(program: str, *arguments: str) -> Any:
    default = ROOT / "recipes" / f"{program}.yaml"
    on_a_cpu = ON_A_CPU if len(PROGRAMS[program]) > 1 else ()
    return read_settings(PROGRAMS[program], None, default, [*arguments, *on_a_cpu])[0]


def written(folder: Path, rows: Mapping[str, Any]) -> str:
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps(rows) + "\n")
    return str(folder / "{split}.jsonl")


def on_math() -> list[tuple[str, Path]]:
    """Programs and the shipped files that have them read MATH."""
    files = {path: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    found = [path for path, content in files.items() if "MATH" in str(content.get("dataset"))]
    return [(next(name for name in PROGRAMS if path.stem.startswith(name.partition("_")[0])), path) for path in found]


@pytest.mark.moderate
def test_every_layout_is_read_by_every_shipped_setting(tmp_path: Path) -> None:
    assert len(on_math()) >= 4
    for number, (layout, row) in enumerate(LAYOUTS.items()):
        dataset = written(tmp_path / str(number), row)
        for program, config in on_math():
            for flag in ("--split", "--validation_split"):
                task = settings_of(program, "--config", str(config), "--dataset", dataset, flag, "validation")
                split = getattr(task, "validation_split", None) or task.split
                (found,) = task.read(split, None, 0).rows
                assert (split, found["answer"]) == ("validation", r"\frac{3}{4}"), (layout, config.name)
                assert found["problem"] == "What is 6/8?"


def test_columns_that_are_given_are_not_recognized(tmp_path: Path) -> None:
    for number, (layout, flags, answer) in enumerate((
        ("course with solution", ["--answer_column", "solution"], "6/8"),  # as MATH has it there
        ("GSM8K", ["--answer_source", "as_is"], LAYOUTS["GSM8K"]["answer"]),
        ("MATH", ["--answer_source", "as_is"], LAYOUTS["MATH"]["solution"]),
        ("MATH", ["--answer_column", "answer"], None),
        ("GSM8K", ["--problem_column", "problem"], None),
    )):  # fmt: skip
        dataset = written(tmp_path / str(number), LAYOUTS[layout])
        task = settings_of("evaluate", "--dataset", dataset, *flags)
        if answer is not None:
            assert task.read("validation", None, 0).rows[0]["answer"] == answer
            continue
        with pytest.raises(ValueError, match=f"{flags[1]!r}"):
            task.read("validation", None, 0)


def test_the_split_has_both_names_in_every_program_and_file(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    for program, parts in PROGRAMS.items():
        shipped = yaml.safe_load((ROOT / "recipes" / f"{program}.yaml").read_text())
        for name in ("split", "validation_split"):
            file.write_text(yaml.safe_dump(shipped | {name: "held_out"}))
            for given in (["--config", str(file)], [f"--{name}", "held_out"]):
                task = settings_of(program, *given)
                assert (getattr(task, "validation_split", None) or task.split) == "held_out"
        file.write_text("split: a\nvalidation_split: b\n")
        with pytest.raises(SettingsError, match="split and validation_split are one setting"):
            read_settings(parts, None, file, [])


def commands() -> list[list[str]]:
    """The commands of the course's page, from `python` or the recipe's name on."""
    spans = re.findall(r"`([^`]+)`", COURSE)
    return [shlex.split(span) for span in spans if re.match(r"(python |recipes/\S+\.py )", span)]


def test_every_command_of_the_page_is_taken() -> None:
    parsed, others = [], []
    for words in commands():
        script, *arguments = words[1:] if words[0] == "python" else words
        if script == "-m":
            module, *arguments = arguments
            place = ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), words
            continue
        assert (ROOT / script).is_file(), words
        if Path(script).stem in PROGRAMS:
            settings_of(Path(script).stem, *arguments)
            parsed.append(words)
            continue
        others.append(words)
        paths = [word for word in arguments if word.startswith(("recipes/", "scripts/"))]
        assert all((ROOT / path).exists() for path in paths), words
    assert len(parsed) >= 4
    assert len(others) >= 8


def test_every_flag_of_the_page_is_a_programs() -> None:
    known = set()
    for parts in PROGRAMS.values():
        for part in parts:
            for field in part.__dataclass_fields__.values():
                known |= {field.name, str(field.metadata.get("aliases", "")).removeprefix("--")}
    texts = [p.read_text() for folder in ("recipes", "scripts", "trl_ext") for p in (ROOT / folder).rglob("*.py")]
    known |= {flag for text in texts for flag in re.findall(r'"--(\w+)"', text)}
    spans = " ".join(re.findall(r"`([^`]+)`", COURSE))
    assert {flag for flag in re.findall(r"--(\w+)", spans) if flag not in known} == set()
