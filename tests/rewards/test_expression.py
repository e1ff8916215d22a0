"""Equality of expressions: exact where rational, by evaluation elsewhere, and always within bounds."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from trl_ext.rewards.expression import (
    FUNCTIONS,
    Apply,
    Constant,
    Expression,
    Number,
    Variable,
    are_equal,
    exact_value,
    variables,
)

x, y = Variable("x"), Variable("y")


def n(value: str | int) -> Number:
    return Number(Fraction(value))


def f(name: str, *arguments: Expression) -> Apply:
    return Apply(name, arguments)


def root(node: Expression, index: int = 2) -> Apply:
    return f("root", node, n(index))


def power(base: Expression, exponent: Expression) -> Apply:
    return f("power", base, exponent)


EQUAL = [
    (power(f("add", x, n(1)), n(2)), f("add", power(x, n(2)), f("multiply", n(2), x), n(1))),
    (root(n(8)), f("multiply", n(2), root(n(2)))), (root(n(4)), n(2)), (root(n(27), 3), n(3)), (power(n(8), n("1/3")), n(2)),
    (root(power(x, n(2))), f("absolute", x)), (f("divide", x, x), n(1)), (f("factorial", n(5)), n(120)),
    (f("binomial", n(5), n(2)), n(10)), (f("log", n(8), n(2)), n(3)), (f("ln", power(Constant("e"), n(3))), n(3)),
    (power(Constant("e"), f("multiply", Constant("i"), Constant("pi"))), n(-1)), (f("multiply", Constant("i"), Constant("i")), n(-1)),
    (f("add", power(f("sin", x), n(2)), power(f("cos", x), n(2))), n(1)), (f("floor", n("-1/2")), n(-1)), (f("ceiling", n("1/2")), n(1)),
    (f("multiply", n(0), x), n(0)), (f("atan", n(1)), f("divide", Constant("pi"), n(4))), (Constant("inf"), Constant("inf")),
]  # fmt: skip
DIFFERENT = [
    (n("12345678901234567891"), n("12345678901234567890")), (root(power(x, n(2))), x), (x, y), (f("divide", n(1), n(0)), n(0)),
    (f("divide", n(1), n(0)), f("divide", n(2), n(0))), (root(n(-8), 3), n(-2)), (Constant("inf"), n(1)), (Constant("pi"), n("22/7")),
    (f("factorial", n("1/2")), n(1)), (f("factorial", f("negate", n(3))), n(1)), (power(n(0), n(-1)), n(0)),
    (f("multiply", n("1000000000000000000000001"), root(n(2))), f("multiply", n("1000000000000000000000000"), root(n(2)))),
    (f("ln", n(0)), n(0)), (f("floor", Constant("i")), n(0)), (f("add", x, n("1e-30")), x),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal(a: Expression, b: Expression) -> None:
    assert are_equal(a, b)
    assert are_equal(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different(a: Expression, b: Expression) -> None:
    assert not are_equal(a, b)
    assert not are_equal(b, a)


def test_a_complex_variable_has_no_absolute_root() -> None:
    assert not are_equal(root(power(x, n(2))), f("absolute", x), complex_variables=True)


def test_a_verdict_does_not_depend_on_when_it_is_asked_for() -> None:
    almost = f("add", x, f("multiply", n("1e-40"), y))
    assert len({are_equal(almost, x, complex_variables=True) for _ in range(20)}) == 1  # not settled far from 0


def test_complex_variables_are_told_apart_beyond_thirty_digits() -> None:
    assert not are_equal(f("add", x, n("1e-30")), x, complex_variables=True)


def test_rational_values_are_exact() -> None:
    assert exact_value(f("divide", n(1), n(3))) == Fraction(1, 3)
    assert exact_value(power(n("2/3"), n(-2))) == Fraction(9, 4)
    assert exact_value(root(n("4/9"))) == Fraction(2, 3)
    assert exact_value(root(n(2))) is exact_value(x) is exact_value(Constant("pi")) is exact_value(root(n(-4))) is None


def test_free_variables() -> None:
    assert variables(f("add", x, f("multiply", y, Constant("pi")), n(1))) == {"x", "y"}


nine = n(9)
LARGE = [
    power(nine, power(nine, power(nine, nine))), f("factorial", n(10**9)), f("factorial", f("factorial", f("factorial", nine))),
    root(n(2), 10**9), f("binomial", n(10**9), n(5)), power(power(f("add", x, y), n(10**9)), n(10**9)), f("exp", power(n(10), n(30))),
    f("cos", power(n(10), n(10**9))), power(n("1/2"), n(-(10**9))), f("multiply", *[power(n(3), n(9999))] * 200),
    f("add", *[f("divide", n(1), n(10**300 + i)) for i in range(300)]), power(Constant("e"), power(Constant("e"), power(Constant("e"), n(9)))),
]  # fmt: skip


@pytest.mark.parametrize("node", LARGE)
@pytest.mark.parametrize("other", [n(1), x, root(n(2))])
def test_no_value_is_larger_than_the_bounds(node: Expression, other: Expression) -> None:
    began = time.process_time()
    assert not are_equal(node, other)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("node", [f("factorial", n(2001)), f("binomial", n(2001), n(2))])
def test_factorials_and_binomials_end_at_two_thousand(node: Apply) -> None:
    """By value: how long one too many takes depends on the machine."""
    allowed = Apply(node.function, (n(2000), *node.arguments[1:]))
    unity = [f("add", f("divide", one, one), f("multiply", n(0), x)) for one in (allowed, node)]
    assert [exact_value(one) is None for one in (allowed, node)] == [False, True]
    assert [are_equal(one, n(1)) for one in unity] == [True, False]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_exact_and_numeric_rules_of_a_function_agree(name: str) -> None:
    two_arguments = ("divide", "quotient", "mixed", "power", "root", "binomial", "log")
    arguments = (n(9), n(2)) if name in two_arguments else (n(3), n(4)) if name in ("add", "multiply") else (n(3),)
    exact = exact_value(f(name, *arguments))
    if exact is not None:  # with a variable that drops out, the same is computed numerically
        assert are_equal(f("add", f(name, *arguments), f("multiply", n(0), x)), Number(exact))
