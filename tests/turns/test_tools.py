"""What tools answer, whatever a call does, and which ones are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trl_ext.sandbox import pool as pool_module
from trl_ext.sandbox.limits import SandboxError
from trl_ext.turns.calculator import calculator
from trl_ext.turns.calls import Answer, Call
from trl_ext.turns.tools import Toolbox

OWN = str(Path(__file__).parents[1] / "support" / "own_tools.py")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34+5", "413"),
        ("2^10 + 2**3", "1032"),
        ("(1 + 2) / 7", "3/7 = 0.428571428571429"),
        ("1.5 * 4", "6"),
        ("sqrt(2)", "1.4142135623731"),
        ("sqrt(16)", "4"),
        ("5!", "120"),
        ("123456789 * 987654321", "121932631112635269"),
        ("12 × 34", "408"),
    ],
)
def test_the_calculator_works_expressions_out(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("x + 1", "not a number: x"),
        ("1/0", "it has no value"),
        ("9**9**9**9", "it has no value, or one that is too large"),
        ("10^5000", "the value has too many digits"),
        ("3, 4", "not one expression"),
        ("2 +", "not an expression"),
        ("(" * 100, "not an expression: nested too deeply"),
        ("1+" * 300, "longer than 400 characters"),
    ],
)
def test_the_calculator_says_why_it_cannot(expression: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        calculator(expression)
    assert time.monotonic() - began < 5


@pytest.fixture(scope="module")
def box() -> Iterator[Toolbox]:
    try:
        box = Toolbox.of(f"python,calculator,{OWN}:add,{OWN}:moody", seconds=5.0)
    except ValueError as error:
        pytest.skip(str(error))
    yield box
    box.close()


@pytest.mark.slow
def test_each_call_gets_its_answer_in_order(box: Toolbox) -> None:
    calls = [
        Call("python", {"code": "print(1)\n2"}),
        Call("calculator", {"expression": "3*4"}),
        Call("add", {"a": 3, "b": 4}),
        Call("python", {"code": "1/0"}),
        Call("calculator", {"expression": "x"}),
        Call("add", {"a": 3}),
        Call("add", {"c": 3}),
        Call("nothing", {}),
        Call("python", None, "no JSON"),
        Call("python", {}),
        Call("calculator", {"other": 3}),
    ]
    answers = [(answer.text.splitlines()[-1], answer.kind) for answer in box.answers(calls)]
    assert answers == [
        ("2", "ok"),
        ("12", "ok"),
        ("7", "ok"),
        ("ZeroDivisionError: division by zero", "failed"),
        ("Error: not a number: x", "failed"),
        ("4", "ok"),
        ("Error: missing a required argument: 'a'", "failed"),
        ("Error: no tool 'nothing'; there are python, calculator, add, moody", "failed"),
        ("Error: no JSON", "failed"),
        ("Error: the argument 'code' is missing", "failed"),
        ("Error: calculator() got an unexpected keyword argument 'other'", "failed"),
    ]


@pytest.mark.slow
def test_a_tool_that_misbehaves_is_an_answer() -> None:
    box = Toolbox.of(f"{OWN}:moody", seconds=1.0)
    try:
        deeds = ["hang", "die", "raise", "flood", "fill", "work"]
        hung, died, raised, flooded, filled, done = box.answers([Call("moody", {"what": deed}) for deed in deeds])
        assert (hung.kind, hung.text) == ("timeout", "Error: no result in 1 s")
        assert (died.kind, died.text) == ("failed", "Error: exited with status 3")
        assert (raised.kind, raised.text) == ("failed", "Error: ValueError('not today')")
        assert flooded.kind in ("ok", "timeout")
        assert (filled.kind, len(filled.text)) == ("ok", 20_000)
        assert (done.kind, done.text) == ("ok", "work is done")
        failures = box.answers([Call("moody", {"what": "raise"})] * 40)  # which a grader would not survive
        assert {answer.text for answer in failures} == {"Error: ValueError('not today')"}
    finally:
        box.close()


@pytest.mark.slow
def test_python_that_misbehaves_is_an_answer(box: Toolbox) -> None:
    codes = ["print('x' * 10**7)", "import os\nos._exit(3)", "x = bytearray(2**34)", "exit()", "x = 1"]
    answers = box.answers([Call("python", {"code": code}) for code in codes])
    assert [answer.kind for answer in answers] == ["failed", "failed", "failed", "ok", "ok"]
    assert [answer.text.splitlines()[-1][:45] for answer in answers] == [
        "Error: it printed more than 65536 bytes",
        "Error: its process ended with status 3 before",
        "Error: it needs more than 512 MiB of memory",
        "(no output)",
        "(no output)",
    ]
    assert len(answers[0].text) < 21_000
    (late,) = Toolbox.of("python", 0.5).answers([Call("python", {"code": "print(1)\nwhile True: pass"})])
    assert (late.text, late.kind) == ("1\nError: it did not end within 0.5 s", "timeout")


@pytest.mark.slow
def test_state_stays_between_calls_only_if_asked() -> None:
    call = Call("python", {"code": "x + 1"}, earlier=({"code": "x = 3\nprint('unseen')"}, {"code": "x = 1/0"}))
    (fresh,), (kept,) = (Toolbox.of("python", 5.0, keeps).answers([call]) for keeps in (False, True))
    assert fresh.text.endswith("NameError: name 'x' is not defined")
    assert kept == Answer("4", "ok", kept.seconds)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("calculato", "tools: unknown tool 'calculato'. Did you mean 'calculator'?"),
        ("calculator,calculator", "tools: two are called 'calculator': rename one"),
        (f"calculator,{OWN}:calculator", "tools: two are called 'calculator': rename one"),
        (f"{OWN}:untyped", "untyped: Argument a is missing a type hint.*: a tool needs a type for every argument"),
        (f"{OWN}:undocumented", "undocumented: Cannot generate JSON schema.*no docstring.*: a tool needs a type"),
        (f"{OWN}:half_documented", "half_documented: .*no description for the argument 'b': a tool needs"),
        (f"{OWN}:check", "check has the argument 'answer', which is what rewards call the truth"),
        (f"{OWN}:several", r"several: the argument 'numbers' must be a plain one, without \* before it"),
        (f"{OWN}:nothing", "tool: '.*own_tools.py' has no function 'nothing'. It has: add, "),
        ("nowhere.py:add", "tool: no file 'nowhere.py'"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(names: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Toolbox.of(names, 1.0)


def test_python_is_refused_where_nothing_isolates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, limits: object) -> None:
        raise SandboxError("programs cannot be isolated on this machine: not in force: network")

    monkeypatch.setattr(pool_module.SandboxPool, "__init__", refuse)
    with pytest.raises(ValueError, match=r"tools: python: .*not in force: network\. Leave it out, or start where"):
        Toolbox.of("python", 1.0)
