"""Rational numbers too large to write out, such as 1/2004!: told apart by their residues modulo random primes.

Two different numbers agree modulo four primes of 61 bits with a probability of about 2 to the power of -240. The primes
depend on the two expressions, so that none can be written that agrees with another one modulo known primes.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeGuard

import mpmath

from trl_ext.rewards.expression import Apply, Expression, Number, Undefined, exact_value

MAX_FACTORIAL = 10_000
PRIMES = 4
_ARITHMETIC = frozenset("add multiply divide quotient mixed negate power factorial binomial".split())
_GROWING = frozenset({"power", "factorial", "binomial"})
_BITS = 61
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough for numbers of 64 bits


def same_residues(a: Expression, b: Expression) -> bool | None:
    """Whether two rational expressions have the same residues; None if one has none that is computed."""
    if not is_arithmetic(a) or not is_arithmetic(b):
        return None
    draw = random.Random(hash((_seed(a), _seed(b))))
    try:
        for _ in range(PRIMES):
            field = _Field(_prime(draw))
            if field.value(a) != field.value(b):
                return False
    except (Undefined, ValueError):  # no inverse
        return None
    return True


def is_arithmetic(node: Expression) -> bool:
    """Whether an expression is made of rational numbers by functions that have residues."""
    return isinstance(node, Number) or (
        isinstance(node, Apply) and node.function in _ARITHMETIC and all(map(is_arithmetic, node.arguments))
    )


def may_be_large(node: object) -> TypeGuard[Apply]:
    """Whether a number may be too large to compute: it has a power, a factorial or a binomial."""
    if type(node) is not Apply:  # asked of every pair that is not equal, and most are plain numbers
        return False
    for part in node.arguments:
        if type(part) is Apply and may_be_large(part):
            return True
    return node.function in _GROWING


def log_size(node: Expression) -> float | None:
    """The natural logarithm of a product or quotient of powers, factorials and positive numbers; None of others."""
    try:
        return float(_log(node))
    except (Undefined, OverflowError):
        return None


def _log(node: Expression) -> mpmath.mpf:
    if isinstance(node, Number) and node.value > 0:
        return mpmath.log(node.value.numerator) - mpmath.log(node.value.denominator)
    if not isinstance(node, Apply):
        raise Undefined("no product")
    if node.function == "multiply":
        return mpmath.fsum(map(_log, node.arguments))
    if node.function in ("divide", "quotient"):
        return _log(node.arguments[0]) - _log(node.arguments[1])
    if node.function == "power":
        return _log(node.arguments[0]) * mpmath.mpf(_whole(node.arguments[1]))
    if node.function == "factorial":
        return mpmath.loggamma(_natural(node.arguments[0], 10**9) + 1)
    raise Undefined(node.function)


class _Field:
    """The integers modulo a prime, in which rational expressions have values."""

    def __init__(self, prime: int) -> None:
        self.prime, self.factorials = prime, [1]

    def value(self, node: Expression) -> int:
        """The residue of an expression; a ValueError for 1/0, `Undefined` for what is not rational or too large."""
        if isinstance(node, Number):
            return node.value.numerator * self.inverse(node.value.denominator) % self.prime
        if not isinstance(node, Apply):
            raise Undefined("no rational number")
        if node.function in ("factorial", "binomial"):
            return self.of_factorials(node.function, [_natural(one, MAX_FACTORIAL) for one in node.arguments])
        if node.function == "power":
            return pow(self.value(node.arguments[0]), _whole(node.arguments[1]), self.prime)
        return self.of_values(node.function, [self.value(argument) for argument in node.arguments])

    def of_values(self, function: str, values: Sequence[int]) -> int:
        """The residue of a function of arithmetic."""
        if function in ("add", "mixed"):
            return sum(values) % self.prime
        if function == "multiply":
            return math.prod(values) % self.prime
        if function == "negate":
            return -values[0] % self.prime
        if function in ("divide", "quotient"):
            return values[0] * self.inverse(values[1]) % self.prime
        raise Undefined(function)

    def of_factorials(self, function: str, numbers: Sequence[int]) -> int:
        """The residue of a factorial or of a binomial coefficient."""
        while len(self.factorials) <= numbers[0]:
            self.factorials.append(self.factorials[-1] * len(self.factorials) % self.prime)
        if function == "factorial":
            return self.factorials[numbers[0]]
        n, k = numbers
        if k > n:
            return 0
        return self.factorials[n] * self.inverse(self.factorials[k] * self.factorials[n - k]) % self.prime

    def inverse(self, value: int) -> int:
        """One divided by a value."""
        return pow(value, -1, self.prime)


def _natural(node: Expression, largest: int) -> int:
    value = _whole(node)
    if not 0 <= value <= largest:
        raise Undefined("no natural number, or too large")
    return value


def _whole(node: Expression) -> int:
    value = exact_value(node)
    if value is None or value.denominator != 1:
        raise Undefined("no whole number")
    return value.numerator


def _seed(node: Expression) -> int:
    """The same in every process, unlike the hash of a text."""
    if isinstance(node, Number):
        return hash(Fraction(node.value))
    if isinstance(node, Apply):
        return hash((zlib.crc32(node.function.encode()), *map(_seed, node.arguments)))
    return zlib.crc32(node.name.encode())


def _prime(draw: random.Random) -> int:
    while not _is_prime(candidate := draw.getrandbits(_BITS) | 1 << (_BITS - 1) | 1):
        pass
    return candidate


def _is_prime(n: int) -> bool:
    """Miller and Rabin's test with fixed witnesses."""
    twos = (n - 1 & -(n - 1)).bit_length() - 1
    for witness in _WITNESSES:
        x = pow(witness, n - 1 >> twos, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True
