"""Expressions as trees, and whether two of them are equal: exactly if both are rational, otherwise numerically.

The graders' parsers build the trees; nothing here reads text. Every operation bounds the size of its result, so that
no expression of a few thousand nodes takes long or much memory, whatever a model wrote.

Two expressions that are not both rational are compared at random points with `DIGITS` digits; by the Schwartz-Zippel
lemma they rarely agree at all of them by chance. Undefined points (0/0) are drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import mpmath

DIGITS = 80
AGREE = 40  # digits, relative: cancellation may eat the other half of DIGITS
POINTS = 4
SURE_DIGITS = 1_100  # at one more point, so that a difference of 10^-900 is not taken for rounding
SURE_AGREE = 1_000  # digits after the point
FAR = (40, 10**4, 10**12)  # bounds of the variables at such points
ATTEMPTS = 24  # draws for POINTS defined points before two expressions count as different
MAX_BITS = 20_000  # of a numerator, a denominator or the exponent of a power of two
MAX_FACTORIAL = 2_000


@dataclass(frozen=True, slots=True)
class Number:
    """An exact rational number; decimals are exact too."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Constant:
    """`pi`, `e`, `i` or `inf`; `inf` has no value and equals only itself."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A free variable."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of `FUNCTIONS` applied to its arguments; `add` and `multiply` take any number of them."""

    function: str
    arguments: tuple[Expression, ...]


Expression: TypeAlias = Number | Constant | Variable | Apply


Numeric: TypeAlias = mpmath.mpf | mpmath.mpc
Point: TypeAlias = Mapping[str, Numeric]  # a value per variable


class Undefined(ArithmeticError):
    """The expression has no value here, or one too large to hold."""


def are_equal(a: Expression, b: Expression, *, complex_variables: bool = False) -> bool:
    """Whether `a` and `b` are the same function of their variables, wherever one of them is real.

    Args:
        complex_variables: the variables are complex numbers, so that sqrt(x^2) is not |x|.
    """
    if a == b:
        return True
    exact_a, exact_b = exact_value(a), exact_value(b)
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b
    names = sorted(variables(a) | variables(b))
    draw = random.Random(0)  # the same points every time: a verdict must be reproducible
    agreed = on_branches = 0  # points at which both are real, or both complex and not equal
    with mpmath.workdps(DIGITS):
        for _ in range(ATTEMPTS if names else 1):
            point = {name: _draw(draw, complex_variables) for name in names}
            try:
                x, y = numeric_value(a, point), numeric_value(b, point)
            except Undefined:
                continue
            if not mpmath.almosteq(x, y, rel_eps=mpmath.mpf(10) ** -AGREE, abs_eps=mpmath.mpf(10) ** -AGREE):
                if complex_variables or not (mpmath.im(x) and mpmath.im(y) and names):
                    return False
                on_branches += 1  # another branch of a root or logarithm, which real quantities do not meet
                continue
            agreed += not (on_branches and mpmath.im(x))
            if agreed == POINTS or not names:
                return complex_variables or _surely_agree(a, b, names, point, draw)
    return False


def _surely_agree(a: Expression, b: Expression, names: list[str], point: Point, draw: random.Random) -> bool:
    """Whether they agree to many digits far from 0, or at `point` if they are undefined there."""
    with mpmath.workdps(SURE_DIGITS):
        far = [{name: _draw(draw, False) * size / 2 for name in names} for size in FAR if names]
        for place in (*far, point):
            try:
                x, y = numeric_value(a, place), numeric_value(b, place)
            except Undefined:
                continue
            eps = mpmath.mpf(10) ** -SURE_AGREE
            if not mpmath.almosteq(x, y, rel_eps=eps, abs_eps=eps) and not (names and mpmath.im(x) and mpmath.im(y)):
                return False
    return True


def variables(node: Expression) -> set[str]:
    """The names of the free variables."""
    if isinstance(node, Variable):
        return {node.name}
    return set().union(*map(variables, node.arguments)) if isinstance(node, Apply) else set()


def exact_value(node: Expression) -> Fraction | None:
    """The value as a rational number, or None if it is irrational, undefined or too large."""
    try:
        return _exact(node)
    except (Undefined, ZeroDivisionError):
        return None


def numeric_value(node: Expression, point: Point) -> Numeric:
    """The value at a point, at mpmath's current precision.

    Raises:
        Undefined: no value there, or one beyond 2 ** MAX_BITS.
    """
    if isinstance(node, Number):
        numerator, denominator = mpmath.mpf(node.value.numerator), node.value.denominator
        return numerator if denominator == 1 else numerator / denominator
    if isinstance(node, Variable):
        return point[node.name]
    if isinstance(node, Constant):
        if node.name not in _CONSTANTS:
            raise Undefined(node.name)
        return +_CONSTANTS[node.name]
    arguments = [numeric_value(argument, point) for argument in node.arguments]
    try:
        value = FUNCTIONS[node.function].numeric(*arguments)
    except (ArithmeticError, ValueError) as error:
        raise Undefined(node.function) from error
    if mpmath.mag(value) > MAX_BITS or mpmath.isnan(value):  # of an infinite value it is infinite
        raise Undefined(node.function)
    return value


def _draw(draw: random.Random, complex_variables: bool) -> Numeric:
    real = mpmath.mpf(draw.randint(1, 10**12)) / 10**12 * 4 - 2  # negative as well: sqrt(x^2) is not x
    return mpmath.mpc(real, mpmath.mpf(draw.randint(1, 10**12)) / 10**12 * 4 - 2) if complex_variables else real


def _exact(node: Expression) -> Fraction | None:
    if isinstance(node, Number):
        return node.value
    if not isinstance(node, Apply) or (rule := FUNCTIONS[node.function].exact) is None:
        return None
    arguments = []
    for argument in node.arguments:
        if (value := _exact(argument)) is None:
            return None
        arguments.append(value)
    return _within_bounds(rule(*arguments))


def _within_bounds(value: Fraction | None) -> Fraction | None:
    if value is not None and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Undefined("too large")
    return value


def _exact_product(*factors: Fraction) -> Fraction:
    product = Fraction(1)
    for factor in factors:
        product *= factor
        _within_bounds(product)
    return product


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _exact_root(base, Fraction(exponent.denominator)) if exponent.denominator <= 64 else None
        return None if root is None else _exact_power(root, Fraction(exponent.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > MAX_BITS:
        raise Undefined("power")
    return base ** int(exponent)


def _exact_root(x: Fraction, n: Fraction) -> Fraction | None:
    """The root if it is rational; the principal root of a negative number is complex."""
    if n.denominator != 1 or not 1 <= n <= 64 or x < 0:
        return None
    top, bottom = _integer_root(x.numerator, int(n)), _integer_root(x.denominator, int(n))
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(x: int, n: int) -> int | None:
    if n == 1 or x < 2:
        return x
    if n == 2:
        root = math.isqrt(x)
    else:
        root = 1 << -(-x.bit_length() // n)  # Newton's method from above
        while (step := ((n - 1) * root + x // root ** (n - 1)) // n) < root:
            root = step
    return root if root**n == x else None


def _natural(x: Numeric | Fraction, largest: int) -> int:
    if x.imag != 0 or not 0 <= x.real <= largest or int(x.real) != x.real:
        raise Undefined("not a natural number, or too large")
    return int(x.real)


def _numeric_power(base: Numeric, exponent: Numeric) -> Numeric:
    if base == 0:
        if mpmath.re(exponent) <= 0 and exponent != 0:
            raise Undefined("power")
        return mpmath.mpf(0 if exponent != 0 else 1)
    if abs(exponent) * max(1, abs(mpmath.mag(base))) > MAX_BITS:
        raise Undefined("power")
    return mpmath.power(base, exponent)


def _restricted_to_reals(function: Callable[[Numeric], Numeric]) -> Callable[[Numeric], Numeric]:
    def for_real(x: Numeric) -> Numeric:
        if x.imag != 0:
            raise Undefined("complex")
        return function(x.real)

    return for_real


def _bounded(function: Callable[[Numeric], Numeric]) -> Callable[[Numeric], Numeric]:
    """`function`, undefined for arguments whose exponential is too large."""

    def for_bounded(x: Numeric) -> Numeric:
        if not abs(x) <= MAX_BITS:
            raise Undefined("too large")
        return function(x)

    return for_bounded


@dataclass(frozen=True, slots=True)
class Function:
    """How to compute a function: numerically, and exactly for rational arguments if the result is rational."""

    numeric: Callable[..., Numeric]
    exact: Callable[..., Fraction | None] | None = None


def _integer(function: Callable[..., int]) -> Function:
    """A function whose values are integers, computed as such for both kinds of numbers."""
    return Function(lambda *xs: mpmath.mpf(function(*xs)), lambda *xs: Fraction(function(*xs)))


_CONSTANTS: dict[str, Numeric] = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}

FUNCTIONS: dict[str, Function] = {
    "add": Function(lambda *xs: mpmath.fsum(xs), lambda *xs: sum(xs, Fraction(0))),
    "multiply": Function(lambda *xs: mpmath.fprod(xs), _exact_product),
    "negate": Function(lambda x: -x, lambda x: -x),
    "divide": Function(lambda x, y: x / y, lambda x, y: x / y),
    "quotient": Function(lambda x, y: x / y, lambda x, y: x / y),  # of a division sign, which is no fraction bar
    "mixed": Function(lambda x, y: x + y, lambda x, y: x + y),  # a whole number and a fraction
    "power": Function(_numeric_power, _exact_power),
    "root": Function(lambda x, n: mpmath.root(x, _natural(n, 64)), _exact_root),  # principal
    "factorial": _integer(lambda n: math.factorial(_natural(n, MAX_FACTORIAL))),
    "binomial": _integer(lambda n, k: math.comb(_natural(n, MAX_FACTORIAL), _natural(k, MAX_FACTORIAL))),
    "absolute": Function(abs, abs),
    "floor": Function(_restricted_to_reals(mpmath.floor), lambda x: Fraction(math.floor(x))),
    "ceiling": Function(_restricted_to_reals(mpmath.ceil), lambda x: Fraction(math.ceil(x))),
    "exp": Function(_bounded(mpmath.exp)),
    "ln": Function(mpmath.ln),
    "log": Function(lambda x, base: mpmath.ln(x) / mpmath.ln(base)),
} | {
    name: Function(_bounded(getattr(mpmath, name)))
    for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh")
}
