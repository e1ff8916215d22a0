"""One table type for every axis: what it accepts, and what it says about what it does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from trl_ext.algorithms.advantages import ADVANTAGES
from trl_ext.algorithms.aggregation import AGGREGATIONS
from trl_ext.algorithms.kl import KL_ESTIMATORS
from trl_ext.algorithms.policy_losses import POLICY_LOSSES
from trl_ext.algorithms.sampler_correction import SAMPLER_REJECTIONS, SAMPLER_WEIGHTS
from trl_ext.data.load import ANSWER_SOURCES
from trl_ext.registry import Registry, UnknownName, unknown
from trl_ext.rewards import ANSWER_FORMATS, GRADERS, REWARDS

TABLES = [
    ADVANTAGES, AGGREGATIONS, ANSWER_FORMATS, ANSWER_SOURCES, GRADERS, KL_ESTIMATORS, POLICY_LOSSES, REWARDS,
    SAMPLER_REJECTIONS, SAMPLER_WEIGHTS,
]  # fmt: skip
MEMBERS = [pytest.param(table, name, id=f"{table.kind}-{name}") for table in TABLES for name in table]

USER_FILE = """
loads = []
def halved(reward, *, by: float = 2.0):
    return reward / by
def needy(reward, *, weight):
    return reward * weight
number = 3
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


@pytest.fixture
def shapes() -> Registry:
    table = Registry("shape")

    @table.register
    def square(x: float, *, side: float = 1.0, unit: str) -> tuple[float, str]:
        return x * side, unit

    return table


@pytest.mark.parametrize(("table", "name"), MEMBERS)
def test_member_has_its_function_name_docstring_and_defaults(table: Registry, name: str) -> None:
    assert table[name].__name__ == name
    assert (table[name].__doc__ or "").strip()
    options = table.options(name)
    assert table.build(name, **options).keywords == options
    assert table.build(name).func is table[name]


@pytest.mark.parametrize(("table", "name"), MEMBERS)
def test_misspelled_member_suggests_the_nearest_and_all_choices(table: Registry, name: str) -> None:
    with pytest.raises(UnknownName) as refused:
        table.build(name + "x")
    message = str(refused.value)
    assert message.startswith(f"unknown {table.kind} '{name}x'. Did you mean ")
    assert message.endswith("Known: " + ", ".join(sorted(table)))


def test_the_messages_read_as_sentences() -> None:
    with pytest.raises(UnknownName) as refused:
        POLICY_LOSSES.build("ppo_clp")
    assert str(refused.value) == (
        "unknown policy loss 'ppo_clp'. Did you mean 'ppo_clip'? Known: " + ", ".join(sorted(POLICY_LOSSES))
    )
    with pytest.raises(UnknownName) as refused:
        POLICY_LOSSES.build("ppo_clip", eps_lw=0.1)
    assert str(refused.value) == (
        "unknown option of policy loss 'ppo_clip' 'eps_lw'. Did you mean 'eps_low'? Known: dual_clip, eps_high, eps_low"
    )
    with pytest.raises(UnknownName, match=r"^unknown property of a policy loss 'zero_adv'\. Did you mean 'zero_adv"):
        POLICY_LOSSES.register(zero_adv=True)
    with pytest.raises(UnknownName, match=re.escape("Known: 00, 01, ") + r".*, 59 and 40 more$"):
        raise unknown("folder", "zzz", [f"{n:02}" for n in range(100)])
    with pytest.raises(UnknownName, match=re.escape("'zzz'. Known: (none)")):
        POLICY_LOSSES.build("reinforce", zzz=1)


def test_nothing_is_suggested_where_nothing_is_near(shapes: Registry) -> None:
    with pytest.raises(UnknownName) as refused:
        shapes.build("qqqq")
    assert str(refused.value) == "unknown shape 'qqqq'. Known: square"


def test_a_name_is_taken_once(shapes: Registry) -> None:
    with pytest.raises(ValueError, match="shape 'square' is registered twice"):
        shapes.register(shapes["square"])


def test_registering_returns_the_function_itself(shapes: Registry) -> None:
    def round_one(x: float) -> float:
        return x

    assert shapes.register(round_one) is round_one
    assert shapes.build("round_one")(3) == 3


def test_only_keyword_arguments_are_options(shapes: Registry) -> None:
    assert list(shapes.options("square")) == ["side", "unit"]
    assert shapes.build("square", unit="m", side=3)(2) == (6, "m")
    with pytest.raises(ValueError, match="shape 'square' needs the option 'unit'"):
        shapes.build("square", side=3)
    with pytest.raises(UnknownName, match="option of shape 'square' 'x'"):
        shapes.build("square", unit="m", x=1)


@pytest.mark.parametrize("wrong", ["0.2x", [0.2], {"a": 1}])
def test_an_option_of_the_wrong_type_is_refused_when_it_is_built(wrong: object) -> None:
    with pytest.raises(ValueError, match="eps_low"):
        POLICY_LOSSES.build("ppo_clip", eps_low=wrong)


def test_option_accepts_int_for_float_and_none_if_it_is_default() -> None:
    assert POLICY_LOSSES.build("ppo_clip", eps_low=0, dual_clip=None).keywords == {"eps_low": 0, "dual_clip": None}
    assert POLICY_LOSSES.build("ppo_clip", dual_clip=3).keywords == {"dual_clip": 3}


def test_user_function_is_found_by_file_or_module(user_file: str) -> None:
    for path in ("mine.py:halved", str(Path("mine.py").resolve()) + ":halved"):
        assert ADVANTAGES.build(path, by=4)(8) == 2
    assert ADVANTAGES.options("mine.py:halved") == {"by": 2.0}
    assert ADVANTAGES.get_function("trl_ext.algorithms.advantages:raw") is ADVANTAGES["raw"]
    with pytest.raises(UnknownName, match=r"option of advantage 'mine\.py:halved' 'bye'\. Did you mean 'by'\?"):
        ADVANTAGES.build("mine.py:halved", bye=4)
    with pytest.raises(ValueError, match="needs the option 'weight'"):
        ADVANTAGES.build("mine.py:needy")


def test_a_file_is_loaded_once_however_it_is_spelled(user_file: str, tmp_path: Path) -> None:
    first = ADVANTAGES.get_function("mine.py:halved")
    assert ADVANTAGES.get_function(f"{tmp_path}/mine.py:halved") is first
    first.__globals__["loads"].append(1)
    assert ADVANTAGES.get_function("mine.py:needy").__globals__["loads"] == [1]


@pytest.mark.moderate
def test_files_of_similar_paths_are_distinct_with_own_siblings(user_file: str) -> None:
    for folder, value in (("one/a", 1), ("two/a", 2)):
        Path(folder).mkdir(parents=True)
        Path(folder, "mine.py").write_text("from helper import value\ndef f(): return value, 'in a folder'\n")
        Path(folder, "helper.py").write_text(f"value = {value}\n")
    Path("a_mine.py").write_text("def f(): return 'at the top'\n")
    before = list(sys.path)
    found = [ADVANTAGES.get_function(f"{path}.py:f")() for path in ("one/a/mine", "two/a/mine", "a_mine", "one/a/mine")]
    assert found == [(1, "in a folder"), (2, "in a folder"), "at the top", (1, "in a folder")]
    assert sys.path == before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.py:f", "advantage: no file 'absent.py' (working directory: "),
        ("absent_module:f", "advantage: cannot import 'absent_module' (No module named 'absent_module')"),
        ("mine.py:half", "advantage: 'mine.py' has no function 'half'. It has: halved, needy"),
        ("mine.py:number", "advantage: 'mine.py' has no function 'number'. It has: halved, needy"),
        ("trl_ext.algorithms.presets:f", "advantage: 'trl_ext.algorithms.presets' has no function 'f'. It has: none"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_missing(user_file: str, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ADVANTAGES.build(path)


def test_error_in_a_user_file_is_raised_at_every_lookup(user_file: str) -> None:
    Path("broken.py").write_text("1 / 0")
    for _ in range(2):  # the second look-up must not find a half-loaded module
        with pytest.raises(ZeroDivisionError):
            ADVANTAGES.build("broken.py:f")


def test_name_prefix_is_nearer_than_a_similar_name() -> None:
    with pytest.raises(UnknownName, match=r"'ppo'\. Did you mean 'ppo_clip'\?"):
        POLICY_LOSSES.build("ppo")
