"""Settings that may be unset, and lists: one rule for flags and YAML files, over all recipes' settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, ROOT
from trl_ext.errors import SettingsError
from trl_ext.generation.completion import Sampling
from trl_ext.grpo.config import ExtGRPOConfig
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import _Parser, read_settings
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.optional import NAMED_NONE, Shape, shapes_of
from trl_ext.recipes.sft import SFT_SETTINGS

RECIPES = (GRPO_SETTINGS, SFT_SETTINGS, EXPERT_ITERATION_SETTINGS, (Evaluation,), (BestOfN,))
WORDS = ("none", "None", "null", "[]", "")
NUMBERS = ("at", "reward_weights", "teacher_weights")
IN_YAML: tuple[Any, ...] = (None, [], [""], ["none"], *WORDS)


def expected(name: str, shape: Shape) -> Any:
    if name in NAMED_NONE:
        return "none"
    return None if shape.is_optional else []


def by_flags(parser: _Parser, names: Iterable[str], *words: str) -> dict[str, Any]:
    """Every setting of `names` as it is with these words."""
    found = parser.parse_known_args([argument for name in names for argument in (f"--{name}", *words)])[0]
    return {name: getattr(found, name) for name in names}


def by_yaml(parser: _Parser, names: Iterable[str], value: Any) -> dict[str, Any]:
    parser.set_defaults_with_config(**dict.fromkeys(names, value))
    found = parser.parse_known_args([])[0]
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe[0].__name__)
def test_every_setting_is_unset_by_the_same_words(recipe: tuple[type, ...]) -> None:
    parser, shapes = _Parser(recipe, add_help=False), shapes_of(recipe)
    none = {name: expected(name, shape) for name, shape in shapes.items() if shape.is_optional or shape.is_list}
    assert {"stop", "model_name_or_path", "vllm_max_model_length"} <= set(none)
    assert "temperature" not in none
    for word in WORDS:
        assert by_flags(parser, none, word) == none, word
    for value in IN_YAML:
        names = [name for name in none if shapes[name].is_list or value in (None, []) or isinstance(value, str)]
        assert by_yaml(parser, names, value) == {name: none[name] for name in names}, value


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe[0].__name__)
def test_a_list_has_none_or_values(recipe: tuple[type, ...]) -> None:
    parser = _Parser(recipe, add_help=False)
    lists = [name for name, shape in shapes_of(recipe).items() if shape.is_list]
    assert by_flags(parser, lists, "2") == {name: [2 if name in NUMBERS else "2"] for name in lists}
    for value in (2, [2]):
        assert by_yaml(parser, lists, value) == {name: [2] for name in lists}
    for name in lists:
        with pytest.raises(ValueError, match=f"{name}: .* next to other values"):
            by_flags(parser, [name], "2", "none")
    for word in WORDS:
        with pytest.raises(ValueError, match="next to other values"):
            by_flags(parser, ["stop"], word, "</answer>")
        with pytest.raises(ValueError, match="next to other values"):
            by_yaml(parser, ["stop"], ["</answer>", word])
    for name in ("seed", "use_vllm"):
        with pytest.raises(ValueError, match=f"{name}: null: this setting needs a value"):
            by_yaml(parser, [name], None)


WRONG: dict[type, tuple[Any, ...]] = {  # by what a setting is, values that are something else
    str: (3, 0.5, True, {"a": 1}),
    bool: (3, 0.5, ["true"], {"a": 1}),
    int: (0.5, True, [2], {"a": 1}),
    float: (True, [0.5], {"a": 1}),
    dict: (3, True, ["a"]),
    list: (True, {"a": 1}, [["a"]]),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe[0].__name__)
def test_a_yaml_value_of_another_kind_is_named(recipe: tuple[type, ...]) -> None:
    parser, tried = _Parser(recipe, add_help=False), set()
    for name, shape in shapes_of(recipe).items():
        for value in WRONG[shape.kinds[0]] if shape.kinds else ():
            if type(value) not in shape.kinds or value == [["a"]]:
                with pytest.raises(ValueError, match=rf"^{name}: {re.escape(repr(value))} is no "):
                    by_yaml(parser, [name], value)
                tried.add(shape.kinds[0])
    assert tried == set(WRONG) - (set() if recipe in RECIPES[:3] else {dict, list} - tried)


def test_a_word_that_yaml_takes_for_a_boolean_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("save_strategy: no\n")
    with pytest.raises(SettingsError, match='save_strategy: False is no text; in "quotes" it is one'):
        read_settings(GRPO_SETTINGS, None, tmp_path / "own.yaml", ON_A_CPU)


def test_stop_can_be_unset_on_the_command_line(tmp_path: Path) -> None:
    for words in WORDS:
        _, _, config = read_settings(GRPO_SETTINGS, None, DEFAULT, [*ON_A_CPU, "--stop", words])
        assert config.stop is None
    (tmp_path / "own.yaml").write_text("stop: ['']\noutput_dir: ''\n")
    evaluation = read_settings((Evaluation,), None, tmp_path / "own.yaml", [])[0]
    assert (evaluation.stop, evaluation.output_dir) == ([], "runs/own")
    evaluation = read_settings((Evaluation,), None, ROOT / "recipes" / "evaluate.yaml", ["--output_dir", "none"])[0]
    assert (evaluation.stop, evaluation.output_dir) == (["</answer>"], "runs/evaluate")
    with pytest.raises(SettingsError, match="invalid float value: 'zero'"):
        read_settings((Evaluation,), None, tmp_path / "own.yaml", ["--temperature", "zero"])


def test_an_empty_stop_string_is_none_in_python_too(tmp_path: Path) -> None:
    made = [ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, stop=stop) for stop in ("", [], [""], None)]
    assert [config.stop for config in made] == [None] * 4
    assert Evaluation(stop=[""]).stop == Evaluation(stop=None).stop == []  # type: ignore[arg-type]
    for kind in (lambda **more: ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **more), Evaluation):
        with pytest.raises(ValueError, match="has an empty string"):
            kind(stop=["</answer>", ""])
    with pytest.raises(ValueError, match="stop has an empty string"):
        Sampling(stop=("",))
