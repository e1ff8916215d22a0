r"""How far an expression is worked out: which operations are left that a finished answer would not have.

A finished number is a numeral, a fraction, a radical, a multiple of pi or the like: `\frac{3}{4}`, `1\frac12`,
`2\sqrt3+1`, `5\cdot10^3`. Powers, factorials and binomials of numbers are finished where they are of ten (`10^{6}`) or
have `LARGE` values, which people do not write out. Fractions need not be reduced unless they are whole, and radicals
not be simplified.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from trl_ext.rewards.expression import Apply, Constant, Expression, Number, exact_value, variables
from trl_ext.rewards.residues import log_size
from trl_ext.rewards.strict.answers import Answer, is_expression

LARGE = 10**6
EXPAND = "multiply out"  # a product of sums is left
FRACTION = "fraction of variables"
Key = tuple[tuple[Expression, Fraction], ...]  # a product without its coefficient: each factor with its exponent

_ZERO, _ONE, _TWO, _TEN = (Number(Fraction(n)) for n in (0, 1, 2, 10))
_UNIT = Fraction(1)
_OF_NUMBERS = ("absolute", "floor", "ceiling", "factorial", "binomial")
_RATIONAL = frozenset({"add", "multiply", "divide", "quotient", "mixed", "negate", "factorial", "binomial"})
_MAY_BE_RATIONAL = frozenset({"power", "root", "absolute", "floor", "ceiling"})
_ARITHMETIC = frozenset({"add", "multiply", "divide", "quotient", "mixed", "negate", "power", "root", *_OF_NUMBERS})


def work_left(node: Expression) -> frozenset[str]:
    """The operations that are left to do, by the names of their functions; `EXPAND` for products of sums."""
    if not isinstance(node, Apply) or is_numeral(node):
        return frozenset()
    if _is_rational(node):
        return frozenset(_operations(node))
    inner = frozenset[str]().union(*map(work_left, _parts(node)))
    if has_function(node, at_top=True):
        inner -= {FRACTION}
    return inner | _RULES.get(node.function, _work_in_function)(node)


def unfinished_sides(sides: Sequence[Answer]) -> frozenset[str]:
    """What is left to do on the sides of an equation or inequality that is not solved, like terms of both included.

    Its terms may be arranged as one likes: in factors, as fractions and as powers of numbers, `x^2+y^2=3^2`.
    """
    expressions = [side for side in sides if is_expression(side) and side != _ZERO]
    left = frozenset[str]().union(*map(work_left, expressions))
    keys = [_key(term) for side in expressions for term in terms(side)]
    if len(sides) == 2 and len(set(keys)) < len(keys):
        left |= {"add"}
    return left - {EXPAND, FRACTION, "power", "function"}


def is_numeral(node: Expression) -> bool:
    """Whether a node is a rational number as people write one, with one sign at most."""
    if isinstance(node, Apply) and node.function == "negate":
        inner = node.arguments[0]
        return _is_unsigned(inner) and not _has_sign(inner)
    return _is_unsigned(node)


def has_function(node: Expression, at_top: bool = False) -> bool:
    """Whether a node has a function that is not arithmetic, such as a sine, in it or at its top."""
    if not isinstance(node, Apply):
        return False
    return node.function not in _ARITHMETIC or (not at_top and any(map(has_function, node.arguments)))


def has_reciprocal(node: Expression) -> bool:
    r"""Whether a node has a power of a variable exponent that may be written as a fraction: `2^{-n}`, `(\frac12)^n`."""
    if not isinstance(node, Apply):
        return False
    if node.function == "power" and variables(node.arguments[1]):
        base, exponent = node.arguments
        if _signs(exponent) % 2 or (exact_value(base) or _UNIT).denominator > 1:
            return True
    return any(map(has_reciprocal, node.arguments))


def contains(node: Expression, function: str) -> bool:
    """Whether a node has a function, in it or at its top."""
    return isinstance(node, Apply) and (
        node.function == function or any(contains(argument, function) for argument in node.arguments)
    )


def factor_count(node: Expression) -> int:
    """How many factors a product with a sum in it has, a whole coefficient included; 0 for any other expression."""
    above, below = factors(node)
    counted = sums = 0
    for factor in above:
        base, exponent = _base_and_exponent(factor)
        if isinstance(factor, Number):
            counted += factor.value != 1
        elif exponent.denominator == 1 and exponent > 0:
            counted += min(exponent.numerator, 1000)
            sums += _is_sum(base) and bool(variables(base))
    return counted if sums and not below else 0


def factors(node: Expression) -> tuple[list[Expression], list[Expression]]:
    """The factors above and below the fraction bar."""
    if not isinstance(node, Apply) or node.function not in ("multiply", "divide", "quotient", "negate"):
        return [node], []
    above, below = list[Expression](), list[Expression]()
    for place, argument in enumerate(node.arguments):
        over, under = factors(argument)
        turned = place == 1 and node.function in ("divide", "quotient")
        above += under if turned else over
        below += over if turned else under
    return above, [factor for factor in below if factor != _ONE]


def terms(node: Expression) -> list[Expression]:
    """The terms of a sum, without their signs."""
    if isinstance(node, Apply) and node.function in ("add", "negate"):
        return [term for argument in node.arguments for term in terms(argument)]
    return [node]


def _is_rational(node: Expression) -> bool:
    """Whether a node is a rational number, which may be too large to compute."""
    if not isinstance(node, Apply):
        return isinstance(node, Number)
    if node.function in _RATIONAL:
        return all(map(_is_rational, node.arguments))
    if node.function == "power" and _is_whole(_without_sign(node.arguments[1])):
        return _is_rational(node.arguments[0])
    return node.function in _MAY_BE_RATIONAL and exact_value(node) is not None


# Numerals.


def _is_unsigned(node: Expression) -> bool:
    if isinstance(node, Number):
        return True
    if not isinstance(node, Apply):
        return False
    if node.function == "mixed":
        return 0 < (exact_value(node.arguments[1]) or 0) < 1
    if _is_power_of_ten(node) or _is_large(node):
        return True
    if (parts := _fraction(node)) is not None:
        return _is_proper(*parts)
    is_scaled = node.function == "multiply" and len(node.arguments) == 2 and isinstance(node.arguments[0], Number)
    return is_scaled and _is_power_of(node.arguments[1]) and exact_value(node.arguments[1]) != 1


def _fraction(node: Apply) -> tuple[Expression, Expression] | None:
    r"""The parts of `\frac{a}{b}` or `a/b`."""
    return (node.arguments[0], node.arguments[1]) if node.function == "divide" else None


def _is_proper(above: Expression, below: Expression) -> bool:
    """Whether two whole numbers, one of which may have a sign, are a fraction that is not whole itself."""
    signs = [_has_sign(part) for part in (above, below)]
    parts = [_without_sign(part) for part in (above, below)]
    if all(signs) or not all(_is_whole(part) or (isinstance(part, Apply) and _is_large(part)) for part in parts):
        return False
    if isinstance(parts[0], Number) and isinstance(parts[1], Number):
        return parts[1].value != 0 and (parts[0].value / parts[1].value).denominator != 1
    value = exact_value(Apply("divide", (parts[0], parts[1])))
    if value is None:  # 2005!/2004! is not large
        size = log_size(Apply("divide", (parts[0], parts[1])))
        return size is None or abs(size) > math.log(LARGE)
    return value.denominator != 1 and max(value.numerator, value.denominator) >= LARGE


def _has_sign(node: Expression) -> bool:
    if isinstance(node, Apply) and (parts := _fraction(node)) is not None:
        return any(map(_has_sign, parts))
    return isinstance(node, Apply) and node.function == "negate"


def _without_sign(node: Expression) -> Expression:
    return node.arguments[0] if isinstance(node, Apply) and node.function == "negate" else node


def _is_whole(node: Expression) -> bool:
    return isinstance(node, Number) and node.value.denominator == 1


def _is_power_of(node: Expression, base: Expression = _TEN) -> bool:
    is_power = isinstance(node, Apply) and node.function == "power" and node.arguments[0] == base
    return is_power and isinstance(node, Apply) and _is_whole(_without_sign(node.arguments[1]))


def _is_power_of_ten(node: Apply) -> bool:
    """`10^3` and `10^{-2}`; `10^2` is worked out as 100."""
    return _is_power_of(node) and node.arguments[1] not in (_ZERO, _ONE, _TWO)


def _is_large(node: Apply) -> bool:
    """Whether a power, factorial or binomial of whole numbers has a value that people do not write out."""
    if node.function not in ("power", "factorial", "binomial") or not all(map(_is_whole, node.arguments)):
        return False
    value = exact_value(node)
    return (value is None or value >= LARGE) and node.arguments[-1] != _ONE


# What is left to do.


def _operations(node: Expression) -> set[str]:
    """The functions in a rational number that is not written as a numeral."""
    if not isinstance(node, Apply) or is_numeral(node):
        return set()
    if (parts := _fraction(node)) is not None:
        return {"divide"}.union(*map(_operations, parts))
    name = node.function if node.function in _ARITHMETIC else "function"
    return {name}.union(*map(_operations, node.arguments))


def _parts(node: Apply) -> Sequence[Expression]:
    if node.function in ("multiply", "divide", "quotient", "negate"):  # the sign and 1/x in a product are not alone
        above, below = factors(node)
        return [*above, *below]
    return terms(node) if node.function == "add" else node.arguments


def _work_in_sum(node: Apply) -> set[str]:
    parts = terms(node)
    left = set[str]()
    keys = [_key(part) for part in parts]
    if max(Counter(keys).values()) > 1 or _ZERO in parts:  # two rational terms have the same, empty key
        left.add("add")
    if any(_signs(argument) > 1 for argument in node.arguments):
        left.add("negate")
    if any(_is_sum(factor) for part in parts for factor in factors(part)[0]):
        left |= {EXPAND} if variables(node) else {"add"}
    return left


def _work_in_product(node: Apply) -> set[str]:
    above, below = factors(node)
    left = set[str]()
    rational = [factor for factor in above if _is_rational(factor) and factor != _ONE]
    if len(rational) > 1 or _has_needless_one(node):
        left.add("multiply")
    divisors = [factor for factor in below if _is_rational(factor)]
    if len(divisors) > 1 or any(_has_i(factor) for factor in below) or _is_whole_quotient(rational, divisors):
        left.add("divide")
    if _signs(node) > 1:
        left.add("negate")
    if any(map(variables, below)):
        left.add(FRACTION)
    over, under = ([_base(factor) for factor in side if not _is_rational(factor)] for side in (above, below))
    bases = [base for base in over if not _is_sum(base)]
    if len(set(bases)) < len(bases) or sum(map(_is_radical, bases)) > 1:
        left.add("multiply")
    if set(over) & set(under):
        left.add("divide")
    return left | _work_in_brackets(above, below, rational)


def _work_in_brackets(
    above: Sequence[Expression], below: Sequence[Expression], rational: Sequence[Expression]
) -> set[str]:
    sums = [factor for factor in above if _is_sum(factor)]
    others = [factor for factor in above if not _is_rational(factor) and not _is_sum(factor)]
    if not sums:
        return set()
    if not any(map(variables, above)):
        return {"multiply"} if len(sums) + len(others) > 1 else set()
    return {EXPAND} if len(sums) + len(others) > 1 or (rational and not below) else set()


def _work_in_power(node: Apply) -> set[str]:
    base, exponent = node.arguments
    value = exact_value(exponent)
    if _is_sum(base) and value is not None and value.denominator == 1 and value > 1:
        return {EXPAND} if variables(base) else {"power"}
    left = {"power"} if value in (0, 1) or base == Constant("i") or _has_i(exponent) else set[str]()
    if _logarithms_base(exponent) == base:
        left.add("power")
    is_compound = isinstance(base, Apply) and base.function in ("power", "multiply", "divide", "negate")
    if (is_compound and not _is_rational(base)) or (_is_radical(base) and value is not None):
        left.add("power")
    if value is not None and value < 0 and variables(base):
        left.add(FRACTION)
    return left


def _work_in_root(node: Apply) -> set[str]:
    inner, index = node.arguments
    degree = exact_value(index) or Fraction(2)
    if degree == 1:
        return {"root"}
    if not variables(inner):
        return {"root"} if contains(inner, "root") else set()
    exponents = [_base_and_exponent(factor)[1] / degree for factor in factors(inner)[0] if not _is_rational(factor)]
    is_power = not any(map(_is_sum, factors(inner)[0])) and all(exponent.denominator == 1 for exponent in exponents)
    return {"root"} if is_power else set()


def _work_in_function(node: Apply) -> set[str]:
    argument = node.arguments[0]
    powers_base = argument.arguments[0] if isinstance(argument, Apply) and argument.function == "power" else argument
    if _logarithms_base(node) == powers_base:  # the logarithm of a power
        return {"function"}
    if variables(node):
        return set()
    return {node.function if node.function in _OF_NUMBERS else "function"}


_RULES = {
    "add": _work_in_sum,
    "mixed": lambda _: set[str](),
    "multiply": _work_in_product,
    "divide": _work_in_product,
    "quotient": _work_in_product,
    "negate": _work_in_product,
    "power": _work_in_power,
    "root": _work_in_root,
}


# Parts of expressions.


def _key(term: Expression) -> Key:
    """What like terms have in common; a radical by what is left under it once squares are out, as of 8 and of 2."""
    powers = Counter[Expression]()
    above, below = factors(term)
    for side, sign in ((above, 1), (below, -1)):
        for factor in side:
            if not _is_rational(factor):
                base, exponent = _base_and_exponent(factor)
                powers[_simplest_radical(base)] += sign * exponent  # type: ignore[assignment]
    return tuple(sorted(powers.items(), key=repr))  # type: ignore[arg-type]


def _base_and_exponent(factor: Expression) -> tuple[Expression, Fraction]:
    if not isinstance(factor, Apply) or factor.function != "power" or _is_rational(factor.arguments[0]):
        return factor, _UNIT
    exponent = exact_value(factor.arguments[1])
    return (factor, _UNIT) if exponent is None else (factor.arguments[0], exponent)


def _base(factor: Expression) -> Expression:
    return _base_and_exponent(factor)[0]


def _simplest_radical(node: Expression) -> Expression:
    if not _is_radical(node) or not isinstance(node, Apply):
        return node
    radicand, index = exact_value(node.arguments[0]), exact_value(node.arguments[1])
    if radicand is None or radicand.denominator != 1 or index != 2 or not 1 < radicand < 10**9:
        return node
    left = int(radicand)
    for n in range(2, 1000):
        while left % (n * n) == 0:
            left //= n * n
    return Apply("root", (Number(Fraction(left)), node.arguments[1]))


def _is_sum(node: Expression) -> bool:
    """Whether a node is a sum, or a power of one."""
    base = _base(node)
    return isinstance(base, Apply) and (base.function == "add" or (base is not node and _is_sum(base)))


def _is_radical(node: Expression) -> bool:
    return isinstance(node, Apply) and node.function == "root" and _is_rational(node.arguments[0])


def _has_i(node: Expression) -> bool:
    return node == Constant("i") or (isinstance(node, Apply) and any(map(_has_i, node.arguments)))


def _has_needless_one(node: Expression) -> bool:
    r"""`1\cdot x`, `-x\cdot 1` and `\frac{x}{1}`."""
    if not isinstance(node, Apply) or node.function not in ("multiply", "divide", "quotient", "negate"):
        return False
    if node.function == "multiply" and _ONE in node.arguments:
        return True
    is_divided_by_one = node.function in ("divide", "quotient") and node.arguments[1] == _ONE
    return is_divided_by_one or any(map(_has_needless_one, node.arguments))


def _is_whole_quotient(above: Sequence[Expression], below: Sequence[Expression]) -> bool:
    r"""Whether the numbers of a fraction are to be divided, as in `\frac{6\pi}{2}` and `\frac{2}{2x}`."""
    if not below:
        return False
    over = exact_value(Apply("multiply", (_ONE, *above)))
    under = exact_value(Apply("multiply", (_ONE, *below)))
    return over is not None and under is not None and under != 0 and (over / under).denominator == 1


def _signs(node: Expression) -> int:
    """How many signs a product has: `-(-x)` has two."""
    if not isinstance(node, Apply) or node.function not in ("multiply", "divide", "quotient", "negate"):
        return 0
    return (node.function == "negate") + sum(map(_signs, node.arguments))


def _logarithms_base(node: Expression) -> Expression | None:
    if not isinstance(node, Apply) or node.function not in ("ln", "log"):
        return None
    return Constant("e") if node.function == "ln" else node.arguments[1]
