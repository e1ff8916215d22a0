"""Stage B's last resort: both plain texts as expressions, equal if their difference is zero.

The language is what sympy's `parse_expr` makes of such texts: adjacent letters are a product, `2x`, `x2` and `2(x+1)`
are products, `n!` is a factorial. Texts that it refuses, or that mean something else there, are not equal to anything.
The two sides are parsed apart, so an answer cannot reach out of its brackets as it can in the course's grader.
"""

from __future__ import annotations

import re
from fractions import Fraction

import mpmath

from trl_ext.rewards.cursor import Cursor, scan
from trl_ext.rewards.expression import Apply, Constant, Expression, Number, Variable, are_equal

MAX_TOKENS = 1_000
MAX_DIGITS = 1_000

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:e[+-]?\d{1,4})?|\.\d+(?:e[+-]?\d{1,4})?)|([^\W\d_]\w*)|(\*\*|[-+*/^!()]))")
_UNSAFE_POWER = re.compile(r"\^[0-9]+\^|\^[0-9][0-9]+|\^\(|\^\{")
_LETTERS_OR_DIGITS = re.compile(r"\d+|\D")
# Names of sympy's or Python's with at most two different letters: no symbols, and no numbers either.
_TAKEN = frozenset("""re im ln ff rf li fu eye csc frac jn yn hn1 hn2 gff fft ntt oo zoo nan all id""".split())
_WHOLE_NAMES = _TAKEN | {"sqrt", "pi", "mu", "nu", "xi"}  # neither these nor names with an index are taken apart
_DECIMAL = re.compile(r"[+-]?[0-9]*\.[0-9]+")


def symbolically_equal(reference: str, candidate: str) -> bool:
    """Whether the difference of two plain texts is zero, for texts with at most two different letters."""
    letters = {c for c in (reference + candidate).replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > 2 or any(map(_UNSAFE_POWER.search, (reference, candidate))):
        return False
    if _DECIMAL.fullmatch(reference) and _DECIMAL.fullmatch(candidate):
        return _as_float(reference) == _as_float(candidate)
    try:
        trees = parse(reference), parse(candidate)
    except ValueError:
        return False
    return are_equal(*trees, complex_variables=True)


def _as_float(decimal: str) -> mpmath.mpf:
    """A decimal as sympy holds it: with the precision of the digits written, and at least 15."""
    with mpmath.workdps(max(15, len(decimal.lstrip("+-0.").replace(".", "")))):
        return mpmath.mpf(decimal)


def parse(text: str) -> Expression:
    """The tree of a plain text; a ValueError for one that is not an expression, too long or nested too deeply."""
    parser = _Parser(_tokens(text))
    tree = parser.sum()
    parser.take("")
    return tree


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for match in scan(_TOKEN, text):
        number, name, operator = match.groups()
        if len(tokens) > MAX_TOKENS or len(number or "") > MAX_DIGITS:
            raise ValueError("too long")
        if name and "_" not in name and name not in _WHOLE_NAMES:
            tokens += _LETTERS_OR_DIGITS.findall(name)
        else:
            tokens.append(number or name or operator)
    return tokens


class _Parser(Cursor):
    """Recursive descent, one token ahead."""

    def sum(self) -> Expression:
        terms = [self.product()]
        while sign := self.accept("+", "-"):
            term = self.product()
            terms.append(Apply("negate", (term,)) if sign == "-" else term)
        return terms[0] if len(terms) == 1 else Apply("add", tuple(terms))

    def product(self) -> Expression:
        factors = [self.signed()]
        while self.token and self.token not in "+-)":
            if self.accept("/"):
                factors.append(Apply("divide", (Number(Fraction(1)), self.signed())))
            elif self.accept("*"):
                factors.append(self.signed())
            else:
                factors.append(self.power())
        return factors[0] if len(factors) == 1 else Apply("multiply", tuple(factors))

    def signed(self) -> Expression:
        return self.nested(self._signed)

    def _signed(self) -> Expression:
        if sign := self.accept("+", "-"):
            return Apply("negate", (self.signed(),)) if sign == "-" else self.signed()
        return self.power()

    def power(self) -> Expression:
        base = self.atom()
        while self.accept("!"):
            if self.token == "!":
                raise ValueError("a double factorial")
            base = Apply("factorial", (base,))
        if self.accept("^", "**"):
            return Apply("power", (base, self.signed()))
        return base

    def atom(self) -> Expression:
        token = self.take()
        if token == "(":
            inside = self.nested(self.sum)
            self.take(")")
            return inside
        if token == "sqrt":
            if self.token != "(":
                raise ValueError("a root without brackets")
            return Apply("root", (self.atom(), Number(Fraction(2))))
        if token == "pi":
            return Constant("pi")
        if token[:1].isdecimal() or token[:1] == ".":
            return Number(Fraction(token))
        if token[:1].isalpha() and token not in _TAKEN:
            return Variable(token)
        raise ValueError(token)
